"""The cause of a difference, by experiments: the same steps again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from accel_trainer.commands import NOT_RECORDED, Say, prepare_directory

from ..silent import RecipeError
from .records import Differences
from .sides import Retrained, Side, retrain
from .traces import DataDifference
from .within import Pair, Traced

_MAX_SETTINGS = 8


class Cause(NamedTuple):
    """A cause: its short name, None if it is unknown, and a sentence."""

    name: str | None
    text: str


@dataclass(frozen=True)
class Experiment:
    """Something that is changed on both sides, or on the second."""

    title: str
    cause: Cause
    """The cause if the sides agree with it."""
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    num_processes: int | None = None
    only_second: bool = False

    def agrees(self, pair: Pair, step: int, folder: Path) -> bool:
        """Whether the sides agree up to `step` with the change."""
        if self.only_second:
            found = pair.one.difference_to(self.second(pair, folder / "second", until=step))
            return found is None or found.step > step
        both = [
            retrain(self._changed(side), folder / f"{index}", until=step)
            for index, side in enumerate(pair.sides)
        ]
        return both[0].difference_to(both[1]) is None

    def second(self, pair: Pair, folder: Path, *, until: int) -> Retrained:
        """Train the second side with the change."""
        return retrain(self._changed(pair.other.side), folder, until=until)

    def _changed(self, side: Side) -> Side:
        replay = side.replay.with_flags(self.flags)
        start = replace(
            replay.start,
            num_processes=self.num_processes or replay.start.num_processes,
            variables={**replay.start.variables, **self.variables},
        )
        return replace(side, replay=replace(replay, start=start))


def explain(say: Say, pair: Pair, traced: Traced, folder: Path) -> Cause:
    """Return the cause, after the experiments that can tell."""
    step = traced.step
    if pair.kind == "start and checkpoint":
        return _unstored(traced)
    if (known := _seen(pair, traced)) is not None:
        return known
    for number, experiment in enumerate(_experiments(pair, traced)):
        place = prepare_directory(folder / f"experiment-{number}")
        try:
            agrees = experiment.agrees(pair, step, place)
        except RecipeError:  # such as a setting that needs another one; it has said why
            say(f"with {experiment.title}, the recipe fails")
            continue
        say(f"with {experiment.title}, both {'agree' if agrees else 'still differ'}")
        if agrees:
            return experiment.cause
    return _by_elimination(pair, traced)


def _unstored(traced: Traced) -> Cause:
    name = "state that no checkpoint holds"
    where = ", ".join(traced.attributes[:3])
    if not where and traced.difference is not None:
        where = str(traced.difference.rows[0]["name"])
    fix = "keep it in a buffer of the model, or in the optimizer's state_dict"
    fact = "the state was not the same before the first update after the resume (the checkpoint)"
    return Cause(name, f"{fact}: {name} ({where}): {fix}")


def _seen(pair: Pair, traced: Traced) -> Cause | None:
    """Return the cause if the trace alone shows it."""
    row = traced.difference.rows[0] if traced.difference is not None else {}
    if pair.kind == "one run twice" and traced.is_of_operator and row["is_random"]:
        whose = "a separate generator" if "Generator" in row["plain"] else "torch's generator"
        text = (
            f"random numbers from {whose}, which is not seeded for this step: draw them with "
            "a global generator, which is seeded for each forward and each sample"
        )
        return Cause("a generator that is not seeded", text)
    return None


def _experiments(pair: Pair, traced: Traced) -> Iterator[Experiment]:
    if pair.kind == "two runs":
        assert pair.changes is not None
        yield from _of_two_runs(pair, pair.changes)
        return
    is_in_python = not traced.is_of_operator
    run = pair.one.side.replay.run
    if is_in_python:
        yield Experiment(
            "PYTHONHASHSEED=0",
            Cause("hash order", "the order of a set of strings, which differs in each process"),
            variables={"PYTHONHASHSEED": "0"},
        )
    chose_kernels = run.settings.get("runtime.deterministic") is False
    for may_be, change, *cause in (
        (
            run.settings.get("batch.num_workers"),
            "--batch.num-workers 0",
            "data workers",
            "a race of the data workers, or random numbers that depend on the worker: without "
            "workers, the same samples are read each time",
        ),
        (
            run.environment["hardware"].get("num_threads", 1) > 1,
            "--runtime.num-threads 1",
            "threads",
            "an operator whose threads add up in the order in which they finish",
        ),
        (
            chose_kernels and not is_in_python,
            "--runtime.deterministic True",
            "not deterministic",
            "--runtime.deterministic False selected a faster kernel",
        ),
    ):
        if may_be:
            yield Experiment(change, Cause(*cause), flags=change.split())


def _of_two_runs(pair: Pair, changes: Differences) -> Iterator[Experiment]:
    """Yield what gives the second run the values of the first."""
    config = pair.one.side.replay.run.config
    named = [
        (name, old, new)
        for name, old, new in changes.decisive
        if name.partition(".")[0] in config and old not in (None, NOT_RECORDED)
    ]
    for name, old, new in named[:_MAX_SETTINGS]:
        allowed = ["--allow-change", name] if pair.other.side.begin else []
        yield Experiment(
            f"{name} {old} on B",
            Cause(name, f"{name} is {old} in A and {new} in B"),
            flags=[*_as_flags({name: old}), *allowed],
            only_second=True,
        )


def order_of_sums(changes: Differences) -> Experiment | None:
    """Return the experiment that adds up in B as in A; None if nothing recorded differs in that."""
    order = {name: old for name, old, _ in changes.order_of_sums}
    if not order:
        return None
    threads = order.get("hardware.num_threads")
    flags = [] if threads is None else ["--runtime.num-threads", str(threads)]
    settings = {name: value for name, value in order.items() if name.startswith("batch.")}
    names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in order))
    text = f"rounding: numbers are added in a different order ({names}), and nothing else differs"
    return Experiment(
        f"A's {names} on B",
        Cause("order of sums", text),
        flags=[*flags, *_as_flags(settings)],
        num_processes=order.get("hardware.num_processes"),
        only_second=True,
    )


def _as_flags(settings: Mapping[str, Any]) -> list[str]:
    return [
        word
        for name, value in settings.items()
        for word in (
            f"--{name.replace('_', '-')}",
            *map(str, value if isinstance(value, list) else [value]),
        )
    ]


def _by_elimination(pair: Pair, traced: Traced) -> Cause:
    """Return what is left, from where the difference is."""
    is_twice = pair.kind == "one run twice"
    found = traced.difference
    data = traced.data
    if data.has_other_ids:
        if not is_twice:  # each repeats its own record
            return _of_code(pair, "the samples are different, or in a different order")
        return Cause("order of samples", "the order of the samples is not seeded")
    if data.samples or (found is not None and found.rows[0]["phase"] == "data"):
        return _of_data(data, is_twice=is_twice)
    if found is None:
        return Cause(None, "it did not happen again while the step was recorded")
    row = found.rows[0]
    if row["kind"] == "state":
        return _of_state(pair, traced)
    if traced.is_of_operator:
        if is_twice:
            fact = f"{row['name']} returns different bits for equal inputs"
            text = f"the state was the same, and the steps went apart (the kernels): {fact}"
            return Cause("no deterministic kernel", f"{text}: it has no deterministic kernel")
        return _of_code(pair, "its operators return different bits for equal inputs")
    if row["phase"] == "after the update":
        where = f" ({row['line']})" if row["line"] else ""
        text = f"a callback{where} changes it after the update"
        return Cause("callback", text if where else "the average of the weights")
    if not is_twice:
        return _of_code(pair, "a value from Python differs")
    return Cause(
        "made in Python",
        "a number or tensor made in Python, for example from the time, a file or another library",
    )


def _of_state(pair: Pair, traced: Traced) -> Cause:
    assert traced.difference is not None
    name = traced.difference.rows[0]["name"]
    values = traced.element.values if traced.element is not None else None
    if "param_groups[" in name and values is not None:
        where = f"a setting that the recipe's code gives the optimizer: {name} is "
        return Cause("optimizer", f"{where}{values[0]} in A and {values[1]} in B")
    if traced.step == 1:
        if pair.kind == "two runs":  # each repeats its own record
            return _of_code(pair, f"the initial {name} differs")
        text = f"the initial {name}: the model is built before start_run, which seeds torch"
        return Cause("initial weights", f"{text}, or its weights come from elsewhere")
    return Cause(
        "between the steps",
        f"{name} changed between the steps: in an evaluation, or in a callback after one",
    )


def _of_data(data: DataDifference, *, is_twice: bool) -> Cause:
    again = " each time it is read" if is_twice else ""
    if data.was_read_apart is False:
        return Cause(
            "collate function",
            f"the samples are equal, but the collate function makes a different batch{again}",
        )
    if data.was_read_apart is None:
        return Cause(
            "dataset", f"the dataset or the collate function returns different contents{again}"
        )
    if is_twice:
        text = "the dataset returns a different sample at each read: its augmentation is not "
        return Cause("dataset", f"{text}seeded, its threads race, or it modifies itself")
    return Cause(
        "dataset", "the dataset returns different contents: different files, or different code"
    )


def _of_code(pair: Pair, fact: str) -> Cause:
    assert pair.changes is not None
    names = [name for name, _, _ in pair.changes.decisive]
    if "order" in names:
        is_own = "sample_order.json" in pair.one.side.replay.run.manifest["files"]
        what = "order= differs" if is_own else "labels=, weights= or --leave-out differ"
        return Cause("order of samples", f"{fact}: {what}")
    code = [name for name in names if name.startswith("code.")]
    if code:
        return Cause("code", f"{fact}, and the recipes differ")
    if names:
        return Cause(None, f"{fact}, and the runs differ in {', '.join(names[:3])}")
    return Cause(None, f"{fact}, but no recorded setting differs")
