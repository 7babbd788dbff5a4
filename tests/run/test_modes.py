"""A run trains in the modes of `model.train()`, but for `--freeze` and a `train` of one's own."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointError,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    ScheduleConfig,
    StepOutput,
    StepReport,
    Task,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.checkpoint.format import COMMIT, MANIFEST
from accel_trainer.checks.modes import KEPT_IN_EVALUATION
from accel_trainer.training.callback import TrainerView

from ..variants import slow_but

SIZE = 4
ROWS = 3 + torch.randn(32, SIZE, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(ROWS, (ROWS.sum(1) > 12).long())


def encoder(*, affine: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE, affine=affine), nn.Linear(SIZE, 2)
    )


class WithMomentum(nn.Module):
    """An encoder and a frozen one that follows it, as in MoCo, BYOL, DINO and Mean Teacher."""

    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.student = encoder(affine=affine)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.student(rows)


def follow_in_place(teacher: Tensor, student: Tensor) -> None:
    teacher.mul_(0.9).add_(student, alpha=0.1)


def follow_by_data(teacher: Tensor, student: Tensor) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1  # as lightly does


class Momentum(Callback):
    """Moves the teacher, and records the modules in evaluation mode that a step leaves."""

    def __init__(self, follow: Callable[[Tensor, Tensor], None]) -> None:
        self._follow = follow
        self.in_evaluation: set[str] = set()

    @torch.no_grad()
    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        self.in_evaluation |= in_evaluation(trainer.model)
        pairs = zip(
            trainer.model.teacher.parameters(), trainer.model.student.parameters(), strict=True
        )
        for teacher, student in pairs:
            self._follow(teacher, student)


def in_evaluation(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if not each.training}


class Agreement:
    """The student is to return what the teacher returns."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        with torch.no_grad():
            wanted = model.teacher(batch.inputs)
        return StepOutput((model(batch.inputs) - wanted).square().mean(1))


class CrossEntropy:
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput(F.cross_entropy(model(batch.inputs), batch.targets, reduction="none"))


def train(
    folder: Path,
    model: nn.Module,
    *,
    task: Task | None = None,
    freeze: str | None = None,
    callbacks: Sequence[Callback] = (),
    max_steps: int | None = None,
    allow_change: tuple[str, ...] = (),
    ema: float | None = None,
    own: bool = False,
) -> nn.Module:
    config = RecipeConfig(
        batch=BatchConfig(global_batch_size=8, per_device_batch_size=8),
        trainer=TrainerConfig(
            num_epochs=2, evaluate_every="3steps", max_steps=max_steps, ema_decay=ema
        ),
        schedule=ScheduleConfig(shape="constant"),
        optimizer=OptimizerConfig(freeze=freeze),
        run=RunConfig(output_dir=folder, allow_change=allow_change),
    )
    with start_run(config, recipe="modes") as run:
        build_trainer(
            run,
            model=model,
            task=task or CrossEntropy(),
            train_set=DATA,
            eval_sets=DATA,
            callbacks=callbacks,
            optimizer=sgd if own else None,
        ).fit()
    return model


def sgd(model: nn.Module) -> SGD:
    return SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


# --- momentum encoders ---


@pytest.mark.parametrize(
    ("follow", "affine", "ema"),
    slow_but(
        [(follow_in_place, False, 0.9), (follow_by_data, True, None)],
        itertools.product((follow_in_place, follow_by_data), (True, False), (None, 0.9)),
    ),
)
def test_a_momentum_encoder_is_in_training_mode_in_each_step(
    tmp_path: Path, follow: Callable[[Tensor, Tensor], None], affine: bool, ema: float | None
) -> None:
    momentum = Momentum(follow)
    model = train(
        tmp_path, WithMomentum(affine=affine), task=Agreement(), callbacks=[momentum], ema=ema
    )
    assert momentum.in_evaluation == set()
    mean = model.teacher[1].running_mean
    assert mean.all()


def test_a_step_of_a_momentum_encoder_is_that_of_a_loop_in_torch(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Recorded(Agreement):
        def step(self, model: nn.Module, batch: Batch) -> StepOutput:
            if model.training:
                seen.append(batch.inputs.clone())
            return super().step(model, batch)

    model = train(
        tmp_path, WithMomentum(), task=Recorded(), callbacks=[Momentum(follow_in_place)], own=True
    )
    other = WithMomentum().train()
    optimizer = sgd(other)
    for rows in seen:
        with torch.no_grad():
            wanted = other.teacher(rows)
        optimizer.zero_grad()
        (other(rows) - wanted).square().mean(1).sum().div(len(rows)).backward()
        optimizer.step()
        with torch.no_grad():
            for pair in zip(other.teacher.parameters(), other.student.parameters(), strict=True):
                follow_in_place(*pair)
    assert len(seen) == 8
    for name, each in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], each)


# --- what is built in evaluation mode ---


class WithTrunk(nn.Module):
    """A trunk in evaluation mode, as `from_pretrained` returns it, and a new head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout()).eval()
        nn.init.constant_(self.trunk[1].running_mean, 3)
        self.head = nn.Linear(SIZE, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.trunk(rows))


class KeepsTrunk(WithTrunk):
    def train(self, mode: bool = True) -> KeepsTrunk:
        super().train(mode)
        self.trunk.eval()
        return self


class Modes(Callback):
    """Records the modules in evaluation mode in each step."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def before_micro_batch(self, trainer: TrainerView, batch: Batch) -> None:
        self.seen.append(in_evaluation(trainer.model))


TRUNK = {"trunk", "trunk.0", "trunk.1", "trunk.2"}


@pytest.mark.parametrize(
    ("make", "freeze", "kept", "is_named"),
    [
        (WithTrunk, None, set(), True),
        (lambda: WithTrunk().eval(), None, set(), False),
        (WithTrunk, r"^trunk\.", TRUNK, False),
        (lambda: WithTrunk().train(), r"^trunk\.", {"trunk.1"}, False),
        (lambda: WithTrunk().train(), r"^trunk\.0", set(), False),
        (WithTrunk, r"^trunk\.0", set(), True),
        (KeepsTrunk, None, TRUNK, False),
    ],
)
def test_what_is_built_in_evaluation_mode_is_trained_and_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[], nn.Module],
    freeze: str | None,
    kept: set[str],
    is_named: bool,
) -> None:
    modes = Modes()
    train(tmp_path, make(), freeze=freeze, callbacks=[modes])
    assert modes.seen == [kept] * 8
    assert ("built in evaluation mode: trunk;" in capsys.readouterr().out) == is_named


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_kept_norms_without_statistics_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mean: float
) -> None:
    model = WithTrunk()
    nn.init.constant_(model.trunk[1].running_mean, mean)
    train(tmp_path, model, freeze=r"^trunk\.", max_steps=2)
    warned = [each for each in caplog.messages if each.startswith("[FREEZE]")]
    assert len(warned) == (mean == 0)
    assert all("trunk.1" in each for each in warned)


# --- runs of older versions ---


def forget_modes(run: Path) -> None:
    """Make the checkpoints those of a version that kept frozen norms in evaluation mode."""
    for checkpoint in (run / "checkpoints").glob("step-*"):
        values: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
        del values[KEPT_IN_EVALUATION]
        (checkpoint / MANIFEST).write_text(json.dumps(values))
        content = (checkpoint / MANIFEST).read_bytes()
        (checkpoint / COMMIT).write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n")


def frozen_trunk(make: Callable[[], nn.Module] = WithTrunk) -> nn.Module:
    model = make()
    model.trunk.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "again", "freeze"),
    [
        (WithTrunk, WithTrunk, None),
        (frozen_trunk, lambda: frozen_trunk(KeepsTrunk), None),
        (frozen_trunk, frozen_trunk, r"^trunk\."),
    ],
)
def test_an_older_run_goes_on_where_the_modes_are_the_same(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    again: Callable[[], nn.Module],
    freeze: str | None,
) -> None:
    train(tmp_path, make(), max_steps=2)
    forget_modes(tmp_path)
    modes = Modes()
    allowed = ("optimizer.freeze",) if freeze else ()
    train(tmp_path, again(), callbacks=[modes], freeze=freeze, allow_change=allowed)
    assert len(modes.seen) == 6


def test_an_older_run_with_frozen_norms_is_refused(tmp_path: Path) -> None:
    train(tmp_path, frozen_trunk(), max_steps=2)
    train(tmp_path, frozen_trunk(), max_steps=3)
    forget_modes(tmp_path)
    with pytest.raises(CheckpointError, match="trunk.1"):
        train(tmp_path, frozen_trunk())
