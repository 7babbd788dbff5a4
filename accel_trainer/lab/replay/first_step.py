"""Finds the first step of a run for which a condition holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_trainer.commands import Row, Say

from .again import Again
from .condition import Condition
from .proof import Proof
from .replay import Replay, note_changes
from .stretches import Stretch, num_steps

Numbers = Mapping[str, float]
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class FirstStep:
    """The first step for which a condition holds."""

    step: int
    row: int
    """The step of the first row in which it holds; later than `step` if the row is a mean."""
    values: Numbers
    """The columns that the condition reads, at `step`."""
    later: Mapping[int, Numbers]
    """The same for the later steps of the row for which it also holds."""
    proof: Proof
    """How the steps that were trained again for it compare with the run."""


def numbers_by_step(rows: Iterable[Row]) -> dict[int, dict[str, float]]:
    """Return all numbers of the rows of a step, in the order of the steps."""
    found: dict[int, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: int(row["optimizer_step"])):
        numbers = found.setdefault(row["optimizer_step"], {})
        for name, value in row.items():
            if isinstance(value, int | float) or value in _NOT_FINITE:
                numbers[name] = float(value)
    return found


def find_first_step(
    replay: Replay,
    condition: Condition,
    rows: Sequence[Row],
    *,
    callbacks: Sequence[Path],
    from_start: bool,
    folder: Path,
    say: Say,
) -> FirstStep | None:
    """Return the first step for which `condition` holds, within the first row in which it does.

    None: it holds in none of `rows`. If the row has means over several steps, these are trained
    again in the new `folder` with `callbacks`, from the start of the run if these have a state.

    Raises:
        OutputError: the recipe failed.
    """
    found = _holding(condition, numbers_by_step(rows))
    if not found:
        return None
    row, values = next(iter(found.items()))
    training = [each for each in rows if each["event"] in ("train", "log")]
    steps = [each["optimizer_step"] for each in training if each["optimizer_step"] < row]
    before = max(steps, default=replay.begin)
    measured = {name for each in training if each["optimizer_step"] == row for name in each}
    if row - before == 1 or not condition.names & measured:
        return FirstStep(row, row, values, {}, Proof())
    mean = f"step {row}, the mean of the steps {before + 1} to {row}"
    say(f"it holds first in the row of {mean}: {tell(values)}")
    stretch = Stretch(replay.begin if from_start else before, row)
    say(f"training {num_steps(replay, stretch)} steps again, with a row for each")
    note_changes(replay.run)
    trained = Again(replay, callbacks, every=1).train(stretch, folder)
    single = {
        step: numbers for step, numbers in numbers_by_step(trained.rows).items() if step > before
    }
    found = _holding(condition, single)
    if not found:
        say("it holds for none of these steps alone, only for their mean")
        return FirstStep(row, row, values, {}, trained.proof)
    step, *later = found
    return FirstStep(step, row, found[step], {each: found[each] for each in later}, trained.proof)


def tell(values: Numbers) -> str:
    """Return numbers with their names as text."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def _holding(condition: Condition, numbers: Mapping[int, Numbers]) -> dict[int, Numbers]:
    """Return what the condition reads at each step for which it holds."""
    return {
        step: {name: known[name] for name in sorted(condition.names) if name in known}
        for step, known in numbers.items()
        if condition.holds(known)
    }
