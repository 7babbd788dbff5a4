"""Trains pairs of runs that share what the seed decides, and finds which arm is better."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from accel_trainer import ConfigError, OutputError
from accel_trainer.commands import (
    JsonObject,
    Say,
    Stops,
    counted,
    difference_of_runs,
    filesystem,
    format_number,
    prepare_directory,
    read_json_object,
    read_run,
    scratch_folder,
    train_at_once,
    writes_to,
)

from .branches import Branches, finished, folder_of_branches
from .length import Length, count_samples
from .paired import Pair, Paired
from .question import At, Question
from .trial import why_not_shared


class Number(NamedTuple):
    """The monitored number of the last evaluation of an arm."""

    metric: str
    """Without a mark of averaged weights, so that both arms have one name."""
    value: float
    is_lower_better: bool


@dataclass(frozen=True)
class Plan:
    """Which runs answer a question, and where they are."""

    question: Question
    branches: Branches
    at: At
    length: Length
    seeds: Sequence[int]
    why_whole: str | None
    """Why the arms share no beginning, although that was asked for."""

    @property
    def step(self) -> int:
        """The step after which the arms part; 0: from the start."""
        return self.branches.step

    @property
    def num_ending_steps(self) -> int:
        """The steps of an arm that it does not share."""
        return self.length.num_steps - self.step

    @property
    def work(self) -> float:
        """The steps of all pairs, in whole runs."""
        each = self.step + 2 * self.num_ending_steps
        return len(self.seeds) * each / self.length.num_steps


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    plan: Plan
    metric: str
    paired: Paired
    folders: Sequence[tuple[Path, Path]]
    """Those of A and of B, for each pair."""
    is_equal: bool
    """Whether B has the same weights as A in all pairs: it changes nothing."""


def make_plan(question: Question, at: At, num_pairs: int, output_dir: Path, *, say: Say) -> Plan:
    """Return the runs to train, after a few steps of A and trying B, unless that is known.

    Raises:
        ConfigError: B cannot be compared with A.
        TrialFailed, OutputError: A or B cannot be trained.
    """
    folder = folder_of_branches(output_dir, question, at)

    def count() -> JsonObject:
        say("training a few steps of A")
        return {"num_samples": count_samples(question)}

    num_samples = _remembered(folder / "samples.json", count)["num_samples"]
    length = Length.of(question.a.config, num_samples, question.num_processes)
    step = at.step(num_steps=length.num_steps, steps_per_epoch=length.steps_per_epoch)
    b = question.b
    num_steps = Length.of(b.config, num_samples, question.num_processes).num_steps
    if num_steps <= step:
        fact = f"B has only {counted(num_steps, 'step')}, but --at {at.text} is step {step}"
        raise ConfigError("COMPARE", f"{fact}: give an earlier --at")

    def try_b() -> JsonObject:
        say("trying B for a step")
        return {"why_whole": why_not_shared(question, may_share=step > 0)}

    why_whole = _remembered(folder / f"trial-{b.key}.json", try_b)["why_whole"]
    if step == 0 or why_whole is not None:
        step = 0
        folder = folder_of_branches(output_dir, question, None)
    seeds = range(question.seed, question.seed + num_pairs)
    branches = Branches(question, folder, step)
    return Plan(question, branches, at, length, seeds, why_whole)


def compare(plan: Plan, *, jobs: int, say: Say) -> Comparison:
    """Train what is missing of the pairs, and compare them.

    Raises:
        OutputError: a run failed, or A does not repeat itself.
        KeyboardInterrupt: a signal to stop came; what is finished is kept.
    """
    branches, a, b = plan.branches, plan.question.a, plan.question.b
    folders = [(branches.arm(a, seed), branches.arm(b, seed)) for seed in plan.seeds]
    _say_plan(plan, [folder for pair in folders for folder in pair], jobs=jobs, say=say)
    _check_same_arms(plan, say)

    def train_pair(seed: int, received: Stops) -> None:
        branches.train_beginning(seed, received)
        branches.train_arm(a, seed, received)
        branches.train_arm(b, seed, received)

    for seed, _ in train_at_once(train_pair, plan.seeds, jobs=jobs):
        say(f"seed {seed}: {' -> '.join(map(_shown, folders[seed - plan.seeds[0]]))}")
    _check_same_data([folder for pair in folders for folder in pair])
    numbers = [tuple(map(_number_of, pair)) for pair in folders]
    metric, is_lower_better = _common_metric([each for pair in numbers for each in pair])
    pairs = [
        Pair(seed, *(math.nan if each is None else each.value for each in both))
        for seed, both in zip(plan.seeds, numbers, strict=True)
    ]
    is_equal = all(one == other for _, one, other in pairs) and all(
        difference_of_runs(*pair) is None for pair in folders
    )
    return Comparison(plan, metric, Paired(pairs, is_lower_better), folders, is_equal)


def _say_plan(plan: Plan, arms: Sequence[Path], *, jobs: int, say: Say) -> None:
    """Say which runs are missing, and how many steps they are."""
    branches, ending = plan.branches, plan.num_ending_steps
    num_beginnings = sum(not branches.has_beginning(seed) for seed in plan.seeds)
    missing = [folder for folder in arms if finished(folder) is None]
    is_checked = _repeats_mark(plan).exists()
    num_endings = len(missing) + (not is_checked)
    if not missing and is_checked:
        say(f"all {len(arms)} runs exist already")
        return
    steps = num_beginnings * plan.step + num_endings * ending
    parts = [f"{counted(num_endings, 'ending')} of {counted(ending, 'step')}"]
    if not plan.step:
        parts = [f"{counted(num_endings, 'whole run')} of {counted(ending, 'step')}"]
    elif num_beginnings:
        parts.insert(0, f"{counted(num_beginnings, 'beginning')} of {counted(plan.step, 'step')}")
    once_more = "" if is_checked else ", one of them to check that A repeats itself"
    there = len(arms) - len(missing)
    kept = f" ({there} of {len(arms)} exist already)" if there else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    say(f"to train{kept}: {' and '.join(parts)}{once_more}; {steps:,} steps{at_once}")


def _repeats_mark(plan: Plan) -> Path:
    """Return the file that is there once A has repeated itself with the first seed."""
    name = f"repeats-{plan.question.a.key}-{plan.seeds[0]}.json"
    return plan.branches.folder / name


def _check_same_arms(plan: Plan, say: Say) -> None:
    """Train A with the first seed twice, unless that was done. Raises OutputError if they differ.

    Otherwise, what differs in B could be chance of the machine.
    """
    seed, branches, mark = plan.seeds[0], plan.branches, _repeats_mark(plan)
    a = plan.question.a
    folder = branches.arm(a, seed)
    branches.train_beginning(seed)
    branches.train_arm(a, seed)
    found = finished(folder)
    if mark.exists() or found is None or found.state != "done":
        return
    with scratch_folder("compare") as scratch:
        branches.train_arm(a, seed, folder=scratch / "again")
        difference = difference_of_runs(folder, scratch / "again")
    if difference is not None:
        fact = f"A does not repeat itself with seed {seed} ({difference} differs)"
        fix = f"run accel-trainer why {folder} first"
        raise OutputError("COMPARE", f"{fact}, so a difference could not be attributed to B: {fix}")
    _remembered(mark, lambda: {"seed": seed})
    say(f"A repeats itself with seed {seed}, bit for bit")


def _check_same_data(folders: Sequence[Path]) -> None:
    """Raise OutputError unless all runs had the same data: some may be from an earlier command."""
    by_data: dict[str, Path] = {}
    for folder in folders:
        if fingerprint := read_run(folder).data_fingerprint:
            by_data.setdefault(fingerprint, folder)
    if len(by_data) > 1:
        one, other, *_ = by_data.values()
        fact = f"the data has changed between {one} and {other}"
        raise OutputError("COMPARE", f"{fact}: restore it, or give a new --output-dir")


def _number_of(folder: Path) -> Number | None:
    """Return the number of a finished run; None: it has diverged.

    Raises OutputError if the run evaluates nothing.
    """
    run = finished(folder)
    assert run is not None  # it was trained
    if run.state == "diverged":
        return None
    metric = run.headline()
    rows = [row for row in run.evaluations() if metric in row]
    if metric is None or not rows:
        fix = "pass eval_sets= to build_trainer, or set --trainer.monitor"
        raise OutputError("COMPARE", f"{folder} has no number to compare: {fix}")
    return Number(_plain(metric), float(rows[-1][metric]), run.is_lower_better(metric))


def _common_metric(numbers: Sequence[Number | None]) -> tuple[str, bool]:
    """Return the metric of all arms that have a number, and whether lower is better.

    Raises OutputError if they have different ones, or none has a number.
    """
    found = {(each.metric, each.is_lower_better) for each in numbers if each is not None}
    if len(found) != 1:
        names = ", ".join(sorted(name for name, _ in found))
        fact = f"the arms are measured by {names}" if found else "all runs have diverged"
        fix = "set --trainer.monitor before --b" if found else "lower the learning rate"
        raise OutputError("COMPARE", f"{fact}: {fix}")
    return found.pop()


def _shown(folder: Path) -> str:
    found = _number_of(folder)
    return "diverged" if found is None else format_number(found.metric, found.value)


def _plain(metric: str) -> str:
    """Return the name of a number without the mark of averaged weights."""
    group, _, name = metric.rpartition("/")
    return f"{group.replace('eval_ema', 'eval', 1)}/{name}"


def _remembered(path: Path, make: Callable[[], JsonObject]) -> JsonObject:
    """Return what a file holds, or what `make` returns, which is then written to it."""
    if path.is_file():
        return read_json_object(path)
    found = make()
    prepare_directory(path.parent)
    with writes_to(path.parent):
        filesystem.write_file_atomic(path, json.dumps(found).encode())
    return found
