"""What the checks found, and on which process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...run.preflight import Check, LaunchContext


@dataclass(frozen=True)
class Finding:
    """A problem, with its value and its fix in one line, and the process that found it."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    rank: int = 0


def examine(now: LaunchContext, checks: Iterable[Check]) -> list[Finding]:
    """Return what the checks find in this process."""
    found = [(check, check.find(now)) for check in checks]
    return [Finding(check.code, check.severity, message, rank_in(now)) for check, message in found if message]


def rank_in(now: LaunchContext) -> int:
    """Return which process this is."""
    return int(now.environ.get("RANK", 0))
