"""A set that its first reading uses up is refused in one line; others are started as before."""

from __future__ import annotations

import atexit
import itertools
import queue
import random
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunConfig,
    StreamReader,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.checks.first_reading import FirstReadings
from accel_trainer.checks.used_up import hash_of, start_again

Sample = tuple[torch.Tensor, int]
SAMPLES = [
    (each, number % 2)
    for number, each in enumerate(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
]
LINES = "".join(f"{number}\n" for number in range(64))
ONCE: Any = None  # each case makes a new one


class Held:
    """Reads an iterator that it was given."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __call__(self, epoch: int) -> Iterator[Any]:
        yield from self.found

    def next_lines(self, epoch: int) -> Any:
        return self.found


class Lazy:
    """Opens when it is called first, and keeps what it has opened."""

    opened: Any = None

    def __call__(self, epoch: int) -> Any:
        self.opened = self.opened or iter(SAMPLES)
        return self.opened


class Skipping:
    """Forgets what it has skipped only when it is made anew."""

    def __init__(self) -> None:
        self.samples = SAMPLES

    def seek(self, position: int) -> None:
        self.samples = self.samples[position:]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)


def through_a_global(epoch: int) -> Iterator[Any]:
    yield from ONCE


def through_a_function(epoch: int) -> Iterator[Any]:
    return (each for each in through_a_global(epoch))


def from_the_console(epoch: int) -> Iterator[Any]:
    yield from sys.stdin


def left_open(path: Path, mode: str = "r") -> IO[str]:
    """Open a file that no test closes: collected unclosed, it would fail a later one."""
    file = path.open(mode, encoding="utf-8")
    atexit.register(file.close)
    return file


def used_up(folder: Path) -> dict[str, Callable[[int], Any]]:
    """Return functions that start a stream whose first reading uses it up."""
    global ONCE
    once = ONCE = (each for each in SAMPLES)
    pairs, skipping = zip(SAMPLES, SAMPLES, strict=True), Skipping()
    path = folder / "lines.txt"
    path.write_text(LINES)
    loader = DataLoader(SAMPLES, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    found: queue.Queue[Any] = queue.Queue()
    for each in SAMPLES:
        found.put(each)
    sys.stdin = StringIO(LINES)
    lines = left_open(path)
    return {
        "a generator": lambda epoch: once,
        "a file": lambda epoch: lines,
        "iter of a loader": Held(iter(loader)).next_lines,
        "map": partial(lambda found, epoch: found, map(tuple, SAMPLES)),
        "zip": lambda epoch, *, found=pairs: found,  # type: ignore[misc]
        "a wrapper": lambda epoch: (each for each in once),
        "islice": lambda epoch: itertools.islice(once, 40),
        "an attribute": Held(iter(SAMPLES)),
        "a method": Held(iter(SAMPLES)).next_lines,
        "kept when it is called": Lazy(),
        "cached": lru_cache(lambda epoch: iter(SAMPLES)),
        "a global": through_a_global,
        "a global of a function that it calls": through_a_function,
        "stdin": from_the_console,
        "a queue": lambda epoch: iter(found.get, None),
        "a list of one": lambda epoch, held=[once]: held[0],  # type: ignore[misc]
        "a seek that stays": lambda epoch: skipping,
    }


def test_what_a_first_reading_uses_up_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys.modules[__name__], "ONCE", None)
    for name in used_up(tmp_path):
        with pytest.raises(ConfigError, match="train_set cannot be read from its start") as refused:
            start_again("train_set", used_up(tmp_path)[name], 0)
        assert refused.value.code == "DATA_STREAM", name
        assert "\n" not in str(refused.value), name


class Table(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return iter(SAMPLES)


class BeginsAgain:
    """An iterator that `iter` sets back, as in many tutorials."""

    place = -1

    def __iter__(self) -> BeginsAgain:
        self.place = -1
        return self

    def __next__(self) -> Sample:
        self.place += 1
        return SAMPLES[self.place]


class KeepsItsFile:
    """Opens a file in each call, and keeps it to close it later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, epoch: int) -> Any:
        self.file = left_open(self.path)
        return self.file


def honest(folder: Path) -> dict[str, Callable[[int], Any]]:
    path = folder / "lines.txt"
    path.write_text(LINES)
    log = left_open(folder / "log.txt", "w")
    table, workers, again, lines = (
        Table(),
        DataLoader(Table(), batch_size=None, num_workers=1, persistent_workers=True),
        BeginsAgain(),
        left_open(path),
    )

    def rewound(epoch: int) -> Any:
        lines.seek(0)
        return lines

    def noisy(epoch: int) -> Iterator[Sample]:
        print("started", file=log)
        for inputs, target in SAMPLES:
            yield inputs + torch.randn(4) + random.random(), target

    return {
        "a generator function": noisy,
        "a table": lambda epoch: table,
        "a list": lambda epoch: SAMPLES,
        "a loader that keeps its workers": lambda epoch: workers,
        "a loader's iterator": lambda epoch: iter(DataLoader(SAMPLES, shuffle=True)),  # type: ignore[arg-type]
        "an iterator that begins again": lambda epoch: again,
        "a file that is rewound": rewound,
        "a file that is opened": lambda epoch: left_open(path),
        "a file that is opened and kept": KeepsItsFile(path),
        "a map": lambda epoch: map(tuple, SAMPLES),
        "one that skips, made anew": lambda epoch: Skipping(),
    }


def test_a_stream_that_begins_again_is_started_and_has_all_samples(tmp_path: Path) -> None:
    for name, function in honest(tmp_path).items():
        assert len([*itertools.islice(start_again("train_set", function, 0), 64)]) == 64, name


def test_a_stream_that_makes_its_iterator_anew_is_called_once() -> None:
    calls = []

    def opens(epoch: int) -> Iterator[Sample]:
        calls.append(epoch)
        return iter(SAMPLES)

    start_again("train_set", opens, 0)
    assert calls == [0]


@pytest.mark.parametrize("argument", ["train_set", "eval_sets"])
def test_a_run_refuses_such_a_set_before_its_first_step(tmp_path: Path, argument: str) -> None:
    once = iter(SAMPLES)
    sets = {"train_set": SAMPLES, "eval_sets": SAMPLES[:20]}
    sets[argument] = StreamReader(lambda epoch: once, 20)  # type: ignore[assignment]
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=16),
        trainer=TrainerConfig(num_epochs=2),
        run=RunConfig(output_dir=tmp_path / "run", quiet=True),
    )
    with start_run(config, recipe="once") as run:
        trainer = build_trainer(run, model=torch.nn.Linear(4, 2), task=ClassificationTask(), **sets)
        with pytest.raises(ConfigError, match=f"{argument} cannot be read from its start"):
            trainer.fit()
        assert trainer.state.optimizer_step == 0


def test_an_iterator_in_place_of_a_dataset_is_refused_with_the_way_out(tmp_path: Path) -> None:
    config = RecipeConfig(run=RunConfig(output_dir=tmp_path / "run", quiet=True))
    with (
        start_run(config, recipe="once") as run,
        pytest.raises(ConfigError, match="makes a new one"),
    ):
        build_trainer(
            run,
            model=torch.nn.Linear(4, 2),
            task=ClassificationTask(),
            train_set=zip(SAMPLES, SAMPLES, strict=True),
            eval_sets=SAMPLES,
        )


DRAWING = random.Random(0)


class Stateful:
    """A stream whose reading changes something of its own."""

    def __init__(self) -> None:
        self.order = [*range(64)]
        self.drawing = random.Random(0)
        self.torch_drawing = torch.Generator()
        self.number = 0
        self.kept: dict[int, Sample] = {}

    def shuffles_in_place(self, epoch: int) -> Iterator[Any]:
        random.Random(epoch).shuffle(self.order)
        for number in self.order:
            yield SAMPLES[number]

    def shuffles_when_called(self, epoch: int) -> Iterator[Any]:
        random.Random(epoch).shuffle(self.order)
        return iter(self.order)

    def draws(self, epoch: int) -> Iterator[Any]:
        for inputs, _ in SAMPLES:
            yield inputs + self.drawing.random()

    def draws_from_torch(self, epoch: int) -> Iterator[Any]:
        for inputs, _ in SAMPLES:
            yield inputs + torch.rand(4, generator=self.torch_drawing)

    def draws_from_a_global(self, epoch: int) -> Iterator[Any]:
        for inputs, _ in SAMPLES:
            yield inputs + DRAWING.random()

    def counts(self, epoch: int) -> Iterator[Any]:
        for inputs, _ in SAMPLES:
            self.number += 1
            yield inputs * self.number

    def counts_behind(self, epoch: int) -> Iterator[Any]:
        for inputs, _ in SAMPLES:
            yield inputs * self.number
            self.number += 1

    def fine_keeps_samples(self, epoch: int) -> Iterator[Any]:
        for number, sample in enumerate(SAMPLES):
            yield self.kept.setdefault(number, sample)

    def fine_counts_for_a_log(self, epoch: int) -> Iterator[Any]:
        for inputs, _ in SAMPLES:
            self.number += 1
            yield inputs + torch.rand(4)

    def fine_keeps_its_place(self, epoch: int) -> Iterator[Any]:
        self.number = 0
        while self.number < len(SAMPLES):
            yield SAMPLES[self.number]
            self.number += 1

    def fine_draws_by_epoch(self, epoch: int) -> Iterator[Any]:
        self.drawing.seed(epoch)
        for inputs, _ in SAMPLES:
            yield inputs + self.drawing.random()


@pytest.mark.parametrize("name", [name for name in vars(Stateful) if "__" not in name])
def test_a_stream_whose_reading_changes_its_samples_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = StreamReader(getattr(Stateful(), name), 64)
    FirstReadings({"train_set": SimpleNamespace(reader=reader)}, Accelerator(cpu=True))
    torch.manual_seed(7)
    samples = [each for _, each in reader.samples_from(3, 0)]
    is_named = any("UNSAVED_STATE" in line for line in caplog.messages)
    assert is_named != name.startswith("fine"), caplog.messages
    if not is_named:  # it is read as without the check
        torch.manual_seed(7)
        again = getattr(Stateful(), name)(3)
        assert hash_of(samples) == hash_of([*again])
