"""What an audit says of one thing."""

from __future__ import annotations

from typing import Literal, NamedTuple

Outcome = Literal["equal", "DIFFERS", "not checked"]
Found = tuple[Outcome, str]
"""What a check has found: its outcome, and what was compared, or the first difference."""


class Verdict(NamedTuple):
    """Whether `what` is as the run says, with what was compared, or the first difference."""

    what: str
    outcome: Outcome
    detail: str


def judge(difference: str | None, *, compared: str) -> Found:
    """Return what a check has found that compared something; None: no difference."""
    return ("equal", compared) if difference is None else ("DIFFERS", difference)
