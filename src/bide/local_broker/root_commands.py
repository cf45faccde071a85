"""Linux commands of root, for the disks and the networks of nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from bide.errors import LocalBrokerError


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCommands:
    """The commands that a feature of a cluster runs as root.

    Attributes:
        feature: the feature, in the plural, for errors.
        option: what to omit to start the cluster without it.
        package: the package of the commands.
    """

    feature: str
    option: str
    package: str

    def check(self, program: str) -> None:
        """Check that this user can run a command.

        Raises:
            LocalBrokerError: this is not root on Linux, or the command is missing.
        """
        if sys.platform != "linux" or os.geteuid() != 0:
            raise LocalBrokerError(f"{self.feature} need root on Linux: omit {self.option}")
        self.find(program)

    def find(self, program: str) -> str:
        """Return the path of a command.

        Raises:
            LocalBrokerError: the command is missing.
        """
        path = shutil.which(program)
        if path is None:
            raise LocalBrokerError(f"{self.feature} need the command '{program}': install {self.package}")
        return path

    def run(self, program: str, *arguments: str) -> None:
        """Run a command.

        Raises:
            LocalBrokerError: the command is missing, or the system refused.
        """
        done = subprocess.run([self.find(program), *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LocalBrokerError(
                f"'{' '.join((program, *arguments))}' failed with status {done.returncode}: {done.stderr.strip()}; "
                f"omit {self.option} if this system does not allow them"
            )
