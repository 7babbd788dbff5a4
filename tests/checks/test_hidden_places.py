"""State is named wherever it is kept: with a default of the class, or in an unusual object."""

from __future__ import annotations

import array
import ctypes
import itertools
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import (
    BatchConfig,
    Callback,
    ClassificationTask,
    Gradients,
    RecipeConfig,
    RunConfig,
    StepBatch,
    StepReport,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)

from ..variants import slow_but

# One of the places is a file that is left open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Number = Callable[[], float]
"""Returns the next number of a state that no checkpoint holds."""


def train(folder: Path, **parts: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=16),
        trainer=TrainerConfig(num_epochs=1),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    given = {"task": ClassificationTask(), "model": nn.Linear(4, 2)} | parts
    held_out = TensorDataset(inputs[:9] + 1, torch.ones(9).long())
    with start_run(config, recipe="hidden") as run:
        build_trainer(run, train_set=data, eval_sets=held_out, **given).fit()


def named(caplog: pytest.LogCaptureFixture) -> str:
    lines = [each for each in caplog.messages if each.startswith("[UNSAVED_STATE] ")]
    assert len(lines) <= 1, lines
    return "".join(lines)


# --- defaults of a class ---


class Divides(Trainer):
    k = 0

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        self.k += 1
        return self.apply_gradients(gradients.map(lambda tensor: tensor / self.k))


class AsksWithDefault(Trainer):
    def train_step(self, step_batch: StepBatch) -> StepReport:
        self.k = getattr(self, "k", 0) + 1
        return super().train_step(step_batch)


class Inherits(Divides):
    pass


class Sets(Callback):
    k = 0

    def on_step_end(self, trainer: Any, report: StepReport) -> None:
        self.k += 1
        trainer.optimizer.param_groups[0]["momentum"] = 1 / self.k


class SetsWithDefault(Callback):
    def before_update(self, trainer: Any, gradients: Gradients) -> None:
        self.k = getattr(self, "k", 0) + 1


class SetsLate(Callback):
    k: Any = None

    def on_step_end(self, trainer: Any, report: StepReport) -> None:
        self.k = 1 if self.k is None else self.k + 1


class Task(ClassificationTask):
    k = 0

    def step(self, model: nn.Module, batch: Any) -> Any:
        self.k += model.training
        return super().step(model, batch)


class Net(nn.Linear):
    k = 0

    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, inputs: Any) -> Any:
        self.k += self.training
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trainer.k", {"trainer_class": Divides}),
        ("trainer.k", {"trainer_class": AsksWithDefault}),
        ("trainer.k", {"trainer_class": Inherits}),
        ("Sets.k", {"callbacks": Sets}),
        ("SetsWithDefault.k", {"callbacks": SetsWithDefault}),
        ("SetsLate.k", {"callbacks": SetsLate}),
        ("task.k", {"task": Task}),
        ("model.k", {"model": Net}),
    ],
    ids=lambda value: value if isinstance(value, str) else [*value.values()][0].__name__,
)
def test_a_counter_with_a_default_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, parts: dict[str, Any]
) -> None:
    made = {"callbacks": lambda kind: [kind()], "trainer_class": lambda kind: kind}
    train(
        tmp_path, **{key: made.get(key, lambda kind: kind())(each) for key, each in parts.items()}
    )
    assert f"training changes {name}," in named(caplog)


# --- unusual objects ---


def of_function() -> float:
    of_function.number += 1  # type: ignore[attr-defined]
    return of_function.number  # type: ignore[attr-defined, no-any-return]


of_function.number = 0.0  # type: ignore[attr-defined]
VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=0)


@lru_cache
def drawn() -> float:
    return random.random()


def of_variable() -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def of_environment() -> float:
    os.environ["HIDDEN_NUMBER"] = str(int(os.environ.get("HIDDEN_NUMBER", "0")) + 1)
    return int(os.environ["HIDDEN_NUMBER"])


def generated() -> Iterator[int]:
    yield from range(1000)


class Pair(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int), ("other", ctypes.c_int))


class Keeps:
    """Holds a value, and advances it."""

    def __init__(self, value: Any, advance: Callable[[Any], object]) -> None:
        self.value, self.advance = value, advance

    def __call__(self) -> float:
        self.advance(self.value)
        return 1.0


def add_to(value: Any) -> None:
    value[0] = (value[0] + 1) % 100


def add(value: Any) -> None:
    value.value += 1


def places(folder: Path) -> dict[str, Number]:
    (folder / "lines.txt").write_text("line\n" * 20000, encoding="utf-8")
    lines = (folder / "lines.txt").open(encoding="utf-8")
    loader = DataLoader(TensorDataset(torch.arange(50)))
    return {
        "bytearray": Keeps(bytearray(4), add_to),
        "array": Keeps(array.array("q", [0]), add_to),
        "ctypes": Keeps(ctypes.c_int(0), add),
        "ctypes array": Keeps((ctypes.c_int * 3)(), add_to),
        "value of processes": Keeps(multiprocessing.Value("i", 0), add),
        "array of processes": Keeps(multiprocessing.Array("i", 3), add_to),
        "namespace": Keeps(SimpleNamespace(value=0), add),
        "function": of_function,
        "variable of a context": of_variable,
        "environment": of_environment,
        "count": Keeps(itertools.count(), next),
        "cycle": Keeps(itertools.cycle([1, 2, 3]), next),
        "iterator of a list": Keeps(iter([*range(50)]), next),
        "map": Keeps(map(str, range(50)), next),
        "zip": Keeps(zip(range(50), range(50), strict=True), next),
        "enumerate": Keeps(enumerate(range(50)), next),
        "islice": Keeps(itertools.islice([*range(50)], 40), next),
        "chain": Keeps(itertools.chain([*range(50)]), next),
        "generator": Keeps(generated(), next),
        "structure": Keeps(Pair(), add),
        "expression": Keeps((each for each in range(50)), next),
        "loader": Keeps(iter(loader), next),
        "file": Keeps(lines, lambda file: [next(file) for _ in range(1800)]),
        "cache of draws": drawn,
    }


NAMES = (
    "bytearray",
    "array",
    "ctypes",
    "ctypes array",
    "value of processes",
    "array of processes",
    "namespace",
    "function",
    "variable of a context",
    "environment",
    "count",
    "cycle",
    "iterator of a list",
    "map",
    "zip",
    "enumerate",
    "islice",
    "chain",
    "generator",
    "structure",
    "expression",
    "loader",
    "file",
    "cache of draws",
)


class Scales(ClassificationTask):
    """Scales its losses by a number from elsewhere."""

    def __init__(self, number: Number) -> None:
        super().__init__()
        self.number = number

    def step(self, model: nn.Module, batch: Any) -> Any:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * (self.number() if model.training else 1))


@pytest.mark.parametrize(
    "name", slow_but(["bytearray", "function", "environment", "cycle", "generator"], NAMES)
)
def test_a_number_in_an_unusual_place_is_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setenv("HIDDEN_NUMBER", "1")
    train(tmp_path / "run", task=Scales(places(tmp_path)[name]))
    assert "training changes " in named(caplog)


def test_attributes_of_classes_and_files_of_the_user_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "number = 0\n\n\nclass Config:\n    value = 0\n"
    (tmp_path / "hidden_config.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "import hidden_config\nfrom hidden_config import Config\n"
        "from accel_trainer import ClassificationTask\n\n\n"
        "class Counts(ClassificationTask):\n"
        "    def step(self, model, batch):\n"
        "        Config.value += model.training\n"
        "        hidden_config.number += model.training\n"
        "        return super().step(model, batch)\n"
    )
    (tmp_path / "hidden_task.py").write_text(code, encoding="utf-8")
    try:
        import hidden_task  # type: ignore[import-not-found]

        train(tmp_path / "run", task=hidden_task.Counts())
    finally:
        for module in ("hidden_task", "hidden_config"):
            sys.modules.pop(module, None)
    assert "training changes Config.value, hidden_config.number," in named(caplog)


# --- honest programs ---


@lru_cache
def weight_of(step: int) -> float:
    return 1 / (step + 1)


class Honest(ClassificationTask):
    """Has tables, caches and iterators that no step changes, or that are made in each."""

    table = {"a": 1}
    names: Any = None

    def __init__(self, log: Any) -> None:
        super().__init__()
        self.log, self.numbers = log, range(10)
        self.space = SimpleNamespace(rate=0.1)

    def step(self, model: nn.Module, batch: Any) -> Any:
        self.names = self.names or ["first"]
        print(batch.position.step, file=self.log)
        numbers = iter(self.numbers)
        next(numbers)
        output = super().step(model, batch)
        return output._replace(losses=output.losses * weight_of(batch.position.step))


def test_nothing_is_said_of_honest_tables_caches_and_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "log.txt").open("w", encoding="utf-8") as log:
        train(tmp_path / "run", task=Honest(log))
    assert named(caplog) == ""
