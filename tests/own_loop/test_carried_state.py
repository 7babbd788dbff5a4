"""What a loop carries from round to round is named if no state of the run holds it."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm

from accel_trainer import exact_run


class Parts:
    """What each of the loops below trains: `batches` yields [4, 3] in 8 rounds of one epoch."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.model: nn.Module = nn.Linear(3, 4)
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = TensorDataset(torch.randn(32, 3))
        self.loader: DataLoader[Any] = DataLoader(self.data, batch_size=4)
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


def tensor_of_the_model(parts: Parts) -> None:
    parts.model.center = torch.zeros(4)
    with parts.run() as run:
        for inputs in run.steps(8):
            outputs = parts.model(inputs[0])
            parts.step((outputs - parts.model.center).square().mean())
            parts.model.center = 0.9 * parts.model.center + outputs.detach().mean(0)


def batches_in_a_variable(parts: Parts) -> None:
    schedule = ExponentialLR(parts.optimizer, 0.9)
    with parts.run() as run:
        for _ in run.epochs(1):
            bar = tqdm(run.batches(), disable=True)
            for inputs in bar:
                parts.step(parts.model(inputs[0]).square().mean())
                schedule.step()


def epoch_in_a_function(parts: Parts) -> None:
    def train_epoch(batches: Iterable[Any], schedule: ExponentialLR) -> None:
        for inputs in batches:
            parts.step(parts.model(inputs[0]).square().mean())
            schedule.step()

    schedule = ExponentialLR(parts.optimizer, 0.9)
    with parts.run() as run:
        for _ in run.epochs(1):
            train_epoch(tqdm(run.batches(), disable=True), schedule)


def batches_through_a_generator(parts: Parts) -> None:
    def halved(batches: Iterable[Any]) -> Iterator[Tensor]:
        for inputs in batches:
            yield inputs[0] / 2

    schedule = ExponentialLR(parts.optimizer, 0.9)
    with parts.run() as run:
        for inputs in halved(run.steps(8)):
            parts.step(parts.model(inputs).square().mean())
            schedule.step()


def batches_by_next(parts: Parts) -> None:
    schedule = ExponentialLR(parts.optimizer, 0.9)
    with parts.run() as run:
        batches = run.steps(8)
        while (inputs := next(batches, None)) is not None:
            parts.step(parts.model(inputs[0]).square().mean())
            schedule.step()


class Module:
    """What functions find in their file."""

    schedule: ExponentialLR


_module = Module()


def _step_with_a_global(parts: Parts, inputs: Tensor) -> None:
    parts.step(parts.model(inputs).square().mean())
    _module.schedule.step()


def schedule_in_the_file(parts: Parts) -> None:
    _module.schedule = ExponentialLR(parts.optimizer, 0.9)
    with parts.run() as run:
        for inputs in run.steps(8):
            _step_with_a_global(parts, inputs[0])


def last_outputs(parts: Parts) -> None:
    last: deque[Tensor] = deque([torch.zeros(4), torch.ones(4)], maxlen=2)
    with parts.run() as run:
        for inputs in run.steps(8):
            outputs = parts.model(inputs[0]).mean(0)
            loss = outputs.square().mean()
            if last:
                loss = loss + (outputs - torch.stack(list(last)).mean(0)).square().mean()
            parts.step(loss)
            last.append(outputs.detach())


def losses_that_decide(parts: Parts) -> None:
    losses: list[float] = []
    with parts.run() as run:
        for inputs in run.steps(8):
            loss = parts.model(inputs[0]).square().mean()
            if losses and loss.item() > 3 * sum(losses[-3:]):
                loss = loss * 0.1
            parts.step(loss)
            losses.append(loss.item())


def weights_of_samples(parts: Parts) -> None:
    class Weighted(Dataset[tuple[int, Tensor]]):
        def __init__(self) -> None:
            self.weights = torch.ones(32)

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> tuple[int, Tensor]:
            return index, parts.data[index][0] * self.weights[index]

    data = Weighted()
    parts.loader = DataLoader(data, batch_size=4)
    with parts.run() as run:
        for indices, inputs in run.steps(8):
            losses = parts.model(inputs).square().mean(1)
            parts.step(losses.mean())
            data.weights[indices] = losses.detach()


def loss_that_counts(parts: Parts) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = 0

        def forward(self, outputs: Tensor) -> Tensor:
            self.number += 1
            return outputs.square().mean() / self.number

    loss_of = Loss()
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(loss_of(parts.model(inputs[0])))


def counter_of_a_rate(parts: Parts) -> None:
    class Average:
        decay = 0.0

        def update(self) -> None:
            for each in parts.model.parameters():
                each.data.mul_(self.decay)

    number = 0
    average = Average()
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean())
            number += 1
            average.decay = number / (10 + number)
            average.update()


def counter_of_an_object(parts: Parts) -> None:
    class WarmUp:
        def __init__(self) -> None:
            self.number = 0

        def step(self) -> None:
            self.number += 1
            for group in parts.optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, self.number / 20)

    warm_up = WarmUp()
    with parts.run() as run:
        for inputs in run.steps(8):
            warm_up.step()
            parts.step(parts.model(inputs[0]).square().mean())


def average_of_epochs(parts: Parts) -> None:
    average = AveragedModel(parts.model)
    with parts.run() as run:
        for _ in run.epochs(3):
            for inputs in run.batches():
                parts.step(parts.model(inputs[0]).square().mean())
            average.update_parameters(parts.model)


def weight_of_an_epoch(parts: Parts) -> None:
    weight = 1.0
    with parts.run() as run:
        for _ in run.epochs(3):
            for inputs in run.batches():
                parts.step(weight * parts.model(inputs[0]).square().mean())
            weight *= 0.9


def early_stop(parts: Parts) -> None:
    class Stopper:
        def __init__(self) -> None:
            self.least = math.inf

        def is_over(self, loss: float) -> bool:
            if loss < self.least:
                self.least = loss
                return False
            return True

    stopper = Stopper()
    with parts.run() as run:
        for _ in run.epochs(3):
            for inputs in run.batches():
                loss = parts.model(inputs[0]).square().mean()
                parts.step(loss)
            if stopper.is_over(loss.item()):
                run.stop()


def patience(parts: Parts) -> None:
    without, least = 0, math.inf
    with parts.run() as run:
        for _ in run.epochs(3):
            for inputs in run.batches():
                loss = parts.model(inputs[0]).square().mean()
                parts.step(loss)
            last, least = least, min(loss.item(), run.metrics.get("eval/least", math.inf))
            run.row(least=least)
            if least > last:
                without = 0
            else:
                without += 1
            if without == 9:
                run.stop()


def count_that_is_passed(parts: Parts) -> None:
    def set_rate(number: int) -> None:
        parts.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)

    number = 0
    with parts.run() as run:
        for inputs in run.steps(8):
            set_rate(number)
            parts.step(parts.model(inputs[0]).square().mean())
            number += 1


def method_in_a_variable(parts: Parts) -> None:
    step = ExponentialLR(parts.optimizer, 0.9).step
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean())
            step()


def losses_of_an_object(parts: Parts) -> None:
    class Spikes:
        def __init__(self) -> None:
            self.losses: list[float] = []

        def weight_of(self, loss: float) -> float:
            self.losses.append(loss)
            return 0.1 if loss > 2 * min(self.losses) else 1.0

    spikes = Spikes()
    with parts.run() as run:
        for inputs in run.steps(8):
            loss = parts.model(inputs[0]).square().mean()
            parts.step(loss * spikes.weight_of(loss.item()))


def weights_in_an_optimizer(parts: Parts) -> None:
    class Slow(torch.optim.SGD):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(parameters, lr=0.1)
            self.slow = [torch.zeros(4, 3), torch.zeros(4)]

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(fast.detach(), 0.5)

    parts.optimizer = Slow(parts.model.parameters())
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean())


def object_of_the_model(parts: Parts) -> None:
    class Settings:
        share = 1.0

    parts.model.settings = Settings()
    with parts.run() as run:
        for inputs in run.steps(8):
            settings = parts.model.settings
            parts.step(parts.model(inputs[0]).square().mean() * settings.share)
            settings.share *= 0.9


def sum_of_an_epoch(parts: Parts) -> None:
    with parts.run() as run:
        for _ in run.epochs(2):
            total = 0.0
            for inputs in run.batches():
                loss = parts.model(inputs[0]).square().mean()
                parts.step(loss)
                total += loss.item()
            run.row(loss=total / 8)


def mean_of_an_epoch(parts: Parts) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer)
    with parts.run(states={"schedule": schedule}) as run:
        for _ in run.epochs(2):
            losses = []
            for inputs in run.batches():
                loss = parts.model(inputs[0]).square().mean()
                parts.step(loss)
                losses.append(loss.item())
            mean = sum(losses) / len(losses)
            schedule.step(mean)


def enumerated(parts: Parts) -> None:
    with parts.run() as run:
        for _ in run.epochs(1):
            for number, inputs in enumerate(run.batches()):
                parts.step(parts.model(inputs[0]).square().mean() / (1 + number))


def enumerated_in_a_bar(parts: Parts) -> None:
    with parts.run() as run:
        for _ in run.epochs(1):
            bar = tqdm(enumerate(run.batches(), 1), disable=True)
            for number, inputs in bar:
                if number % 2:
                    parts.step(parts.model(inputs[0]).square().mean())


def enumerated_in_a_function(parts: Parts) -> None:
    def train_epoch(batches: Iterable[Any]) -> None:
        for number, inputs in batches:
            parts.step(parts.model(inputs[0]).square().mean() / (1 + number))

    with parts.run() as run:
        for _ in run.epochs(1):
            train_epoch(enumerate(run.batches()))


def enumerated_epochs(parts: Parts) -> None:
    with parts.run() as run:
        for number, _ in enumerate(run.epochs(2)):
            for inputs in run.batches():
                parts.step(parts.model(inputs[0]).square().mean() / (1 + number))


def zipped(parts: Parts) -> None:
    others = DataLoader(parts.data, batch_size=2)
    with parts.run() as run:
        for _ in run.epochs(1):
            for inputs, more in zip(run.batches(), others, strict=False):
                parts.step(parts.model(torch.cat([*inputs, *more])).square().mean())


def zipped_in_a_variable(parts: Parts) -> None:
    others = DataLoader(parts.data, batch_size=2)
    with parts.run() as run:
        for _ in run.epochs(1):
            bar = tqdm(run.batches(), disable=True)
            for pair in zip(bar, others, strict=False):
                parts.step(parts.model(torch.cat([*pair[0], *pair[1]])).square().mean())


def zipped_epochs(parts: Parts) -> None:
    rates = [0.1, 0.01]
    with parts.run() as run:
        for _, rate in zip(run.epochs(2), rates, strict=True):
            for inputs in run.batches():
                parts.step(rate * parts.model(inputs[0]).square().mean())


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
    tensor_of_the_model: "parts.model.center",
    batches_in_a_variable: "schedule",
    epoch_in_a_function: "schedule",
    batches_through_a_generator: "schedule",
    batches_by_next: "schedule",
    schedule_in_the_file: "_module.schedule",
    last_outputs: "last",
    losses_that_decide: "losses",
    weights_of_samples: "data.weights",
    loss_that_counts: "loss_of",
    counter_of_a_rate: "number",
    counter_of_an_object: "warm_up.number",
    average_of_epochs: "average",
    weight_of_an_epoch: "weight",
    early_stop: "stopper.least",
    patience: "without",
    method_in_a_variable: "step",
    losses_of_an_object: "spikes.losses",
    weights_in_an_optimizer: "optimizer.slow",
    object_of_the_model: "model.settings.share",
    sum_of_an_epoch: "total",
    mean_of_an_epoch: "losses",
    count_that_is_passed: "number",
    enumerated: "enumerate",
    enumerated_in_a_bar: "enumerate",
    enumerated_in_a_function: "enumerate",
    enumerated_epochs: "enumerate",
    zipped: "others",
    zipped_in_a_variable: "others",
    zipped_epochs: "rates",
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


def shown(parts: Parts) -> None:
    """What decides when something is printed, by a counter, an object or enumerate."""

    class Speed:
        def __init__(self) -> None:
            self.number = 0

        def step(self) -> None:
            self.number += 1
            if self.number % 2 == 0:
                print("steps:", self.number)

    def train_epoch(batches: Iterable[Any], losses: list[float]) -> None:
        for inputs in batches:
            loss = parts.model(inputs[0]).square().mean()
            parts.step(loss)
            losses.append(loss.item())

    speed = Speed()
    number = 0
    times: dict[str, float] = {}
    losses: list[float] = []
    with parts.run() as run:
        for epoch in run.epochs(3):
            end = time.perf_counter()
            for place, inputs in enumerate(tqdm(run.batches(), disable=True)):
                loss = parts.model(inputs[0]).square().mean()
                parts.step(loss)
                speed.step()
                number += 1
                losses.append(loss.item())
                times.update(step=time.perf_counter() - end)
                end = time.perf_counter()
                if number % 2 == 0 and place:
                    print(f"{epoch} {place} {sum(losses) / len(losses)}")
        for _ in run.epochs(6):
            train_epoch(run.batches(), losses)


def counted_from_the_run(parts: Parts) -> None:
    weights = [0.5, 1.0] * 4
    with parts.run() as run:
        for _ in run.epochs(3):
            first = run.batch_in_epoch
            bar = tqdm(enumerate(run.batches(), first), initial=first, disable=True)
            for number, inputs in bar:
                parts.step(parts.model(inputs[0]).square().mean() / (1 + number))
        for _ in run.epochs(4):
            for inputs, weight in zip(run.batches(), weights[run.batch_in_epoch :], strict=True):
                parts.step(weight * parts.model(inputs[0]).square().mean())


def stored_beside_state_dicts(parts: Parts) -> None:
    class Loss(nn.Module):
        number = 0

        def forward(self, outputs: Tensor) -> Tensor:
            self.number += 1
            return outputs.square().mean() / self.number

    loss_of = Loss()
    parts.model.share = 0.5
    with parts.run(states={"loss": loss_of}) as run:
        for inputs in run.steps(8):
            parts.step(loss_of(parts.model(inputs[0])) * parts.model.share)
            parts.model.share *= 0.9


def evaluated(parts: Parts) -> None:
    """An evaluation after each epoch, and the best result so far."""
    evaluation = DataLoader(parts.data, batch_size=8, shuffle=True)
    with parts.run() as run:
        for epoch in run.epochs(3):
            parts.model.train()
            for inputs in run.batches():
                parts.step(parts.model(inputs[0]).square().mean())
            parts.model.eval()
            total = 0.0
            with torch.no_grad():
                for inputs in evaluation:
                    total += parts.model(inputs[0]).square().sum().item()
            best = min(total, run.metrics.get("eval/best", math.inf))
            if total == best:
                print("best", epoch)
            run.row(best=best)


def timed(parts: Parts) -> None:
    """Speed and time left, a mean over each epoch, and a bar, which are all printed."""
    begun = last = time.perf_counter()
    number, seen, best, speed = 0, 0, 0.0, -1.0
    arguments = SimpleNamespace(step=0)
    net = nn.Sequential(parts.model)
    with parts.run() as run:
        for _ in run.epochs(3):
            bar = tqdm(total=8, disable=True)
            total = 0.0
            for inputs in run.batches():
                loss = net(inputs[0]).square().mean()
                parts.step(loss)
                total += loss.item()
                seen += len(inputs[0])
                rate = seen / (time.perf_counter() - begun)
                if rate > best:
                    best = rate
                now = time.perf_counter()
                spent, last = now - last, now
                if number >= 2:
                    speed = 1 / spent
                print(f"{best:.1f} {speed:.1f} {(96 - seen) / rate:.0f}")
                number += 1
                arguments.step += 1
                print(arguments.step)
                bar.update(1)
            mean = total / 8
            print(mean)
            bar.close()


class Plain(nn.Linear):
    """A model whose file has optimizers, as scripts do."""


optimizer_of_the_file: Any = None


def prepared_in_the_file(parts: Parts) -> None:
    global optimizer_of_the_file
    parts.model = Plain(3, 4)
    optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1, momentum=0.9)
    optimizer_of_the_file = parts.optimizer = parts.accelerator.prepare(optimizer)
    with parts.run() as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean())


def rates_of_numpy(parts: Parts) -> None:
    rates = np.linspace(0.1, 0.01, 9)
    with parts.run(save_every=2) as run:
        for inputs in run.steps(8):
            parts.optimizer.param_groups[0]["lr"] = rates[run.step]
            parts.step(parts.model(inputs[0]).square().mean())


def ignored(parts: Parts) -> None:
    number, schedule = 0, ExponentialLR(parts.optimizer, 0.9)
    with parts.run(ignore=("number", "schedule")) as run:
        for inputs in run.steps(8):
            parts.step(parts.model(inputs[0]).square().mean() / (1 + number))
            number += 1
            schedule.step()


HONEST = [
    sums,
    sums_in_an_object,
    meters,
    random_numbers,
    frozen_teacher,
    given_state,
    shown,
    counted_from_the_run,
    stored_beside_state_dicts,
    evaluated,
    timed,
    rates_of_numpy,
    prepared_in_the_file,
    ignored,
]


@pytest.mark.parametrize("loop", HONEST)
def test_a_loop_that_carries_nothing_gets_no_warning(
    loop: Callable[[Parts], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop(Parts(tmp_path))
    assert caplog.records == []
