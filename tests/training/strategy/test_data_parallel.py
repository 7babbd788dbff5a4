from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_trainer import Callback
from accel_trainer.core.types import StepOutput
from accel_trainer.training.callback import TrainerView
from accel_trainer.training.strategy.base import StepSums
from accel_trainer.training.strategy.data_parallel import DataParallelStrategy

from ... import processes
from ..planted import Net, make_config, train
from ..test_exactness import final_files


@pytest.fixture
def strategy() -> DataParallelStrategy:
    return DataParallelStrategy(Accelerator(cpu=True), seed=3)


def draw(strategy: DataParallelStrategy, step: int, index: int) -> Tensor:
    strategy.begin_forward(step, index)
    return torch.rand(4)


def test_a_forward_draws_by_its_step_and_its_micro_batch(strategy: DataParallelStrategy) -> None:
    first = draw(strategy, 5, 1)
    draws = [
        draw(strategy, 5, 0),
        draw(strategy, 6, 1),
        draw(DataParallelStrategy(strategy.accelerator, seed=4), 5, 1),
    ]
    assert torch.equal(draw(strategy, 5, 1), first)
    assert not any(torch.equal(other, first) for other in draws)


def test_the_numbers_of_micro_batches_are_added_up(strategy: DataParallelStrategy) -> None:
    parts = [
        StepSums(torch.tensor(1.0), {"correct": torch.tensor(3.0)}, None),
        StepSums(torch.tensor(2.5), {"correct": torch.tensor(4.0)}, None),
    ]
    sums, num_items = strategy.finish(parts)
    assert (float(sums.loss), float(sums.numbers["correct"])) == (3.5, 7)
    assert (sums.num_items, num_items) == (None, None)


def test_the_items_of_micro_batches_are_added_up_over_all_processes(
    strategy: DataParallelStrategy,
) -> None:
    parts = [StepSums(torch.tensor(1.0), {}, torch.tensor(each)) for each in (3, 4)]
    sums, num_items = strategy.finish(parts)
    assert sums.num_items is not None
    assert num_items is not None
    assert (int(sums.num_items), int(num_items)) == (7, 7)


def test_the_totals_of_one_micro_batch_are_its_sums(strategy: DataParallelStrategy) -> None:
    part = StepSums(torch.tensor(1.0), {"correct": torch.tensor(2)}, None)
    assert strategy.finish([part]) == (part, None)


def test_the_sums_of_an_output_add_up_its_samples_without_a_graph() -> None:
    losses = torch.tensor([1.0, 2.5], requires_grad=True)
    numbers = {"hit": torch.tensor([True, True])}
    sums = StepSums.of(StepOutput(losses, None, torch.tensor([3, 4]), numbers))
    assert sums[:3] == (torch.tensor(3.5), {"hit": torch.tensor(2)}, torch.tensor(7))
    assert not sums.loss.requires_grad


def test_a_plain_copy_of_a_model_shares_no_memory(strategy: DataParallelStrategy) -> None:
    model = nn.Linear(2, 2)
    copied = strategy.copy(model)
    assert torch.equal(copied.weight, model.weight)
    assert copied.weight.data_ptr() != model.weight.data_ptr()


def test_a_plain_strategy_refuses_nothing_and_stores_the_live_state(
    strategy: DataParallelStrategy,
) -> None:
    strategy.refuse(["--compile"])
    pieces = {"model": {"weight": torch.ones(2)}}
    assert strategy.gather(pieces)["model"]["weight"] is pieces["model"]["weight"]
    assert strategy.checkpoint_peers(timeout_s=1).process_index == 0


class Skipping(Net):
    """Leaves a layer out of one forward of process 1, as stochastic depth by `random` does."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self.deep = nn.Linear(6, 6)
        self.left = skipped

    def forward(self, inputs: Tensor) -> Tensor:
        self.left -= self.training
        if self.left == -1 and os.environ["RANK"] == "1":
            return super().forward(inputs)
        return super().forward(self.deep(inputs))


def train_skipping(folder: Path, accumulation_steps: int, skipped: int) -> None:
    config = make_config(folder / "run", max_steps=4)
    batch = replace(config.batch, accumulation_steps=accumulation_steps)
    train(replace(config, batch=batch), model=lambda: Skipping(skipped))


@pytest.mark.parametrize(
    ("accumulation_steps", "skipped", "named"),
    [(1, 0, "deep.bias, deep.weight"), (1, 2, "deep.bias, deep.weight"), (2, 1, "a parameter")],
    ids=["first-step", "later-step", "last-micro-batch"],
)
def test_a_layer_that_one_process_leaves_out_ends_the_run(
    tmp_path: Path, accumulation_steps: int, skipped: int, named: str
) -> None:
    job = processes.start(
        train_skipping, tmp_path, accumulation_steps, skipped, num_processes=2, folder=tmp_path
    )
    job.wait()
    for rank in range(2):
        assert f"{named} took no part in the loss of a micro-batch" in job.output(rank)


class Unfreeze(Callback):
    """Trains the deep layer from the second epoch on."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        trainer.model.deep.requires_grad_(trainer.state.epoch >= 1)

    on_epoch_end = on_fit_start


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.deep(inputs))


def train_unfreezing(folder: Path, max_steps: list[int], *, finds_unused: bool) -> None:
    for number in max_steps:
        config = make_config(folder, max_steps=number)
        runtime = replace(config.runtime, find_unused_parameters=finds_unused)
        train(replace(config, runtime=runtime), model=Deep, callbacks=(Unfreeze(),))


def test_freezing_after_the_start_names_the_flag_that_it_needs(tmp_path: Path) -> None:
    job = processes.run(
        partial(train_unfreezing, finds_unused=False),
        tmp_path / "run",
        [8],
        folder=tmp_path / "log",
        codes=[1, 1],
    )
    assert "UNUSED_PARAMETERS" in job.output()
    assert "deep.bias, deep.weight took no part" in job.output()
    assert "before build_trainer" in job.output()
    assert "RuntimeConfig(find_unused_parameters=)" in job.output()


def test_a_run_that_unfreezes_on_two_processes_resumes_exactly(tmp_path: Path) -> None:
    for name, max_steps in {"whole": [8], "parts": [2, 5, 8]}.items():
        processes.run(
            partial(train_unfreezing, finds_unused=True),
            tmp_path / name,
            max_steps,
            num_processes=2,
            folder=tmp_path / f"log-{name}",
        )
    assert final_files(tmp_path / "whole") == final_files(tmp_path / "parts")
