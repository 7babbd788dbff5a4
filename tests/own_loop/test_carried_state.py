"""What a loop carries from round to round is named if no state of the run holds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import exact_run


class Parts:
    """What each of the loops below trains: `batches` yields [4, 3] in 8 rounds of one epoch."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.model: nn.Module = nn.Linear(3, 4)
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = TensorDataset(torch.randn(32, 3))
        self.loader = DataLoader(self.data, batch_size=4)
        self.folder = folder

    def run(self, **more: Any) -> Any:
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        return exact_run(self.accelerator, self.folder, **parts, **more)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def schedule_in_an_object(parts: Parts) -> None:
    class Loop:
        def __init__(self) -> None:
            self.schedule = ExponentialLR(parts.optimizer, 0.9)

        def fit(self) -> None:
            with parts.run() as run:
                for inputs in run.steps(8):
                    self.train_on(inputs[0])

        def train_on(self, inputs: Tensor) -> None:
            parts.step(parts.model(inputs).square().mean())
            self.schedule.step()

    Loop().fit()


def generator_in_a_function(parts: Parts) -> None:
    drawn = np.random.default_rng(0)

    def noisy(inputs: Tensor) -> Tensor:
        return inputs * float(drawn.random())

    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(noisy(inputs[0])).square().mean())


def optimizer_in_a_function(parts: Parts) -> None:
    head = nn.Linear(4, 1)
    other = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)

    def train_on(inputs: Tensor) -> None:
        parts.step(head(parts.model(inputs)).square().mean())
        other.step()
        other.zero_grad()

    with parts.run() as run:
        for inputs in run.steps(8):
            train_on(inputs[0])


def average_in_a_dict(parts: Parts) -> None:
    average = {name: each.clone() for name, each in parts.model.state_dict().items()}
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean())
            for name, value in parts.model.state_dict().items():
                average[name].lerp_(value, 0.1)


def average_in_an_object(parts: Parts) -> None:
    class Average:
        def __init__(self) -> None:
            self.weights = [each.detach().clone() for each in parts.model.parameters()]

        def update(self) -> None:
            for mine, theirs in zip(self.weights, parts.model.parameters(), strict=True):
                mine.lerp_(theirs.detach(), 0.1)

    average = Average()
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean())
            average.update()


def queue_of_outputs(parts: Parts) -> None:
    queue = torch.zeros(8, 4)
    with parts.run() as run:
        for inputs in run.steps(8):
            outputs = parts.model(inputs[0])
            loss = (outputs @ queue.T + 1).square().mean()
            parts.step(loss)
            queue = torch.cat([outputs.detach(), queue])[:8]


def baseline_as_a_tensor(parts: Parts) -> None:
    baseline = torch.zeros(())
    with parts.run() as run:
        for inputs in run.steps(8):
            losses = parts.model(inputs[0]).square().mean(1)
            loss = (losses * (losses.detach() - baseline)).mean()
            parts.step(loss)
            baseline = 0.9 * baseline + 0.1 * losses.detach().mean()


def bank_in_numpy(parts: Parts) -> None:
    bank = np.zeros((4, 4), np.float32)
    with parts.run() as run:
        for inputs in run.steps(8):
            outputs = parts.model(inputs[0])
            loss = (outputs - torch.from_numpy(bank)).square().mean()
            parts.step(loss)
            bank[:2] += outputs[:2].detach().numpy()


def second_loader(parts: Parts) -> None:
    others = iter(DataLoader(parts.data, batch_size=2))
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(torch.cat([inputs[0], *next(others)])).square().mean())


def endless_iterator(parts: Parts) -> None:
    factors = itertools.cycle([0.5, 1.0, 2.0])
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean() * next(factors))


def own_generator(parts: Parts) -> None:
    def factors() -> Iterator[float]:
        for number in itertools.count(1):
            yield 1 / number

    factor = factors()
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean() * next(factor))


def item_of_a_dict(parts: Parts) -> None:
    state = {"done": 0}
    with parts.run() as run:
        for inputs in run.steps(8):
            loss = parts.model(inputs[0]).square().mean() / (1 + state["done"])
            parts.step(loss)
            state["done"] += 1


def value_of_the_model(parts: Parts) -> None:
    parts.model.share = 0.5
    with parts.run() as run:
        for inputs in run.steps(8):
            loss = parts.model(inputs[0]).square().mean() * parts.model.share
            parts.step(loss)
            parts.model.share *= 0.9


FORGOTTEN: dict[Callable[[Parts], None], str] = {
    schedule_in_an_object: "self.schedule",
    generator_in_a_function: "noisy.drawn",
    optimizer_in_a_function: "train_on.other",
    average_in_a_dict: "average.weight",
    average_in_an_object: "average.weights.0",
    queue_of_outputs: "queue",
    baseline_as_a_tensor: "baseline",
    bank_in_numpy: "bank",
    second_loader: "others",
    endless_iterator: "factors",
    own_generator: "factor",
    item_of_a_dict: "state.done",
    value_of_the_model: "parts.model.share",
}


@pytest.mark.parametrize("loop", FORGOTTEN)
def test_what_a_loop_carries_and_nothing_stores_is_named(
    loop: Callable[[Parts], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop(Parts(tmp_path))
    (record,) = caplog.records
    assert "[LOOP_STATE]" in record.message
    assert FORGOTTEN[loop] in record.message


def sums(parts: Parts) -> None:
    """Sums of all kinds, which are printed, and what is made of them to be printed."""
    running, last = 0.0, 0.0
    total = torch.zeros(())
    counts = torch.zeros(4, 4)
    history, outputs_so_far = [], []
    with parts.run() as run:
        for number, inputs in enumerate(run.steps(8), run.batch_in_epoch):
            outputs = parts.model(inputs[0])
            loss = outputs.square().mean()
            parts.step(loss)
            running += loss.item()
            total += loss.detach()
            history.append(loss.item())
            outputs_so_far.append(outputs.detach())
            for found in outputs.argmax(1):
                counts[found, found] += 1
            if number % 2 == 1:
                last = running / 2
                print(last, sum(history) / len(history))
                running = 0.0


def meters(parts: Parts) -> None:
    class Meter:
        def __init__(self) -> None:
            self.sum = self.count = 0.0

        def update(self, value: float) -> None:
            self.sum += value
            self.count += 1

    meter = Meter()
    parameters = [*parts.model.parameters()]
    with parts.run() as run:
        for inputs in run.steps(8):
            loss = parts.model(inputs[0]).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            meter.update(loss.item())
            norm = parts.model.weight.detach().norm()
            print(meter.sum / meter.count, norm)


def sums_in_an_object(parts: Parts) -> None:
    class Loop:
        def __init__(self) -> None:
            self.total, self.largest = 0.0, torch.zeros(2, 2)

        def fit(self) -> None:
            with parts.run() as run:
                for inputs in run.steps(8):
                    loss = self.loss_of(inputs[0])
                    parts.step(loss)

        def loss_of(self, inputs: Tensor) -> Tensor:
            loss = parts.model(inputs).square().mean()
            self.total += loss.item()
            self.largest += loss.detach()
            return loss

    Loop().fit()


def random_numbers(parts: Parts) -> None:
    with parts.run() as run:
        for inputs in run.steps(8):
            mixed = float(np.random.beta(1, 1)) * inputs[0][torch.randperm(len(inputs[0]))]
            parts.step(parts.model(mixed).square().mean())


def frozen_teacher(parts: Parts) -> None:
    teacher = nn.Linear(3, 4).requires_grad_(False).eval()
    weights = torch.rand(4)

    def loss_of(outputs: Tensor, wanted: Tensor) -> Tensor:
        return (weights * (outputs - wanted).square()).mean()

    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(loss_of(parts.model(inputs[0]), teacher(inputs[0])))


def given_state(parts: Parts) -> None:
    class Centre:
        def __init__(self) -> None:
            self.value, self.count = torch.zeros(4), 1

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value, self.count = state["value"], state["count"]

    centre = Centre()
    with parts.run(states={"centre": centre}) as run:
        for inputs in run.steps(8):
            outputs = parts.model(inputs[0])
            loss = (outputs - centre.value).square().mean() / centre.count
            parts.step(loss)
            centre.value = centre.value.lerp(outputs.detach().mean(0), 0.1)
            centre.count += 1


@pytest.mark.parametrize(
    "loop", [sums, sums_in_an_object, meters, random_numbers, frozen_teacher, given_state]
)
def test_a_loop_that_carries_nothing_gets_no_warning(
    loop: Callable[[Parts], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop(Parts(tmp_path))
    assert caplog.records == []
