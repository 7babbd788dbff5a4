"""Finds the settings that make the results of two runs differ, by training one of them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_trainer import OutputError
from accel_trainer.commands import (
    Difference,
    RunReader,
    Say,
    by_place,
    compare_runs,
    complete_by_step,
    counted,
    last_step,
    read_rows,
)

from ..replay.at import check_step
from ..replay.replay import Replay, environment_changes
from ..why.records import differences
from .search import find_changes
from .trials import Trial, Trials, first_difference

_MAX_STEPS = 200
_STEPS_BEYOND = 2  # an evaluation and the end of an epoch
# A resume may change these, since which samples there are is checked separately and the last step
# comes later. Both change the result of a whole run.
_ALSO_TRIED = ("batch.leave_out", "trainer.max_steps")


@dataclass(frozen=True)
class Effect:
    """One setting that changes the result, or several that cannot be changed one by one."""

    names: Sequence[str]
    step: int
    """The first step with a different result."""
    parts: Sequence[str]
    """What differs there: parts of a checkpoint, `samples`, `evaluation`, `learning rate`, and so
    on."""
    is_alone: bool
    """Whether it does so with A's values of all others; otherwise, only with B's values of some."""


@dataclass(frozen=True)
class Effects:
    """The settings in which two runs differ, by what they change."""

    until: int
    """The last step that was trained from the start."""
    tail: tuple[int, int] | None
    """The steps at the end that were also trained: after the first number, up to the second."""
    effects: Sequence[Effect]
    """In the order of their steps."""
    nothing: Sequence[str]
    """Settings that change nothing in all these steps, nor the learning rate of any step."""
    no_part: Sequence[str]
    """Settings that do not affect training, and were not tried."""
    not_tried: Sequence[str]
    """What else differs: code, versions, data, hardware."""
    repeats_second: bool | None
    """Whether A with all of B's values gives what B has recorded; None: nothing is recorded."""
    num_trainings: int
    num_steps: int


def find_effects(
    first: RunReader,
    second: RunReader,
    *,
    recipe: Path | None,
    until: int | None,
    num_jobs: int,
    say: Say,
) -> Effects:
    """Return which settings of `second` change the result of `first`.

    `first` is trained again up to step `until` (None: a little past an evaluation and an epoch, at
    most 200), with some of the values of `second`, and so is its end, from a checkpoint near it. At
    most `num_jobs` trainings run at once. `say` is called with a line before each part.

    Raises:
        ConfigError: the first run has no step `until`.
        ConfigError, OutputError: it cannot be trained again, or does not repeat itself.
    """
    settings = [name for name, _, _ in compare_runs(first, second)["config"]]
    found = differences(first, second)
    decisive = [name for name, _, _ in (*found.decisive, *found.order_of_sums)]
    tried = [name for name in settings if name in decisive or name in _ALSO_TRIED]
    not_tried = [name for name in decisive if name not in settings]
    if first.origin != second.origin:
        not_tried.append("initial weights")
    limit = _default_until(first) if until is None else until
    effects: list[Effect] = []
    tail = None
    all_trials = []
    repeats_second = None
    if tried:
        check_step(first, limit)
        replay = Replay.of(first, recipe)
        trials = Trials(replay, second.settings, after=0, until=limit, num_jobs=num_jobs)
        _announce(trials, tried, say)
        _check_repeats(first, trials)
        (whole,) = trials([frozenset(tried)])
        if whole.refused:
            fact = f"A cannot be trained with all of B's values ({whole.refused})"
            raise OutputError("EFFECT", f"{fact}: give a recipe that can with --recipe")
        repeats_second = _repeats(second, whole)
        effects = _effects(tried, trials)
        all_trials.append(trials)
        rest = _without(tried, effects)
        if rest and (end := _trials_of_end(first, trials)) is not None:
            steps = f"steps {end.begin + 1} to {end.until}"
            say(f"retraining {steps} with the settings that changed nothing")
            all_trials.append(end)
            if not end([frozenset(rest)])[0].refused:
                tail = (end.begin, end.until)
                effects += _effects(rest, end)
    return Effects(
        until=limit,
        tail=tail,
        effects=sorted(effects, key=lambda each: each.step),
        nothing=_without(tried, effects),
        no_part=[name for name in settings if name not in tried],
        not_tried=not_tried,
        repeats_second=repeats_second,
        num_trainings=sum(len(each.known) for each in all_trials),
        num_steps=sum(each.num_steps for each in all_trials),
    )


def _default_until(run: RunReader) -> int:
    evaluated = [int(row["optimizer_step"]) for row in run.evaluations()]
    first = [step for step in evaluated if step > run.begin][:1]
    wanted = max([run.begin + (run.steps_per_epoch or 0), *first]) + _STEPS_BEYOND
    return min(wanted, run.begin + _MAX_STEPS, last_step(run))


def _announce(trials: Trials, tried: Sequence[str], say: Say) -> None:
    run = trials.replay.run
    if changes := environment_changes(run):
        say(f"note: differs from the run, so only approximate: {', '.join(changes)}")
    num_most = 3 + 2 * len(tried)
    say(
        f"A and B differ in {counted(len(tried), 'setting')}: training A up to step {trials.until} "
        "with A's and with B's values, then with some of B's "
        f"(at most {num_most} times, fewer if few of them matter)"
    )


def _check_repeats(run: RunReader, trials: Trials) -> None:
    """Raise OutputError unless a run repeats its record, or at least itself."""
    (base,) = trials([frozenset()])
    if base.refused:
        raise OutputError("EFFECT", f"A cannot be trained again: {base.refused}")
    if _repeats(run, base):
        return
    if trials.elsewhere(after=0, until=trials.until)([frozenset()]) != [base]:
        fact = f"{run.folder} does not repeat itself, so nothing can be compared with it"
        raise OutputError("EFFECT", f"{fact}: accel-trainer why {run.folder} finds the reason")


def _repeats(run: RunReader, trial: Trial) -> bool | None:
    """Whether a trial gives the digests and evaluations of a run; None: the run has none."""
    num_compared = 0
    for (step, event), row in by_place(read_rows(run.folder, after=0)).items():
        again = trial.steps.get((step, "step"), {})
        if event == "eval":
            mine = {"evaluation": row}
        else:  # the digest of samples is about all steps since the row before
            digests = {name: row.get(f"digest/{name}") for name in again if name != "samples"}
            mine = {name: value for name, value in digests.items() if value is not None}
        for name in mine.keys() & again.keys():
            if mine[name] != again[name]:
                return False
            num_compared += 1
    return True if num_compared else None


def _effects(names: Sequence[str], trials: Trials) -> list[Effect]:
    """Return which of `names` change the result, and confirm each by itself."""
    found = find_changes(names, trials)
    rest = [name for name in names if all(name not in change.names for change in found)]
    base, without, *alone = trials(
        [frozenset(), frozenset(rest), *(frozenset(change.names) for change in found)]
    )
    effects = []
    for change, trial in zip(found, alone, strict=True):
        difference = None if trial.refused else first_difference(base, trial)
        is_alone = difference is not None
        if difference is None:
            difference = first_difference(change.before, change.after)
        effects.append(_effect(change.names, difference, is_alone=is_alone))
    if without != base:  # B's values of other settings hid an effect
        for change in find_changes(rest, trials):
            difference = first_difference(change.before, change.after)
            effects.append(_effect(change.names, difference, is_alone=True))
    return effects


def _effect(names: Sequence[str], difference: Difference | None, *, is_alone: bool) -> Effect:
    assert difference is not None  # the trials are not equal
    return Effect(names, difference.step, difference.names, is_alone)


def _without(names: Sequence[str], effects: Sequence[Effect]) -> list[str]:
    found = {name for effect in effects for name in effect.names}
    return [name for name in names if name not in found]


def _trials_of_end(run: RunReader, trials: Trials) -> Trials | None:
    """Return trials of the last steps of a run, at most as many as from the start.

    None: the run ends before, or keeps no checkpoint from which they could be trained.
    """
    end = last_step(run)
    steps = [step for step in complete_by_step(run.folder) if end - trials.until <= step < end]
    return trials.elsewhere(after=min(steps), until=end) if end > trials.until and steps else None
