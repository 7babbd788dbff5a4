"""Runs whose optimizer, schedule or initial weights are the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from accel_trainer import (
    ConfigError,
    OptimizerConfig,
    ScheduleConfig,
    schedule_from_torch,
)
from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.learning_rate import RATIO
from accel_trainer.optim.optimizers import build_optimizer
from accel_trainer.run.optimization import build_own_optimizers
from recipes.distill import DistillationTask

from .. import processes, workload

NUM_STEPS = 10  # of 72 samples, 16 a step, in 2 epochs


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def learning_rates(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["optim/learning_rate"] for row in rows if row["event"] == "train"]


def train(
    folder: Path, *, max_steps: int | None = None, name: str = "sgd", own: str | None = None
) -> None:
    config = workload.make_config(folder, optimizer=OptimizerConfig(name=name))
    config = replace(
        config, trainer=replace(config.trainer, max_steps=max_steps, log_every_n_steps=1)
    )
    if own is None:
        workload.train(config)
    else:
        config = replace(config, optimizer=OptimizerConfig(), schedule=ScheduleConfig())
        workload.train(config, optimizer=OPTIMIZERS[own], schedule=lambda step: 0.01 * 0.9**step)


def two_groups(model: nn.Module) -> Optimizer:
    """A learning rate of its own for the head."""
    *body, weight, bias = model.parameters()
    return torch.optim.RMSprop([{"params": body}, {"params": [weight, bias], "lr": 0.1}], lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {"two groups": two_groups}


def test_a_run_with_the_users_optimizer_and_schedule_resumes_bit_for_bit(tmp_path: Path) -> None:
    check_resume(tmp_path, {"own": "two groups"})
    assert learning_rates(tmp_path / "whole") == pytest.approx(
        [0.01 * 0.9**step for step in range(NUM_STEPS)]
    )


def check_resume(folder: Path, options: dict[str, Any]) -> None:
    processes.run(in_parts, folder, options, folder=folder / "logs")
    whole, parts = (exported(folder / name) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def in_parts(folder: Path, options: dict[str, Any]) -> None:
    train(folder / "whole", **options)
    for max_steps in (3, 7, None):
        train(folder / "parts", max_steps=max_steps, **options)


def test_groups_keep_the_ratio_of_their_learning_rates(tmp_path: Path) -> None:
    """A head with ten times the learning rate takes, in its first step, the step of that learning
    rate."""
    config = workload.make_config(
        tmp_path / "run", optimizer=OptimizerConfig(), schedule=ScheduleConfig()
    )
    config = replace(config, trainer=replace(config.trainer, max_steps=1))
    seen: list[float] = []

    class Observed(torch.optim.RMSprop):
        def step(self, closure: Any = None) -> Any:
            seen.extend(group["lr"] for group in self.param_groups)
            return super().step(closure)

    def build(model: nn.Module) -> Optimizer:
        *body, weight, bias = model.parameters()
        return Observed([{"params": body}, {"params": [weight, bias], "lr": 0.1}], lr=0.01)

    workload.train(config, optimizer=build, schedule=lambda step: 0.02)
    assert seen == pytest.approx([0.02, 0.2])


def test_a_scheduler_of_torch_gives_the_learning_rate_of_every_step() -> None:
    def one_cycle(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.4, total_steps=20)

    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler, expected = one_cycle(theirs), []
    for _ in range(20):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        if len(expected) < 20:
            scheduler.step()
    schedule = schedule_from_torch(one_cycle, learning_rate=0.1)
    assert schedule(13) == expected[13], "in any order, as after a resume"
    assert [schedule(step) for step in range(20)] == expected


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.SGD([torch.zeros(1)]), "optimizer= is an object of type SGD: pass a function"),
        (lambda model: [torch.optim.SGD(model.parameters())], "optimizer= returns an object"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "optimizer is LBFGS, but it needs"),
        (lambda model: torch.optim.SGD([torch.zeros(1)]), "has parameters that are not"),
        (lambda model: torch.optim.SGD(list(model.parameters())[:1]), "optimizer has 1 parameter,"),
    ],
)
def test_an_optimizer_that_is_not_of_the_whole_model_is_refused(
    tmp_path: Path, build: Any, message: str
) -> None:
    config = workload.make_config(
        tmp_path / "run", optimizer=OptimizerConfig(), schedule=ScheduleConfig()
    )
    with pytest.raises(ConfigError, match=message):
        workload.train(config, optimizer=build)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="all parameters of the model are frozen"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerConfig())


def with_rates(*rates: Any) -> Callable[[nn.Module], Optimizer]:
    def build(model: nn.Module) -> Optimizer:
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for group, rate in zip(optimizer.param_groups, [*rates, *rates], strict=False):
            group["lr"] = rate
        return optimizer

    return build


BAD_RATES = [None, math.nan, math.inf, -0.1, "fast", torch.tensor([0.1, 0.2]), (0.1, 0.2)]


@pytest.mark.parametrize("place", [0, 1])
def test_a_group_without_a_learning_rate_is_refused_in_a_line(place: int) -> None:
    for bad in BAD_RATES:
        rates = [0.1, 0.1]
        rates[place] = bad
        with pytest.raises(ConfigError, match="has lr .*set a number") as caught:
            build_own_optimizers({"": with_rates(*rates)}, nn.Linear(2, 2))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="first group .* has lr 0: set it above 0"):
        build_own_optimizers({"": with_rates(0.0, 0.1)}, nn.Linear(2, 2))
    builders = {"": with_rates(torch.tensor(0.1), 0)}
    fine = build_own_optimizers(builders, nn.Linear(2, 2))[""]
    assert [group[RATIO] for group in fine.param_groups] == [1, 0]


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: StepLR(optimizer, 3),
    lambda optimizer: OneCycleLR(optimizer, max_lr=0.4, total_steps=9),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
]


def test_a_scheduler_on_the_optimizer_that_nothing_steps_is_refused() -> None:
    for scheduler in SCHEDULERS:

        def build(model: nn.Module, scheduler: Any = scheduler) -> Optimizer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler(optimizer)
            return optimizer

        with pytest.raises(ConfigError, match="would never step.*schedule_from_torch") as caught:
            build_own_optimizers({"": build}, nn.Linear(2, 2))
        assert caught.value.code == "SCHEDULE"


def short_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.4, total_steps=NUM_STEPS - 2)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: None, r"the recipe's schedule fails at step 0 \(TypeError: .*\): return"),
        ([0.1, 0.1], r"fails at step 0 \(TypeError: 'list' object is not callable\)"),
        (schedule_from_torch(short_cycle, learning_rate=0.1), r"fails at step 9 \(ValueError"),
        (lambda step: 0.1 - 0.02 * step, "returns -0.08 at step 9: return a learning rate of 0"),
        (StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3), "schedule= is torch's StepLR"),
        (lambda step: math.nan, "returns nan at step 0: return"),
    ],
)
def test_a_schedule_that_cannot_last_is_refused_before_the_first_step(
    tmp_path: Path, schedule: Any, message: str
) -> None:
    config = workload.make_config(
        tmp_path / "run", optimizer=OptimizerConfig(), schedule=ScheduleConfig()
    )
    with pytest.raises(ConfigError, match=message):
        workload.train(config, schedule=schedule)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [np.float32, torch.tensor], ids=["numpy", "torch"])
def test_a_schedule_may_return_a_number_of_numpy_or_torch(
    tmp_path: Path, number: Callable[[float], Any]
) -> None:
    config = workload.make_config(
        tmp_path / "run", optimizer=OptimizerConfig(), schedule=ScheduleConfig()
    )
    config = replace(config, trainer=replace(config.trainer, log_every_n_steps=1))
    workload.train(config, schedule=lambda step: number(0.5**step))
    assert learning_rates(tmp_path / "run") == [0.5**step for step in range(NUM_STEPS)]


@pytest.mark.parametrize(
    ("changes", "own", "message"),
    [
        (
            {"optimizer": OptimizerConfig(momentum=0.5)},
            "optimizer",
            "optimizer.momentum has no effect",
        ),
        (
            {"optimizer": OptimizerConfig(learning_rate=0.3)},
            "optimizer",
            "optimizer.learning_rate has no effect",
        ),
        (
            {"optimizer": OptimizerConfig(learning_rate=0.3)},
            "schedule",
            "optimizer.learning_rate has no effect",
        ),
        ({"schedule": ScheduleConfig(shape="linear")}, "schedule", "schedule.shape has no effect"),
    ],
)
def test_a_setting_without_effect_is_refused(
    tmp_path: Path, changes: dict[str, Any], own: str, message: str
) -> None:
    defaults = {"optimizer": OptimizerConfig(), "schedule": ScheduleConfig()}
    config = replace(workload.make_config(tmp_path / "run"), **defaults | changes)
    given: dict[str, Any] = (
        {"optimizer": two_groups} if own == "optimizer" else {"schedule": lambda step: 0.1}
    )
    with pytest.raises(ConfigError, match=message):
        workload.train(config, **given)


def test_adamw_has_its_own_default_learning_rate_and_the_run_records_it(tmp_path: Path) -> None:
    config = workload.make_config(tmp_path / "run", optimizer=OptimizerConfig(name="adamw"))
    workload.train(replace(config, trainer=replace(config.trainer, max_steps=1)))
    assert "learning_rate: 0.001" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_run_does_not_continue_with_another_teacher(tmp_path: Path) -> None:
    config = workload.make_config(tmp_path / "run")
    for max_steps, teacher_seed in ((2, 0), (4, 0), (6, 1)):
        torch.manual_seed(teacher_seed)
        task = DistillationTask(workload.SmallNet(norm="group"))
        trainer = replace(config.trainer, max_steps=max_steps)
        with (
            pytest.raises(CheckpointError, match="TASK_CHANGED") if teacher_seed else nullcontext()
        ):
            workload.train(replace(config, trainer=trainer), task=task)


# --- frozen parts ---


def test_frozen_parts_keep_their_weights_statistics_and_have_no_state(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=0.05, freeze=r"^layers\.[01]\.")
    config = workload.make_config(tmp_path / "run", optimizer=optimizer)
    workload.train(config, norm="batch")
    torch.manual_seed(3)
    initial = workload.SmallNet(norm="batch").state_dict()
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    for piece in ("model", "ema"):
        trained = load_file(newest / f"{piece}.safetensors")
        trained |= load_file(newest / "model.frozen.safetensors")
        changed = {name for name in initial if not torch.equal(initial[name], trained[name])}
        assert changed == {
            name for name in initial if not name.startswith(("layers.0.", "layers.1."))
        }, piece
    state = load_file(newest / "optimizer.safetensors")
    assert (
        len(state)
        == len([name for name, _ in workload.SmallNet(norm="batch").named_parameters()]) - 3
    )


# --- weights from elsewhere ---


def start_from(
    folder: Path, weights: dict[str, Tensor], skip: str | None, capsys: pytest.CaptureFixture[str]
) -> str:
    save_file(weights, folder / "weights.safetensors")
    config = workload.make_config(folder / "run")
    place = replace(config.run, init_from=folder / "weights.safetensors", init_skip=skip)
    workload.train(replace(config, run=place, trainer=replace(config.trainer, num_epochs=0)))
    return next(line for line in capsys.readouterr().out.splitlines() if "tensors loaded" in line)


def other_weights() -> dict[str, Tensor]:
    torch.manual_seed(99)
    return {
        name: tensor.contiguous()
        for name, tensor in workload.SmallNet(norm="group").state_dict().items()
    }


def test_a_head_of_another_size_is_left_out_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = other_weights() | {
        "layers.9.weight": torch.zeros(7, 32),
        "layers.9.bias": torch.zeros(7),
    }
    line = start_from(tmp_path, weights, None, capsys)
    assert (
        "6 tensors loaded; skipped: layers.9.bias, layers.9.weight; new: layers.9.bias, "
        "layers.9.weight" in line
    )
    trained = exported(tmp_path / "run")
    assert torch.equal(trained["layers.0.weight"], weights["layers.0.weight"])
    assert trained["layers.9.weight"].shape == (workload.NUM_CLASSES, 32)


def test_skipped_tensors_keep_the_weights_of_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = other_weights()
    del weights["layers.3.weight"]
    line = start_from(tmp_path, weights, r"layers\.[03]\.", capsys)
    assert "skipped: layers.0.weight; new: layers.0.weight, layers.3.weight" in line
    torch.manual_seed(3)
    initial, trained = workload.SmallNet(norm="group").state_dict(), exported(tmp_path / "run")
    assert torch.equal(trained["layers.0.weight"], initial["layers.0.weight"])
    assert torch.equal(trained["layers.9.weight"], weights["layers.9.weight"])


@pytest.mark.parametrize("skip", [None, "layers.9"])
def test_other_shapes_are_refused(
    tmp_path: Path, skip: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = other_weights()
    weights["layers.0.weight"] = weights["layers.0.weight"][:, :2].contiguous()
    with pytest.raises(CheckpointError, match=r"layers.0.weight is torch.float32 \[8, 2, 3, 3\]"):
        start_from(tmp_path, weights, skip, capsys)


def test_a_pattern_that_skips_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = other_weights()
    with pytest.raises(ConfigError, match="init_skip='fc' matches none of the tensors"):
        start_from(tmp_path, weights, "fc", capsys)


# --- parts that a step cannot train ---


class TwoForwards(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize("build", [TwoForwards, torch.optim.LBFGS])
def test_an_optimizer_that_needs_a_closure_is_refused_before_training(
    build: Any, tmp_path: Path
) -> None:
    config = workload.make_config(tmp_path / "run", optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match="TwoForwards.step .*'closure'|LBFGS, but it needs"):
        workload.train(config, optimizer=lambda model: build(model.parameters(), lr=0.1))
