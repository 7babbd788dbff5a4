"""State that no checkpoint holds: the places where people keep it, and the parts that use it."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import multiprocessing
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset, default_collate

from accel_trainer import Batch, Callback, DatasetOptions, StepBatch, StepOutput, Trainer
from accel_trainer.core.types import StepReport

from ..training.planted import Net, PlainTask

Number = Callable[[], float]
"""Returns the next number of a state."""

TOTAL = 0.0
VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=0.0)

# --- places ---


class Counts:
    """Counts its calls, with a default of the class."""

    number = 0.0

    def __call__(self) -> float:
        self.number += 1
        return self.number


class CountsFromNone:
    number: Any = None

    def __call__(self) -> float:
        self.number = 1.0 if self.number is None else 1.1 * self.number
        return self.number


class CountsLate:
    def __call__(self) -> float:
        self.number = getattr(self, "number", 0.0) + 1
        return self.number


class CountsInItsClass:
    number = 0.0

    def __call__(self) -> float:
        CountsInItsClass.number += 1
        return CountsInItsClass.number


class CountsInASlot:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0

    def __call__(self) -> float:
        self.number += 1
        return self.number


class MakesALayerLate:
    """Makes a layer, with random weights, when it is first needed."""

    layer: nn.Module | None = None

    def __call__(self) -> float:
        self.layer = self.layer or Net()
        return 1.0


class Keeps:
    """Holds a value, and advances it."""

    def __init__(self, value: Any, advance: Callable[[Any], object]) -> None:
        self.value, self.advance = value, advance

    def __call__(self) -> float:
        self.advance(self.value)
        return 1.0


def in_a_global() -> float:
    global TOTAL
    TOTAL += 1
    return TOTAL


def in_a_closure() -> Number:
    calls = 0.0

    def count() -> float:
        nonlocal calls
        calls += 1
        return calls

    return count


def in_a_default() -> Number:
    def count(calls: list[int] = []) -> float:  # noqa: B006
        calls.append(0)
        return len(calls)

    return count


def in_an_attribute_of_a_function() -> Number:
    def count() -> float:
        count.number += 1  # type: ignore[attr-defined]
        return count.number  # type: ignore[attr-defined, no-any-return]

    count.number = 0.0  # type: ignore[attr-defined]
    return count


def in_a_partial() -> Number:
    def count(calls: list[int]) -> float:
        calls.append(0)
        return len(calls)

    return functools.partial(count, [])


def in_a_variable_of_a_context() -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def in_the_environment() -> float:
    os.environ["HIDDEN_NUMBER"] = str(int(os.environ.get("HIDDEN_NUMBER", "0")) + 1)
    return int(os.environ["HIDDEN_NUMBER"])


def in_an_optimizer() -> Number:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return Keeps(AdamW([weight], lr=0.0), lambda optimizer: optimizer.step())


def in_a_loader() -> Number:
    return Keeps(iter(DataLoader(TensorDataset(torch.arange(50)))), next)


def in_a_file(folder: Path) -> Number:
    (folder / "lines.txt").write_text("line\n" * 20000, encoding="utf-8")
    lines = (folder / "lines.txt").open(encoding="utf-8")
    number = Keeps(lines, lambda file: [next(file) for _ in range(1800)])
    # A later test, in which it is collected, would fail for a file that is left open.
    weakref.finalize(number, lines.close)
    return number


class Pair(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int), ("other", ctypes.c_int))


class OwnList(list[int]):
    """A list of the user's class."""


def scheduled() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    return schedule


def generated() -> Iterator[int]:
    yield from range(1000)


def add_to(value: Any) -> None:
    value[0] = (value[0] + 1) % 100


def add(value: Any) -> None:
    value.value += 1


def holding(make: Callable[[], Any], advance: Callable[[Any], object]) -> Callable[[Path], Number]:
    return lambda folder: Keeps(make(), advance)


PLACES: dict[str, Callable[[Path], Number]] = {
    "default of a class": lambda folder: Counts(),
    "None at first": lambda folder: CountsFromNone(),
    "missing at first": lambda folder: CountsLate(),
    "attribute of a class": lambda folder: CountsInItsClass(),
    "slot": lambda folder: CountsInASlot(),
    "layer made late": lambda folder: MakesALayerLate(),
    "method": lambda folder: Counts().__call__,
    "global": lambda folder: in_a_global,
    "closure": lambda folder: in_a_closure(),
    "default of an argument": lambda folder: in_a_default(),
    "attribute of a function": lambda folder: in_an_attribute_of_a_function(),
    "partial": lambda folder: in_a_partial(),
    "variable of a context": lambda folder: in_a_variable_of_a_context,
    "environment": lambda folder: in_the_environment,
    "optimizer": lambda folder: in_an_optimizer(),
    "loader": lambda folder: in_a_loader(),
    "file": in_a_file,
    "cache of draws": lambda folder: functools.lru_cache(lambda: random.random()),
    "list": holding(lambda: [0], add_to),
    "list of tensors": holding(lambda: [torch.zeros(3)], lambda kept: kept[0].add_(1)),
    "tensor": holding(lambda: torch.zeros(3), lambda tensor: tensor.add_(1)),
    "teacher": holding(Net, lambda net: nn.init.uniform_(net.linear.bias)),
    "generator of torch": holding(
        torch.Generator, lambda generator: torch.rand(1, generator=generator)
    ),
    "generator of numpy": holding(np.random.default_rng, lambda generator: generator.random()),
    "old generator of numpy": holding(
        lambda: np.random.RandomState(0), lambda generator: generator.rand()
    ),
    "list of objects": holding(lambda: [Counts()], lambda held: held[0]()),
    "dict of objects": holding(lambda: {"loss": Counts()}, lambda held: held["loss"]()),
    "tuple of objects": holding(lambda: (1, Counts()), lambda held: held[1]()),
    "long list": holding(lambda: [0.0] * 5000, add_to),
    "long dict": holding(lambda: dict.fromkeys(range(5000), 0.0), add_to),
    "list of an own class": holding(OwnList, lambda kept: kept.append(2)),
    "schedule": holding(scheduled, lambda schedule: schedule.step()),
    "generator of Python": holding(random.Random, lambda generator: generator.random()),
    "bytearray": holding(lambda: bytearray(4), add_to),
    "array": holding(lambda: array.array("q", [0]), add_to),
    "ctypes": holding(lambda: ctypes.c_int(0), add),
    "ctypes array": holding(lambda: (ctypes.c_int * 3)(), add_to),
    "structure": holding(Pair, add),
    "value of processes": holding(lambda: multiprocessing.Value("i", 0), add),
    "array of processes": holding(lambda: multiprocessing.Array("i", 3), add_to),
    "namespace": holding(lambda: SimpleNamespace(value=0), add),
    "count": holding(itertools.count, next),
    "cycle": holding(lambda: itertools.cycle(range(7)), next),
    "iterator of a list": holding(lambda: iter([*range(50)]), next),
    "map": holding(lambda: map(str, range(50)), next),
    "zip": holding(lambda: zip(range(50), range(50), strict=True), next),
    "enumerate": holding(lambda: enumerate(range(50)), next),
    "islice": holding(lambda: itertools.islice([*range(50)], 40), next),
    "chain": holding(lambda: itertools.chain([*range(50)]), next),
    "generator": holding(generated, next),
    "expression": holding(lambda: (each for each in range(50)), next),
}

# --- parts that use a number ---

Parts = dict[str, Any]


def in_the_model(number: Number) -> Parts:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.number = number

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * (self.number() if self.training else 1)

    return {"model": Scaled}


def in_a_hook_of_the_model(number: Number) -> Parts:
    model = Net()
    model.linear.register_forward_hook(
        lambda module, inputs, outputs: outputs * number() if module.training else None
    )
    return {"model": lambda: model}


def in_a_forward_that_is_replaced(number: Number) -> Parts:
    model = Net()
    plain = model.forward
    model.forward = lambda inputs: plain(inputs) * (number() if model.training else 1)  # type: ignore[method-assign]
    return {"model": lambda: model}


def in_the_task(number: Number) -> Parts:
    class Scaled(PlainTask):
        def __init__(self) -> None:
            self.number = number

        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            output = super().step(model, batch)
            return output._replace(losses=output.losses * self.number())

        eval_step = PlainTask.step

    return {"task": Scaled}


def in_a_task_with_slots(number: Number) -> Parts:
    class Slotted:
        __slots__ = ("number", "scale")

        def __init__(self) -> None:
            self.number, self.scale = number, 0.5

        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            output = PlainTask().step(model, batch)
            factor = self.scale * self.number() if model.training else 1
            return output._replace(losses=output.losses * factor)

    return {"task": Slotted}


def in_the_trainer(number: Number, *, is_early: bool = False) -> Parts:
    class Own(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if is_early:
                self.number = number
            super().__init__(*arguments, **options)
            if not is_early:
                self.number = number

        def train_step(self, step_batch: StepBatch) -> StepReport:
            gradients = self.compute_gradients(step_batch)
            factor = self.number()
            return self.apply_gradients(gradients.map(lambda each: each / factor))

    return {"trainer_class": Own}


def in_the_optimizer(number: Number) -> Parts:
    class Own(SGD):
        def step(self, closure: Any = None) -> None:
            self.number()
            super().step()

    def build(model: nn.Module) -> SGD:
        optimizer = Own(model.parameters(), lr=0.1)
        optimizer.number = number
        return optimizer

    return {"optimizer": build}


def in_the_schedule(number: Number) -> Parts:
    return {"schedule": lambda step: 0.1 / (1 + number())}


def in_a_callback(number: Number) -> Parts:
    class Own(Callback):
        def __init__(self) -> None:
            self.number = number

        def on_step_end(self, trainer: Any, report: Any) -> None:
            self.number()

    return {"callbacks": (Own(),)}


def in_collate(number: Number) -> Parts:
    def collate(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return inputs * number(), targets

    return {"options": DatasetOptions(collate=collate)}


# What is named if each counts with a default of the class.
USERS: dict[str, tuple[Callable[[Number], Parts], str]] = {
    "model": (in_the_model, "model.number.number"),
    "hook": (in_a_hook_of_the_model, "number.number"),
    "replaced forward": (in_a_forward_that_is_replaced, "number.number"),
    "task": (in_the_task, "task.number.number"),
    "task with slots": (in_a_task_with_slots, "task.number.number"),
    "trainer": (in_the_trainer, "trainer.number.number"),
    "early trainer": (functools.partial(in_the_trainer, is_early=True), "trainer.number.number"),
    "optimizer": (in_the_optimizer, "optimizer.number.number"),
    "schedule": (in_the_schedule, "number.number"),
    "callback": (in_a_callback, "Own.number.number"),
    "collate": (in_collate, "number.number"),
}
