"""Capacity planning: the load of a workload on a broker, compared with measured limits.

:mod:`~bide.pipelines.plan.workload` converts a table or flows to classes of equal messages,
:mod:`~bide.pipelines.plan.occupancy` computes the occupancy of each level of a
:class:`~bide.pipelines.plan.levels.PlanLevels`, and :mod:`~bide.pipelines.plan.capacity` compares the results with
measured limits.
"""

from __future__ import annotations
