"""What a workload does to a broker before anybody sends it: messages held, hops, releases, against what is measured.

:mod:`~bide.pipelines.plan.workload` makes classes of messages of a table or of flows,
:mod:`~bide.pipelines.plan.occupancy` follows them down the levels of a :class:`~bide.pipelines.plan.levels.PlanLevels`,
and :mod:`~bide.pipelines.plan.capacity` judges what comes out.
"""

from __future__ import annotations
