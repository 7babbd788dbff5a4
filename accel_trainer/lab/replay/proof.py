"""Compares the rows of a replay with those of the run: what is equal, and what differs first."""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer.commands import Difference, Rows

from ..rows import shared


@dataclass(frozen=True)
class Proof:
    """How the rows that a run and its replay both have compare."""

    num_rows: int = 0
    num_digests: int = 0
    first_difference: str | None = None
    """The first value that differs; None: all that were compared are equal."""

    def __add__(self, later: Proof) -> Proof:
        """Return the comparison of two stretches, `later` being the one of the later steps."""
        return Proof(
            self.num_rows + later.num_rows,
            self.num_digests + later.num_digests,
            self.first_difference or later.first_difference,
        )

    def __str__(self) -> str:
        if self.first_difference is not None:
            return f"DIFFERENT from the run: {self.first_difference}"
        if not self.num_rows:
            return "the run has no row in these steps, so nothing could be compared"
        equal = f"{self.num_rows} of {self.num_rows} rows on the way are equal"
        if not self.num_digests:
            return equal
        return f"{self.num_digests} of {self.num_digests} digests and {equal}"


def compare(recorded: Rows, replayed: Rows) -> Proof:
    """Compare the rows of a run with those of its replay.

    Names that only one of two rows has are passed over: different callbacks logged them.
    """
    last = max((step for step, _ in replayed), default=0)
    num_rows = num_digests = 0
    for place in recorded:
        step, event = place
        if place not in replayed:
            if step >= last:
                continue  # a replay ends without the evaluation of its last step
            fact = f"the {event} row of step {step} is missing"
            return Proof(num_rows, num_digests, fact)
        one, other = shared({place: recorded[place]}, replayed)
        if (found := Difference.of(one, other)) is not None:
            name = min(found.names)
            change = "{} -> {}".format(*found.values(name))
            return Proof(num_rows, num_digests, f"step {step}, {name} {change}")
        num_rows += 1
        num_digests += sum(name.startswith("digest/") for name in one[place])
    return Proof(num_rows, num_digests)
