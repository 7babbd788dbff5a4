"""What the rules find, and which process found it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...preflight import Rule, Situation


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, with its value and its fix in one line, and the process that found it."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    rank: int = 0


def examine(now: Situation, rules: Iterable[Rule]) -> list[Finding]:
    """Return what the rules find in this process."""
    found = [(rule, rule.find(now)) for rule in rules]
    return [Finding(rule.code, rule.severity, message, rank_in(now)) for rule, message in found if message]


def rank_in(now: Situation) -> int:
    """Return which process this is."""
    return int(now.environ.get("RANK", 0))
