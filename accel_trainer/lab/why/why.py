"""Finds the first difference of two runs: from their files, then by training a part again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_trainer import ConfigError
from accel_trainer.commands import (
    Change,
    Difference,
    RunReader,
    Say,
    by_place,
    complete_by_step,
    counted,
    last_step,
    read_rows,
    read_run,
    shortened,
)

from ..kept import kept_folder
from ..replay.at import check_step
from ..replay.replay import Replay, environment_changes
from ..rows import shared
from .causes import Cause, explain, order_of_sums
from .finding import Finding
from .records import (
    CHECKPOINT,
    Differences,
    compare_checkpoints,
    count_tensors,
    differences,
    last_equal,
    of_checkpoints,
    rows_of_both,
    steps_with_digests,
)
from .sides import Retrained, Side, retrain
from .story import Story, short
from .within import Pair, trace_step

_MAX_VALUE = 60
_MAX_TRACES = 3
_MAX_NAMES = 3
_CALLBACKS = "variables.ACCEL_TRAINER_CALLBACKS"


def why(
    run_a: Path,
    run_b: Path | None = None,
    *,
    recipes: Sequence[Path] = (),
    until: int | None = None,
    keep: Path | None = None,
    say: Say | None = None,
) -> Finding:
    """Return the first difference of two runs; of one, whether it repeats itself.

    `recipes` are the files to run: one for both, one for each, or none for the recorded ones. The
    steps after `until` are not looked at. The replays are kept in the folder `keep`, which must be
    new. `say` is called with each line of the answer, as it is found.

    Raises:
        ConfigError, OutputError: a run cannot be read, or cannot be trained again.
    """
    story = Story(say or (lambda line: None))
    runs = [read_run(run) for run in (run_a, run_b) if run is not None]
    if len(recipes) > len(runs):
        fact = f"--recipe is given {len(recipes)} times for {counted(len(runs), 'run')}"
        raise ConfigError("RECIPE", f"{fact}: give it once, or once for each run")
    with kept_folder(keep) as folder:
        if len(runs) == 1:
            return _repeats_itself(story, runs[0], recipes, until, folder)
        return _differ(story, runs[0], runs[1], recipes, until, folder)


# --- two runs ---


def _differ(
    story: Story,
    first: RunReader,
    second: RunReader,
    recipes: Sequence[Path],
    until: int | None,
    folder: Path,
) -> Finding:
    story(f"A = {first.folder}, B = {second.folder}")
    changes = _tell_differences(story, first, second)
    limit = min([last_step(first), last_step(second), *([] if until is None else [until])])
    if not limit:
        check_step(min(first, second, key=last_step), limit)
    found = _from_files(story, first, second, limit)
    if found is None:
        return Finding(is_equal=True, text=story.text)
    after, until, is_known = found
    for run in (first, second):
        if until <= run.begin:
            fact = f"{run.folder} branched off after that, from {run.settings.get('run.resume')}"
            story(f"{fact}: compare the run that it comes from")
            return Finding(is_equal=False, text=story.text)
    chosen = [*recipes, *recipes][:2] if recipes else [None, None]
    replays = Replay.of_each([first, second], chosen)
    sides = [Side(name, replay, after) for name, replay in zip("AB", replays, strict=True)]
    for side in sides:
        _tell_approximate(story, side.name, side.replay.run)
    _tell_cost(story, sides, until)
    one, other = (retrain(side, folder / f"{side.name}-steps", until=until) for side in sides)
    for each in (one, other):
        if each.from_record is not None:
            return _unrepeatable(story, each, until, folder)
    if not is_known and one.difference_to(other) is None:
        story(f"equal: all digests after each of {counted(until, 'step')}, trained again")
        return Finding(is_equal=True, text=story.text)
    pair, rounding = _past_rounding(story, Pair("two runs", one, other, changes), until, folder)
    return _within(story, pair, folder, known=rounding)


def _tell_differences(story: Story, first: RunReader, second: RunReader) -> Differences:
    found = differences(first, second)
    story(
        "nothing that affects the training differs"
        if not found.decisive
        else "these differences affect the training:"
    )
    _tell_changes(story, found.decisive)
    if found.order_of_sums:
        story("these only change the order of sums, and so the rounding:")
        _tell_changes(story, found.order_of_sums)
    story(f"{found.num_equal} settings that affect the training are equal")
    return found


def _tell_changes(story: Story, changes: Sequence[Change]) -> None:
    for name, old, new in changes:
        story(f"  {name}: {short(old, _MAX_VALUE)} -> {short(new, _MAX_VALUE)}")


def _from_files(
    story: Story, first: RunReader, second: RunReader, limit: int
) -> tuple[int, int, bool] | None:
    """Return the stretch in which the runs begin to differ: after a step, up to a step.

    The third value is False if nothing can be compared, and they may be equal. None: they are.
    """
    rows = rows_of_both(first, second, until=limit)
    compared = shared(*rows)
    found = Difference.of(*compared)
    equal = {0}
    for step, is_equal in compare_checkpoints(first.folder, second.folder):
        if step > limit or (found is not None and step > found.step):
            break
        if is_equal:
            equal.add(step)
        elif found is None or step < found.step:
            found = of_checkpoints(step)
            break
    if found is None and (any(compared[0].values()) or equal != {0}):
        story(_tell_equal(first, second, limit, max(equal)))
        return None
    if found is None:
        story("their files have nothing of the same step that could be compared")
        return 0, limit, False
    if found.event != CHECKPOINT:
        equal.add(last_equal(*rows, before=found.step))
    after = max(step for step in equal if step < found.step)
    before = f"equal up to step {after}, " if after else ""
    story(f"from their files: {before}{_tell_row(found)}")
    return after, found.step, True


def _tell_row(found: Difference) -> str:
    if found.event == CHECKPOINT:
        return f"different tensors in the checkpoints of step {found.step}"
    by_weight = sorted(found.names, key=lambda name: (not name.startswith("digest/"), name))
    names = shortened(by_weight, most=_MAX_NAMES)
    first, second = found.values(by_weight[0])
    values = "" if isinstance(first, str) else f" ({first} and {second})"
    return f"different {names}{values} in the {found.event} row of step {found.step}"


def _tell_equal(first: RunReader, second: RunReader, limit: int, checkpoint: int) -> str:
    num_longer = sum(last_step(run) > limit for run in (first, second))
    if checkpoint == limit:
        num_tensors = count_tensors(complete_by_step(first.folder)[checkpoint])
        text = f"equal: {counted(limit, 'step')}, {num_tensors} tensors"
    else:
        steps = counted(limit, "step")
        text = f"equal: all numbers in the rows of {steps}; there is no common checkpoint"
    rest = ("", "; one run continues after step {}", "; both runs continue after step {}")
    return text + rest[num_longer].format(limit)


def _tell_approximate(story: Story, name: str, run: RunReader) -> None:
    """Say what makes a replay of a run only approximate."""
    if changes := environment_changes(run):
        story(f"{name} cannot be replayed here exactly: {', '.join(changes)}")


def _tell_cost(story: Story, sides: Sequence[Side], until: int) -> None:
    stretches = [f"{side.name} from step {side.begin} to {until}" for side in sides]
    num_steps = sum(until - side.begin for side in sides)
    story(f"training again: {', '.join(stretches)} ({counted(num_steps, 'step')})")


# --- a run that does not repeat itself ---


def _repeats_itself(
    story: Story, run: RunReader, recipes: Sequence[Path], until: int | None, folder: Path
) -> Finding:
    story(f"does {run.folder} repeat itself?")
    replay = Replay.of(run, recipes[0] if recipes else None)
    _tell_approximate(story, run.name, run)
    end = last_step(run)
    with_digests = steps_with_digests(by_place(read_rows(run.folder, after=replay.begin)))
    limit = min(until or (with_digests[0] if with_digests else end), end)
    check_step(run, limit)
    side = Side(f"{run.name} from the start", replay, after=0)
    _tell_cost(story, [side], limit)
    again = retrain(side, folder / "from-the-start", until=limit)
    if again.from_record is not None:
        return _unrepeatable(story, again, limit, folder)
    story(f"from the start, it repeats its record up to step {limit}")
    checkpoint = replay.checkpoint_at(limit - 1)
    if checkpoint is not None:
        resumed = Side(f"{run.name} from its checkpoint", replay, after=limit - 1)
        _tell_cost(story, [resumed], limit)
        again = retrain(resumed, folder / "from-a-checkpoint", until=limit)
        if again.from_record is not None:
            return _unrepeatable(story, again, limit, folder)
        story(f"also from its checkpoint of step {resumed.begin}")
    rest = "" if limit == end else f"; steps {limit + 1} to {end} were not tried (--until {end})"
    story(f"equal: it repeats itself{rest}")
    return Finding(is_equal=True, text=story.text)


def _unrepeatable(story: Story, one: Retrained, until: int, folder: Path) -> Finding:
    """Find out why a replay is not as its run has recorded it."""
    assert one.from_record is not None
    side = one.side
    story(f"{side.name} does not repeat itself: {_tell_row(one.from_record)}")
    _tell_cost(story, [side], until)
    other = retrain(side, folder / f"{side.name}-again".replace(" ", "-"), until=until)
    if one.difference_to(other) is not None:
        story("two replays of it also differ; they are compared from here on")
        return _within(story, Pair("one run twice", one, other), folder)
    story("two replays of it agree with each other, but not with the record")
    if side.begin == side.replay.begin:
        return _outside(story, side, other.folder)
    start = Side(f"{side.name} from the start", side.replay, after=0)
    _tell_cost(story, [start], until)
    whole = retrain(start, folder / "whole", until=until)
    if whole.from_record is not None:
        story("a replay from the start does not agree with the record either")
        return _outside(story, side, whole.folder)
    story("a replay from the start does: the run has state that is in no checkpoint")
    return _within(story, Pair("start and checkpoint", whole, one), folder)


def _outside(story: Story, side: Side, again: Path) -> Finding:
    """Tell what differs from when the run was trained."""
    found = differences(side.replay.run, read_run(again))
    # The callbacks that a replay has are its own.
    changes = [
        (name, old, None if name == _CALLBACKS else new)
        for name, old, new in (*found.decisive, *found.order_of_sums)
        if name != _CALLBACKS or old is not None
    ]
    if changes:
        story("what differs from when it was trained:")
        _tell_changes(story, changes)
        names = ", ".join(name for name, _, _ in changes)
        cause = Cause("outside the run", f"outside the run: {names}")
    else:
        text = "outside the run, and not recorded: files that it reads, or imported code"
        cause = Cause("outside the run", text)
    return _conclude(story, Finding(is_equal=False), cause)


# --- the first step that differs ---


def _past_rounding(story: Story, pair: Pair, until: int, folder: Path) -> tuple[Pair, Cause | None]:
    """Return the pair, and the cause if another order of sums is all that differs.

    If it is not all, the pair is returned with B trained like A.
    """
    assert pair.changes is not None
    experiment = order_of_sums(pair.changes)
    if experiment is None or pair.one.difference_to(pair.other) is None:
        return pair, None
    _tell_cost(story, [pair.other.side], until)
    alike = experiment.second(pair, folder / "alike", until=until)
    if pair.one.difference_to(alike) is None:
        story(f"with {experiment.title}, both agree")
        return pair, experiment.cause
    story(f"with {experiment.title}, both still differ; they are compared in this way from here on")
    return replace(pair, other=alike, changes=replace(pair.changes, order_of_sums=[])), None


def _within(story: Story, pair: Pair, folder: Path, *, known: Cause | None = None) -> Finding:
    """Name the first step, part, operator and number that differ, and the cause."""
    found = pair.one.difference_to(pair.other)
    if found is None:
        story("the replays agree after every step: only what is evaluated or logged differs")
        return Finding(is_equal=False, cause="evaluation", text=story.text)
    step, parts = found.step, found.names
    equal = [name for name in found.one if name not in parts]
    also = f", but not in {', '.join(equal)}" if equal else ""
    story(f"the first difference is after step {step}, in {', '.join(parts)}{also}")
    if known is not None and not pair.has_equal_batches:
        return _conclude(story, Finding(is_equal=False, step=step, parts=parts), known)
    for number in range(_MAX_TRACES):
        num_steps = sum(step - side.begin for side in pair.sides)
        story(f"recording step {step} of both ({counted(num_steps, 'step')}, at most twice)")
        traced = trace_step(pair.sides, step, folder / f"{pair.other.folder.name}-traces-{number}")
        if traced.difference is not None:
            break
        story("nothing differs within the step this time")
    finding = traced.tell(story, parts)
    cause = known or explain(story, pair, traced, folder)
    return _conclude(story, finding, cause)


def _conclude(story: Story, finding: Finding, cause: Cause) -> Finding:
    story(f"cause: {cause.text}" if cause.name else f"cause unknown: {cause.text}")
    return replace(finding, cause=cause.name, text=story.text)
