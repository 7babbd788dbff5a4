"""The verdict of an audit on one thing."""

from __future__ import annotations

from typing import Literal, NamedTuple

Outcome = Literal["equal", "DIFFERS", "not checked"]
Found = tuple[Outcome, str]
"""What a check has found: its outcome, and what was compared, or the first difference."""


class Verdict(NamedTuple):
    """Whether `what` is as recorded, with what was compared, or the first difference."""

    what: str
    outcome: Outcome
    detail: str


def judge(difference: str | None, *, compared: str) -> Found:
    """Return the finding of a check that compared something; `difference` None: it is equal."""
    return ("equal", compared) if difference is None else ("DIFFERS", difference)
