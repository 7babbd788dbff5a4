"""What a step launches on an accelerator and waits for, counted where an accelerator pretends, and
how many functions of the package it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import accel_trainer
from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    MeanLoss,
    RecipeConfig,
    RunConfig,
    TrainerConfig,
    build_trainer,
    start_run,
)

from .. import processes

BATCH_SIZE, NUM_STEPS = 16, 24
SETTLED = range(8, NUM_STEPS - 4)
NUM_CLASSES = 4
DECAY = 0.9
PACKAGE = str(Path(accel_trainer.__file__).parent)


@dataclass(frozen=True)
class Kind:
    """What a step does besides the loss of class labels and the update of one optimizer."""

    has_soft_labels: bool = False
    max_grad_norm: float | None = None
    has_average: bool = False
    optimizers: tuple[str, ...] = ("",)


KINDS = {
    "class labels": Kind(),
    "soft labels": Kind(has_soft_labels=True),
    "clipping": Kind(max_grad_norm=1.0),
    "an average": Kind(has_average=True),
    "two optimizers": Kind(optimizers=("first", "second")),
}


class Net(nn.Module):
    """Notes at each forward what the device has done by then."""

    unsaved_attributes = ("places",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES)
        self.places: list[tuple[int, int]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        from ..pretend import device

        if self.training:
            self.places.append((len(device.operations), len(device.syncs)))
        logits: Tensor = self.second(self.first(inputs))
        return logits


def make_data(kind: Kind) -> TensorDataset:
    labels = torch.arange(BATCH_SIZE * NUM_STEPS) % NUM_CLASSES
    targets = F.one_hot(labels).float() if kind.has_soft_labels else labels
    return TensorDataset(torch.randn(len(labels), 8), targets)


def part_of(model: nn.Module, name: str) -> nn.Module:
    part: nn.Module = getattr(model, name) if name else model
    return part


def make_optimizers(model: Net, kind: Kind) -> list[Optimizer]:
    # On a GPU torch takes one kernel for all parameters by itself.
    return [
        SGD(part_of(model, name).parameters(), lr=0.1, momentum=0.9, foreach=True)
        for name in kind.optimizers
    ]


def train_raw(model: Net, kind: Kind, folder: Path) -> None:
    run_loop(
        model,
        kind,
        make_optimizers(model, kind),
        DataLoader(make_data(kind), BATCH_SIZE, pin_memory=True),
        backward=Tensor.backward,
        clip=nn.utils.clip_grad_norm_,
    )


def train_with_accelerate(model: Net, kind: Kind, folder: Path) -> None:
    accelerator = Accelerator()
    loader = DataLoader(make_data(kind), BATCH_SIZE, pin_memory=True)
    prepared, batches, *optimizers = accelerator.prepare(
        model, loader, *make_optimizers(model, kind)
    )
    run_loop(
        prepared,
        kind,
        optimizers,
        batches,
        backward=accelerator.backward,
        clip=accelerator.clip_grad_norm_,
    )


def run_loop(
    model: nn.Module,
    kind: Kind,
    optimizers: list[Any],
    batches: Any,
    *,
    backward: Callable[[Tensor], None],
    clip: Callable[[Iterator[nn.Parameter], float], Tensor],
) -> None:
    parameters = [*model.parameters()]
    averages = [each.detach().clone() for each in parameters]
    for inputs, targets in batches:
        to_device = {"device": "pretend", "non_blocking": True}
        loss = F.cross_entropy(model(inputs.to(**to_device)), targets.to(**to_device))
        backward(loss)
        if kind.max_grad_norm is not None:
            clip(model.parameters(), kind.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if kind.has_average:
            with torch.no_grad():
                torch._foreach_lerp_(averages, parameters, 1 - DECAY)


def train_ours(model: Net, kind: Kind, folder: Path) -> None:
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=BATCH_SIZE),
        trainer=TrainerConfig(
            num_epochs=1,
            max_grad_norm=kind.max_grad_norm,
            ema_decay=DECAY if kind.has_average else None,
        ),
        run=RunConfig(output_dir=folder),
    )

    def build(name: str, model: nn.Module) -> Optimizer:
        return SGD(part_of(model, name).parameters(), lr=0.1, momentum=0.9, fused=True)

    optimizers = {name: partial(build, name) for name in kind.optimizers}
    with start_run(config, recipe="operations") as run:
        data = make_data(kind)
        build_trainer(
            run,
            model=model,
            task=ClassificationTask(),
            train_set=data,
            eval_sets={"eval": data},
            metrics=[MeanLoss()],
            optimizer=optimizers.get("", optimizers),
        ).fit()


LOOPS = {"raw": train_raw, "accelerate": train_with_accelerate, "ours": train_ours}


def count_of(loop: str, kind: Kind, folder: Path) -> tuple[list[str], list[str]]:
    """Return what a step of `loop` launches, and what the host waits for in it.

    The copies of the batch to the device are left out: which there are depends on the data.
    """
    from ..pretend import device

    torch.manual_seed(0)
    model = Net() if loop == "ours" else Net().to("pretend")
    device.operations.clear()
    device.syncs.clear()
    LOOPS[loop](model, kind, folder)
    places = model.places[-NUM_STEPS:]
    steps = [
        (
            [each for each in device.operations[start:end] if each != "copy from the host"],
            device.syncs[first:last],
        )
        for (start, first), (end, last) in zip(places, places[1:], strict=False)
    ]
    settled = [steps[number] for number in SETTLED]
    assert all(step == settled[0] for step in settled), "each step does the same"
    return settled[0]


def compare_with_a_raw_loop(folder: Path) -> None:
    for name, kind in KINDS.items():
        counts = {loop: count_of(loop, kind, folder / name) for loop in LOOPS}
        (raw, _), (accelerate, _), (ours, waits) = counts.values()
        print(name, {loop: len(operations) for loop, (operations, _) in counts.items()})
        assert len(ours) <= len(raw) + 1, (name, counts)
        assert len(ours) < len(accelerate), (name, counts)
        assert waits == [], name


def test_a_step_launches_a_raw_loops_operations_and_one_more(tmp_path: Path) -> None:
    processes.run_on("pretend", compare_with_a_raw_loop, tmp_path / "run", folder=tmp_path)


class CountedNet(Net):
    """Notes at each forward how often functions of the package were called since the first."""

    unsaved_attributes = ("places", "num_calls")

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        sys.setprofile(self.note)
        self.places.append((self.num_calls, 0))
        logits: Tensor = self.second(self.first(inputs))
        return logits

    def note(self, frame: FrameType, event: str, _: object) -> None:
        self.num_calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)


def test_a_settled_step_calls_few_functions_of_the_package(tmp_path: Path) -> None:
    """On a tiny model a step costs what Python costs, which no count of operations shows."""
    model = CountedNet()
    try:
        train_ours(model, Kind(), tmp_path / "run")
    finally:
        sys.setprofile(None)
    places = [calls for calls, _ in model.places[-NUM_STEPS:]]
    counts = [after - before for before, after in zip(places, places[1:], strict=False)]
    print(counts)
    # What is due in some steps comes on top, and what reads the clock may.
    assert min(counts) <= 150
