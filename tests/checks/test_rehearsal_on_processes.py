"""State that differs by process, or that shards hide, is named after the first step.

Honest parts pass.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from accel_trainer import Callback, CheckpointError, OptimizerConfig

from .. import processes, workload
from ..checkpoint.sharded_run import KINDS, newest, stored_bytes
from ..checkpoint.test_unsaved_state import Counting
from ..training import planted
from ..variants import slow_but
from .test_rehearsal import ForgetfulCounter


class Plain(SGD):
    """SGD with momentum, for those that keep something beside it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    @property
    def weight(self) -> Tensor:
        return self.param_groups[0]["params"][0]


class OwnNorm(Plain):
    """Keeps the norm of its part of a gradient as a number."""

    def step(self, closure: Any = None) -> None:
        gradient = self.weight.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        super().step()
        self.state[self.weight]["norm"] = float(local.norm())


class OwnRank(Plain):
    """Keeps in a group what differs by process."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["rank"] = int(os.environ["RANK"])


class OwnOrder(Plain):
    """Keeps the same numbers on all processes, each in another order."""

    def step(self, closure: Any = None) -> None:
        super().step()
        numbers = torch.tensor([1.0, 2.0])
        self.state[self.weight]["order"] = numbers.roll(int(os.environ["RANK"]))


class Noisy(Plain):
    """Adds noise to the weights, which each process draws for itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.weight.add_(torch.randn(self.weight.shape, generator=generator), alpha=0.01)


class ShardedNorm(Plain):
    """Keeps a norm of shards as torch returns it."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.weight]["norm"] = self.weight.grad.norm()


class SettingOfTraining(Plain):
    """Adds a setting to its groups as it trains."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


OPTIMIZERS: dict[str, Any] = {
    each.__name__: each
    for each in (
        OwnNorm,
        OwnRank,
        OwnOrder,
        Noisy,
        ShardedNorm,
        SettingOfTraining,
        Counting,
        ForgetfulCounter,
    )
}
REFUSED = {
    (
        "gathered",
        "OwnNorm",
    ): "processes differ after a step (process 1: optimizer.state.linear.weight.norm ",
    (
        "whole",
        "OwnOrder",
    ): "processes differ after a step (process 1: optimizer.state.linear.weight.order bits ",
    ("whole", "Noisy"): "processes differ after a step (process 1: model.linear.weight bits ",
    (
        "gathered",
        "ForgetfulCounter",
    ): "ForgetfulCounter.load_state_dict does not restore the optimizer's k: a resumed",
    (
        "whole",
        "OwnRank",
    ): "(process 1: optimizer.param_groups[0].rank 1; process 0: optimizer.param_groups[0].rank 0)",
    ("sharded", "OwnRank"): "(process 1: optimizer.param_groups[0].rank 1; process 0: ",
    (
        "sharded",
        "ShardedNorm",
    ): "ShardedNorm.load_state_dict does not restore the optimizer's state[0].norm: ",
    (
        "sharded",
        "ForgetfulCounter",
    ): "ForgetfulCounter.load_state_dict does not restore the optimizer's k: a resumed",
}


def train(folder: Path, kind: str, name: str, max_steps: int = 3) -> None:
    os.environ.update(KINDS[kind])
    config = replace(planted.make_config(folder, max_steps=max_steps), optimizer=OptimizerConfig())
    planted.train(config, optimizer=lambda model: OPTIMIZERS[name](model.parameters()))


@pytest.mark.parametrize(("kind", "name"), slow_but([*REFUSED][:4], [*REFUSED]))
def test_an_optimizer_that_differs_by_process_or_hides_in_shards_is_named(
    tmp_path: Path, kind: str, name: str
) -> None:
    """Fault (Resume): weights or an optimizer's state differ between processes, for example because
    each draws its own noise or computes a norm over its own shards only -> the run ends at its
    first step, with one line that names the first tensor that differs
    """
    job = processes.run(train, tmp_path / "run", kind, name, folder=tmp_path / "logs", codes=[1, 1])
    for rank in (0, 1):
        assert REFUSED[kind, name] in job.output(rank)
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


@pytest.mark.parametrize(
    ("kind", "name"),
    slow_but(
        [("sharded", "SettingOfTraining")],
        [("gathered", "Counting"), ("sharded", "SettingOfTraining"), ("whole", "Counting")],
    ),
)
def test_an_honest_optimizer_is_not_named_and_resumes_to_the_same_bytes(
    tmp_path: Path, kind: str, name: str
) -> None:
    for folder, attempts in (("whole", (5,)), ("parts", (3, 5))):
        for stop in attempts:
            logs = tmp_path / f"logs-{folder}-{stop}"
            job = processes.run(
                train, tmp_path / folder, kind, name, stop, num_processes=2, folder=logs
            )
            assert not re.search("UNSAVED_STATE|CKPT_INEXACT", job.output(0) + job.output(1))
    assert stored_bytes(newest(tmp_path / "parts")) == stored_bytes(newest(tmp_path / "whole"))


class Evaluates(Callback):
    """Puts the model, or a part of it, into evaluation mode after a step, and leaves it so."""

    def __init__(self, step: int, part: str, is_everywhere: bool) -> None:
        self.step, self.part, self.is_everywhere = step, part, is_everywhere

    def on_step_end(self, trainer: Any, report: Any) -> None:
        is_here = self.is_everywhere or trainer.accelerator.is_main_process
        if report.optimizer_step == self.step and is_here:
            trainer.model.get_submodule(self.part).eval()

    def on_evaluate_end(self, trainer: Any, metrics: Any) -> None:
        print(f"evaluated at step {trainer.state.optimizer_step}")


@pytest.mark.parametrize(
    ("step", "part", "is_everywhere"), [(1, "", False), (3, "1", False), (4, "", True)]
)
def test_a_training_mode_that_differs_by_process_ends_the_run(
    tmp_path: Path, step: int, part: str, is_everywhere: bool
) -> None:
    """Fault (Resume): a callback leaves the model, or a part of it, in evaluation mode on some
    processes -> the run ends before its next save or evaluation, with an error that lists the
    module
    """
    job = processes.run(
        leave_in_evaluation_mode,
        tmp_path,
        Evaluates(step, part, is_everywhere),
        num_processes=2,
        folder=tmp_path,
    )
    name = part or "the model"
    expected = f"(process 1: training of {name} is True; process 0: training of {name} is False)"
    for rank in range(2):
        assert (expected in job.output(rank)) is not is_everywhere, job.output(rank)
        evaluated = re.findall(r"evaluated at step (\d+)", job.output(rank))
        assert any(int(each) >= step for each in evaluated) is is_everywhere, job.output(rank)


def leave_in_evaluation_mode(folder: Path, callback: Callback) -> None:
    config = workload.make_config(folder / "run")
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 4))
    try:
        workload.train(config, callbacks=(callback,), net=lambda: net)
    except CheckpointError as error:
        print(error)
