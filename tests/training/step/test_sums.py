"""Losses that are summed over a step, gradients clipped by value, averages every n steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ConfigError,
    DivergedError,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    StepOutput,
    Trainer,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.rng import epoch_permutation

from ... import processes
from ...variants import NUM_THREADS
from ..test_exactness import final_files, history

EPS = 10.0  # a mean would take steps of another size


class Sum:
    """A squared error, summed over the step."""

    reduction: Any = "sum"

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        losses = (model(batch.inputs) - batch.targets).square().sum(1)
        return StepOutput(losses, reduction=self.reduction)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :2].sin() * 3


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), 0.5, eps=EPS)


def train(
    folder: Path,
    task: Any = None,
    *callbacks: Callback,
    per_device: int = 4,
    reduce: Any = "float",
    max_steps: int | None = None,
    optimizer: Callable[[nn.Module], Any] = adam,
    **settings: Any,
) -> Trainer:
    inputs, targets = data()
    config = RecipeConfig(
        seed=3,
        batch=BatchConfig(per_device_batch_size=per_device, global_batch_size=16, reduce=reduce),
        trainer=TrainerConfig(num_epochs=2, max_steps=max_steps, log_every_n_steps=1, **settings),
        schedule=ScheduleConfig(shape="constant"),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    with start_run(config, recipe="sums") as run:
        trainer = build_trainer(
            run,
            model=net(),
            task=task or Sum(),
            train_set=TensorDataset(inputs[:40], targets[:40]),
            eval_sets=TensorDataset(inputs[40:], targets[40:]),
            optimizer=optimizer,
            callbacks=callbacks,
        )
        trainer.fit()
    return trainer


def torch_loop(
    *, num_steps: int = 6, clip: Callable[[nn.Module], object] = lambda model: None
) -> tuple[nn.Module, list[float], list[nn.Module]]:
    """Train as everybody does; return also the mean loss of each step, and the models after it."""
    inputs, targets = data()
    model, losses, models = net(), [], []
    optimizer = adam(model)
    for step in range(num_steps):
        order = epoch_permutation(40, seed=3, epoch=step // 3)
        ids = order[step % 3 * 16 : step % 3 * 16 + 16]  # the last batch of an epoch is short
        optimizer.zero_grad()
        loss = (model(inputs[ids]) - targets[ids]).square().sum()
        loss.backward()
        clip(model)
        optimizer.step()
        losses.append(loss.item() / len(ids))
        models.append(copy.deepcopy(model))
    return model, losses, models


def check(trainer: Trainer, model: nn.Module) -> None:
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-12)


def train_in_parts(folder: Path) -> Trainer:
    for max_steps in (1, 4, None):
        trainer = train(folder, max_steps=max_steps)
    model, losses, _ = torch_loop()
    check(trainer, model)
    rows = [row["train/loss"] for row in history(folder) if row["event"] == "train"]
    assert rows == pytest.approx(losses, rel=1e-9)  # rows have 36 bits
    inputs, targets = data()
    with torch.no_grad():
        loss = (model(inputs[40:]) - targets[40:]).square().sum() / 20
    [*_, last] = [row["eval/loss"] for row in history(folder) if row["event"] == "eval"]
    assert last == pytest.approx(float(loss), rel=1e-9)
    return trainer


def test_a_sum_over_a_step_has_the_numbers_of_its_torch_loop(tmp_path: Path) -> None:
    train_in_parts(tmp_path)


def test_a_sum_over_a_step_is_that_of_all_processes(tmp_path: Path) -> None:
    processes.run(train_in_parts, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")


def train_exactly(folder: Path) -> None:
    check(train(folder, reduce="exact"), torch_loop()[0])


def test_exact_sums_of_sums_have_the_same_bytes(tmp_path: Path) -> None:
    train_exactly(tmp_path / "one")
    processes.run(train_exactly, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")
    assert final_files(tmp_path / "one") == final_files(tmp_path / "two")


class Sometimes(Sum):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        kind: Any = "sum" if batch.position.step < 2 else "mean"
        return super().step(model, batch)._replace(reduction=kind)


class Items(Sum):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().step(model, batch)._replace(num_items=torch.ones(len(batch)))


class Unknown(Sum):
    reduction = "none"


class Mean(Sum):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        mean = super().step(model, batch).losses.mean()
        return StepOutput.from_mean(mean, num_items=len(batch))._replace(reduction="sum")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Sometimes, "NUM_ITEMS.*some micro-batches only.*reduction='sum'"),
        (Items, "TASK.*reduction='sum'.*without num_items"),
        (Mean, "TASK.*reduction='sum'.*without num_items"),
        (Unknown, "TASK.*reduction='none'.*mean, or sum"),
    ],
)
def test_a_sum_that_is_none_is_refused(tmp_path: Path, task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        train(tmp_path, task())
    assert "\n" not in str(refused.value)


# --- clipping by value ---


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.7)


def train_clipped(folder: Path) -> None:
    trainer = train(folder, max_grad_value=0.7)
    check(trainer, torch_loop(clip=clip_value)[0])
    norms = [row["optim/grad_norm"] for row in history(folder) if row["event"] == "train"]
    assert min(norms) > 0.7


def test_gradients_are_clipped_by_value_as_in_torch(tmp_path: Path) -> None:
    train_clipped(tmp_path / "one")
    processes.run(train_clipped, tmp_path / "two", num_processes=2, folder=tmp_path / "logs")


class Infinite(Sum):
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        return output._replace(losses=output.losses * (1e308 if batch.position.step else 1))


def test_clipping_by_value_hides_no_infinite_gradient(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="NONFINITE.*step 2"):
        train(tmp_path, Infinite(), max_grad_value=0.7)


# --- averages ---


class Note(Callback):
    unsaved_attributes = ("averages",)

    def __init__(self) -> None:
        self.averages: list[dict[str, Tensor]] = []

    def on_step_end(self, trainer: Trainer, report: Any) -> None:
        assert trainer.average_model is not None
        weights = trainer.average_model.state_dict().items()
        self.averages.append({name: value.clone() for name, value in weights})


def test_an_average_moves_every_n_steps_and_copies_in_its_warmup(tmp_path: Path) -> None:
    note = Note()
    settings = {"ema_decay": 0.9, "ema_every_n_steps": 2, "ema_warmup_steps": 2}
    train(tmp_path / "whole", None, note, **settings)
    models = [model.state_dict() for model in torch_loop()[2]]
    expected = net().state_dict()
    for step in range(1, 7):
        if step % 2 == 0:
            number = step // 2
            decay = 0.0 if step <= 2 else (1 + number) / (10 + number)
            expected = {
                name: value.lerp(models[step - 1][name], 1 - decay)
                for name, value in expected.items()
            }
        for name, value in expected.items():
            torch.testing.assert_close(note.averages[step - 1][name], value, rtol=0, atol=1e-12)
    for max_steps in (1, 3, None):
        train(tmp_path / "parts", max_steps=max_steps, **settings)
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (
        ("max_grad_value", 0.0),
        ("ema_every_n_steps", 0),
        ("ema_warmup_steps", -1),
    ):
        with pytest.raises(ConfigError, match=f"trainer.{name}"):
            TrainerConfig(**{name: value})
