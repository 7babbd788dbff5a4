"""What an audit says of one thing."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Verdict(NamedTuple):
    """Whether `what` is as the run says, with what was compared, or the first difference."""

    what: str
    outcome: Literal["equal", "DIFFERS", "not checked"]
    detail: str


def judge(what: str, difference: str | None, *, compared: str) -> Verdict:
    """Return the verdict of a check that compared something; None: it found no difference."""
    if difference is None:
        return Verdict(what, "equal", compared)
    return Verdict(what, "DIFFERS", difference)
