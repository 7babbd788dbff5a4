"""Every optimizer and schedule of torch is saved in the middle of an epoch, and goes on alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import exact_run
from tests.own_loop.kills import left_by
from tests.variants import slow_but

_OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.SparseAdam)
]

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 5, 5]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
    "ReduceLROnPlateau": {"patience": 1},
    "SWALR": {"swa_lr": 0.05},
}
"""What schedules must be given; those that join others are built below."""


def _chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.MultiStepLR(optimizer, [3])]
    return lr_scheduler.ChainedScheduler(parts)


def _sequential(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2])]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def _schedules() -> dict[str, Callable[[Optimizer], Any]]:
    """Return what builds each schedule of torch, new ones too: those fail until they have words."""
    bases = (lr_scheduler.LRScheduler, lr_scheduler._LRScheduler)
    kinds = {
        name: kind
        for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(kind, bases) and kind not in bases
    } | {"SWALR": SWALR}
    simple = {
        name: lambda optimizer, kind=kind, name=name: kind(optimizer, **_ARGUMENTS.get(name, {}))
        for name, kind in kinds.items()
    }
    return simple | {"ChainedScheduler": _chained, "SequentialLR": _sequential}


class Killed(Exception):
    """Ends a start without a save, as a kill does."""


def fit(
    folder: Path,
    build_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    build_schedule: Callable[[Optimizer], Any],
    *,
    killed_at: int | None = None,
) -> dict[str, bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))
    optimizer = build_optimizer([each for each in model.parameters() if each.ndim == 2])
    schedule = build_schedule(optimizer)
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4, shuffle=True)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    states = {"schedule": schedule}

    with exact_run(Accelerator(cpu=True), folder, **parts, states=states, save_every=1) as run:
        for _ in run.epochs(2):
            for (inputs,) in run.batches():
                if run.step == killed_at:
                    raise Killed

                def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(inputs).square().mean()
                    loss.backward()
                    return loss

                loss = optimizer.step(closure)
                is_plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
                schedule.step(*[loss.item()] * is_plateau)
                run.log("loss", loss)
            run.row()
    return left_by(folder)


def killed(folder: Path, *build: Any) -> dict[str, bytes]:
    with pytest.raises(Killed):
        fit(folder, *build, killed_at=5)
    return fit(folder, *build)


@pytest.mark.parametrize("kind", slow_but([torch.optim.LBFGS], _OPTIMIZERS))
def test_every_optimizer_of_torch_goes_on_alike(kind: Any, tmp_path: Path) -> None:
    build = (lambda parameters: kind(parameters, lr=0.01), _schedules()["StepLR"])
    assert killed(tmp_path / "killed", *build) == fit(tmp_path / "whole", *build)


@pytest.mark.parametrize("name", slow_but(["MultiStepLR", "SequentialLR"], _schedules()))
def test_every_schedule_of_torch_goes_on_alike(name: str, tmp_path: Path) -> None:
    build = (lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.5), _schedules()[name])
    assert killed(tmp_path / "killed", *build) == fit(tmp_path / "whole", *build)
