"""Optimizers that evaluate other weights than they train: an evaluation or a save changes no bit of
the training."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer import OptimizerConfig, ScheduleConfig
from accel_trainer.checkpoint.initial_weights import load_initial_weights
from accel_trainer.optim.evaluation_weights import evaluation_weights

from .. import processes, workload
from ..training.test_exactness import final_files

BETA = 0.9


class ScheduleFree(Optimizer):
    """Schedule-free SGD: the parameters are y while it trains, and x, the average of z, while it
    evaluates."""

    def __init__(self, parameters: Any, *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "trains": False})

    @torch.no_grad()
    def _move(self, weight: float, *, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["trains"] = trains

    def train(self) -> None:
        self._move(1 - BETA, trains=True)

    def eval(self) -> None:
        self._move(1 - 1 / BETA, trains=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["trains"], "train() was not called"
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(
                    p.grad, alpha=group["lr"] * (BETA * (1 - 1 / group["k"]) - 1)
                )
                z.sub_(p.grad, alpha=group["lr"])


def evaluated(y: dict[str, Tensor], z: list[Tensor]) -> list[Tensor]:
    return [value.lerp(other, 1 - 1 / BETA) for value, other in zip(y.values(), z, strict=True)]


def train(
    folder: Path, stops: list[int | None], every_n_epochs: int = 1, num_epochs: int = 2
) -> None:
    config = workload.make_config(folder, optimizer=OptimizerConfig(), schedule=ScheduleConfig())
    for max_steps in stops:
        trainer = replace(
            config.trainer,
            max_steps=max_steps,
            evaluate_every=f"{every_n_epochs}epochs",
            ema_decay=None,
        )
        workload.train(
            replace(config, trainer=replace(trainer, num_epochs=num_epochs)),
            optimizer=lambda model: ScheduleFree(model.parameters(), lr=0.05),
            schedule=lambda step: 0.05,
        )


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def test_a_schedule_free_run_resumes_and_exports_what_it_evaluates(tmp_path: Path) -> None:
    processes.run(train, tmp_path / "whole", [None], folder=tmp_path / "1")
    processes.run(train, tmp_path / "parts", [3, 5, 8, None], folder=tmp_path / "2")
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")
    stored = newest(tmp_path / "whole")
    trained, weights = (
        load_file(stored / "training_weights.safetensors"),
        load_file(stored / "model.safetensors"),
    )
    z = load_file(stored / "optimizer.safetensors")
    averages = evaluated(trained, [z[f"optimizer.state.{name}.z"] for name in trained])
    assert all(
        torch.equal(x, average) for x, average in zip(weights.values(), averages, strict=True)
    )
    assert not any(torch.equal(weights[name], trained[name]) for name in trained)
    best = json.loads((tmp_path / "whole" / "export" / "config.json").read_text())["weights"]
    exported = load_file(tmp_path / "whole" / "export" / "model.safetensors")
    kept = load_file(tmp_path / "whole" / "checkpoints" / best.split()[-1] / "model.safetensors")
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def test_evaluating_more_often_trains_the_same_weights_of_schedule_free(tmp_path: Path) -> None:
    for name, every_n_epochs in (("often", 1), ("rarely", 3)):
        processes.run(
            train, tmp_path / name, [None], every_n_epochs, 3, folder=tmp_path / f"logs-{name}"
        )
    often, rarely = (
        load_file(newest(tmp_path / n) / "training_weights.safetensors")
        for n in ("often", "rarely")
    )
    assert all(torch.equal(often[name], rarely[name]) for name in often)


def test_a_new_run_starts_from_the_evaluated_weights_of_a_checkpoint(tmp_path: Path) -> None:
    processes.run(train, tmp_path / "run", [3], folder=tmp_path / "1")
    model = workload.SmallNet(norm="group")
    load_initial_weights(model, newest(tmp_path / "run"), skip=None)
    stored = load_file(newest(tmp_path / "run") / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())


def test_parameters_have_the_same_bits_after_a_block_that_raises() -> None:
    model = nn.Linear(3, 2)
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    before = model.weight.detach().clone()
    with suppress(KeyError), evaluation_weights({"": optimizer}):
        assert not torch.equal(model.weight, before)
        raise KeyError
    assert torch.equal(model.weight, before)
    optimizer.step()
