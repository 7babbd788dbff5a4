"""What stands in the block of a run beside its rounds: before, between and around its loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from accel_trainer import ConfigError, exact_run
from tests.own_loop.kills import left_by
from tests.variants import slow_but

NUM_STEPS = 16  # four epochs of four batches


class Killed(Exception):
    """Ends a start without a save, as a kill does."""


class Parts:
    """A net and what trains it."""

    def __init__(self, **loader: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.average = AveragedModel(self.model)
        data = TensorDataset(torch.randn(16, 3))
        self.loader = DataLoader(data, 4, **({"shuffle": True} | loader))

    def run(self, folder: Path, **more: Any) -> Any:
        given = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        states = {"average": self.average}
        given |= {"states": states, "save_every": 1} | more
        return exact_run(Accelerator(cpu=True), folder, **given)

    def loss(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs).square().mean()
        return loss

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def set_rate(parts: Parts) -> None:
    parts.optimizer.param_groups[0]["lr"] *= 0.5


def draw_head(parts: Parts) -> None:
    parts.model[2].reset_parameters()


def add_to_average(parts: Parts) -> None:
    parts.average.update_parameters(parts.model)


CHANGES = {"optimizer": set_rate, "model": draw_head, "average": add_to_average}
WHEN: dict[str, Callable[[Any], bool]] = {
    "before": lambda run: run.step == 0,
    "between": lambda run: (run.epoch, run.batch_in_epoch) == (2, 0),
    "epoch": lambda run: run.batch_in_epoch == 0,
}
"""The places beside the rounds, and when what stands there is due."""


class Program:
    """Two loops; each place beside their rounds writes a row, and one of them makes a change."""

    def __init__(self, folder: Path, where: str, change: Callable[[Parts], None]) -> None:
        self.folder = folder
        self.where = where
        self.change = change
        self.is_conditional = True
        self.killed_at: int | str | None = None

    def at(self, place: str, run: Any, parts: Parts) -> None:
        if place == self.killed_at:
            raise Killed
        is_due = not self.is_conditional or WHEN[place](run)
        if place == self.where and is_due:
            self.change(parts)
        run.log(place, run.step)
        run.row(**{place: run.step})

    def train(self, run: Any, parts: Parts) -> None:
        self.at("epoch", run, parts)
        for (inputs,) in run.batches():
            if run.step == self.killed_at:
                raise Killed
            loss = parts.loss(inputs)
            parts.step(loss)
            run.log("loss", loss)

    def fit(self, killed_at: int | str | None = None) -> dict[str, bytes]:
        self.killed_at = killed_at
        parts = Parts()
        with parts.run(self.folder) as run:
            self.at("before", run, parts)
            for _ in run.epochs(2):
                self.train(run, parts)
            self.at("between", run, parts)
            for _ in run.epochs(4):
                self.train(run, parts)
            run.row(after=run.step)
        return left_by(self.folder)

    def kill(self, killed_at: int | str) -> None:
        with pytest.raises(Killed):
            self.fit(killed_at)


PLACES = [(where, name) for where in WHEN for name in CHANGES]


@pytest.mark.parametrize(("where", "name"), [each for each in PLACES if each[0] != "epoch"])
def test_code_of_the_block_that_is_done_again_is_refused(
    where: str, name: str, tmp_path: Path
) -> None:
    program = Program(tmp_path, where, CHANGES[name])
    program.is_conditional = False
    program.kill(10)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"LOOP.* changes .*{name}.* again"):
            program.fit()


@pytest.mark.parametrize(
    ("where", "name"), slow_but([("before", "optimizer"), ("between", "model")], PLACES)
)
def test_code_of_the_block_that_is_done_once_goes_on_alike(
    where: str, name: str, tmp_path: Path
) -> None:
    whole = Program(tmp_path / "whole", where, CHANGES[name]).fit()
    for killed_at in [*range(1, NUM_STEPS), "between"]:
        program = Program(tmp_path / f"killed_{killed_at}", where, CHANGES[name])
        program.kill(killed_at)
        assert program.fit() == whole, killed_at
        assert program.fit() == whole, killed_at  # it has ended


@pytest.mark.parametrize("name", CHANGES)
def test_code_at_the_start_of_an_epoch_is_due_once_in_it(name: str, tmp_path: Path) -> None:
    whole = Program(tmp_path / "whole", "epoch", CHANGES[name])
    whole.is_conditional = False
    wanted = whole.fit()
    for killed_at in range(3, NUM_STEPS, 3):
        killed = Program(tmp_path / f"killed_{killed_at}", "epoch", CHANGES[name])
        killed.is_conditional = False
        killed.kill(killed_at)
        assert killed.fit() == wanted, killed_at


@pytest.mark.parametrize("name", CHANGES)
def test_code_between_loops_is_due_where_the_first_has_ended(name: str, tmp_path: Path) -> None:
    whole = Program(tmp_path / "whole", "between", CHANGES[name])
    killed = Program(tmp_path / "killed", "between", CHANGES[name])
    whole.is_conditional = killed.is_conditional = False
    killed.kill("between")
    killed.kill("between")
    assert killed.fit() == whole.fit()


@pytest.mark.parametrize("where", ["before", "between"])
def test_code_of_the_block_that_changes_a_finished_run_is_refused(
    where: str, tmp_path: Path
) -> None:
    program = Program(tmp_path, where, draw_head)
    program.is_conditional = False
    finished = program.fit()
    with pytest.raises(ConfigError, match="changes model again"):
        program.fit()
    assert left_by(tmp_path) == finished | {"metrics.jsonl": left_by(tmp_path)["metrics.jsonl"]}


def test_code_after_the_loops_changes_no_checkpoint(tmp_path: Path) -> None:
    def fit() -> tuple[dict[str, bytes], Tensor]:
        parts = Parts()
        with parts.run(tmp_path) as run:
            for (inputs,) in run.steps(4):
                parts.step(parts.loss(inputs))
            draw_head(parts)
        return left_by(tmp_path), parts.model[2].weight

    first, weight = fit()
    second, again = fit()
    assert first == second
    assert torch.equal(weight, again)


def prefetcher(parts: Parts, run: Any) -> None:
    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        last = next(batches)
        for batch in batches:
            yield last
            last = batch
        yield last

    for _ in run.epochs(2):
        for (inputs,) in ahead(run.batches()):
            parts.step(parts.loss(inputs))


def next_before_backward(parts: Parts, run: Any) -> None:
    batches = run.steps(5)
    batch = next(batches)
    while batch is not None:
        loss = parts.loss(batch[0])
        batch = next(batches, None)
        parts.step(loss)


def prefetcher_with_accumulation(parts: Parts, run: Any) -> None:
    batches = run.steps(3)
    batch = next(batches)
    for number in itertools.count(1):
        if batch is None:
            break
        inputs, batch = batch[0], next(batches, None)
        parts.loss(inputs).backward()
        if number % 2 == 0:
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def accumulation(parts: Parts, run: Any) -> None:
    for _ in run.epochs(2):
        for number, (inputs,) in enumerate(run.batches(), run.batch_in_epoch):
            parts.loss(inputs).backward()
            if number % 2 == 1:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def summed_losses(parts: Parts, run: Any) -> None:
    for _ in run.epochs(2):
        losses: list[Tensor] = []
        for (inputs,) in run.batches():
            losses.append(parts.loss(inputs))
            if len(losses) == 2:
                parts.step(torch.stack(losses).sum())
                losses.clear()


def overflow(parts: Parts, run: Any) -> None:
    """The first step is skipped, as a gradient scaler does."""
    for (inputs,) in run.steps(4):
        parts.loss(inputs).backward()
        if run.batch_in_epoch or run.epoch:
            parts.optimizer.step()
        parts.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "num_lines"),
    [
        (prefetcher, 1),
        (next_before_backward, 1),
        (prefetcher_with_accumulation, 1),
        (accumulation, 0),
        (summed_losses, 0),
        (overflow, 0),
    ],
)
def test_batches_that_are_read_ahead_are_one_line(
    loop: Callable[[Parts, Any], None],
    num_lines: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts()
    with parts.run(tmp_path) as run:
        loop(parts, run)
    assert caplog.text.count("[LOOP_AHEAD]") == num_lines


class Growing(Sampler[int]):
    """Has more samples in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8 + 4 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16)[: len(self)].tolist())


@pytest.mark.parametrize("killed_at", range(1, 9))
def test_epochs_of_other_lengths_go_on_alike(killed_at: int, tmp_path: Path) -> None:
    def fit(folder: Path, killed_at: int | None = None) -> dict[str, bytes]:
        parts = Parts(sampler=Growing(), shuffle=False)
        with parts.run(folder) as run:
            for _ in run.epochs(3):
                for (inputs,) in run.batches():
                    if run.step == killed_at:
                        raise Killed
                    parts.step(parts.loss(inputs))
        return left_by(folder)

    with pytest.raises(Killed):
        fit(tmp_path / "killed", killed_at)
    assert fit(tmp_path / "killed") == fit(tmp_path / "whole")


def test_the_batches_of_a_second_loop_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts()
    forgotten = ExponentialLR(parts.optimizer, 0.9)

    def train(batches: Iterable[Any]) -> None:
        for (inputs,) in batches:
            parts.step(parts.loss(inputs))

    with parts.run(tmp_path) as run:
        for _ in run.epochs(1):
            train(run.batches())
        for _ in run.epochs(2):
            for (inputs,) in run.batches():
                parts.step(parts.loss(inputs))
                forgotten.step()
    assert "[LOOP_STATE] the loop changes forgotten" in caplog.text


def test_a_part_of_an_epoch_is_refused_with_its_cause(tmp_path: Path) -> None:
    parts = Parts()

    def fit() -> None:
        with parts.run(tmp_path) as run:
            for _ in run.epochs(2):
                for (inputs,) in itertools.islice(run.batches(), 2):
                    parts.step(parts.loss(inputs))

    with pytest.raises(ConfigError, match="LOOP.*islice"):
        fit()
