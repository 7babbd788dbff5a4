"""Checks of one process, and what they found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...core.errors import UserError
from ...run.config import RecipeConfig


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What the checks look at: a config, the recipe's source, and the environment."""

    config: RecipeConfig
    source: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return int(self.environ.get("RANK", 0))

    @property
    def num_processes(self) -> int:
        """The number of processes of the launch, on all machines."""
        return int(self.environ.get("WORLD_SIZE", 1))

    @property
    def num_local_processes(self) -> int:
        """The number of processes of the launch on this machine."""
        return int(self.environ.get("LOCAL_WORLD_SIZE", 1))


@dataclass(frozen=True)
class Check:
    """A check of one process.

    `run` returns what is wrong with its value and its fix in one line, or raises it as a UserError
    or OSError. Its docstring is what should hold.
    """

    code: str
    severity: Literal["error", "warning"]
    run: Callable[[LaunchContext], str | None]

    def find(self, now: LaunchContext) -> str | None:
        """Return what is wrong, or None."""
        try:
            return self.run(now)
        except (UserError, OSError) as error:
            return str(error.args[-1])


@dataclass(frozen=True)
class Finding:
    """A problem, with its value and its fix in one line, and the process that found it."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    rank: int = 0


def examine(now: LaunchContext, checks: Iterable[Check]) -> list[Finding]:
    """Return what the checks find in this process."""
    return [
        Finding(check.code, check.severity, message, now.rank)
        for check in checks
        if (message := check.find(now))
    ]
