"""Parameters, groups and heads in a different order in each process: the model is the same.

Such orders come from sets of names. In most tests here they are drawn; in one they come from the
hash seeds of new interpreters.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.data import TensorDataset

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    MeanLoss,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    StepOutput,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.core.module_order import take_order

from .. import processes
from ..checkpoint.test_optimizer_state import Signs
from ..variants import NUM_THREADS, slow_but
from .test_exactness import final_files

HEADS = {"age", "sex", "height", "weight", "pulse"}
NUM_STEPS = 8
Order = Callable[[Iterable[str]], list[str]]
"""Puts names into the order of one process."""


class Net(nn.Module):
    """Heads whose outputs are added up in the order that they have here."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.heads = nn.ModuleDict({name: nn.Linear(4, 1) for name in order(HEADS)})
        self.scales = nn.ParameterDict({name: torch.ones(1) for name in order(HEADS)})
        for name in order(HEADS):
            self.register_buffer(f"count_{name}", torch.zeros(()))
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.body(inputs).tanh()
        total = torch.zeros(len(inputs), 1)
        for name, head in self.heads.items():
            total = total + head(features) * self.scales[name]
        for scale in self.scales.values():
            total = total * 0.9 + scale * 0.1
        return total


class Squares:
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return StepOutput((model(batch.inputs).squeeze(1) - batch.targets).square())


def with_decay(build: Callable[..., Optimizer], order: Order) -> Callable[[nn.Module], Optimizer]:
    """An optimizer whose groups are sets of names, as in many recipes."""

    def build_groups(model: nn.Module) -> Optimizer:
        named = dict(model.named_parameters())
        decayed = {name for name in named if name.endswith("weight")}
        parts = {"decayed": decayed, "others": named.keys() - decayed}
        groups = [
            {
                "params": [named[name] for name in order(parts[part])],
                "weight_decay": 0.1 * (part == "decayed"),
            }
            for part in order(parts)
        ]
        return build(groups, lr=0.02)

    return build_groups


OPTIMIZERS: dict[str, Any] = {
    "built in": None,
    "AdamW": AdamW,
    "SGD with momentum": lambda groups, lr: SGD(groups, lr=lr, momentum=0.9),
    "Adagrad": Adagrad,
    "a user's": Signs,
}


def train(
    folder: Path,
    order: Order,
    *,
    max_steps: int | None = None,
    optimizer: str = "AdamW",
    reduce: str = "float",
    callbacks: tuple[Callback, ...] = (),
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 4, generator=generator)
    samples = TensorDataset(inputs, inputs.sum(1))
    own = OPTIMIZERS[optimizer]
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=2, global_batch_size=8, reduce=reduce),  # type: ignore[arg-type]  # one of two
        trainer=TrainerConfig(
            num_epochs=2, max_steps=max_steps, max_grad_norm=0.5, ema_decay=0.9, log_every_n_steps=1
        ),
        optimizer=OptimizerConfig(name="adamw") if own is None else OptimizerConfig(),
        schedule=ScheduleConfig(shape="constant"),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    with start_run(config, recipe="orders") as run:
        build_trainer(
            run,
            model=Net(order),
            task=Squares(),
            train_set=samples,
            eval_sets=samples,
            metrics=[MeanLoss()],
            optimizer=None if own is None else with_decay(own, order),
            callbacks=callbacks,
        ).fit()


def drawn(seed: str) -> Order:
    """Return a way to order names that is another one on each process."""
    draw = random.Random(f"{seed} {os.environ.get('RANK', 0)}")
    return lambda names: draw.sample(sorted(names), len([*names]))


def in_any_order(folder: Path, seeds: range, optimizers: list[str], reduce: str) -> None:
    """Train each optimizer whole, and stopped and resumed with other orders, in this process."""
    for seed in seeds:
        for name in optimizers:
            options: dict[str, Any] = {"optimizer": name, "reduce": reduce}
            train(folder / f"{name}-{seed}-whole", drawn(f"{seed} first"), **options)
            stops = [*sorted(random.Random(seed).sample(range(1, NUM_STEPS), 2)), None]
            for stop in stops:
                order = drawn(f"{seed} first" if stop == stops[0] else f"{seed} {stop}")
                train(folder / f"{name}-{seed}-parts", order, max_steps=stop, **options)


@pytest.mark.parametrize(
    ("num_processes", "reduce", "seeds"),
    slow_but(
        [(1, "float", range(1)), (2, "exact", range(1))],
        [
            (1, "float", range(1)),
            (2, "exact", range(1)),
            (1, "float", range(1, 6)),
            (2, "float", range(6)),
            (4, "float", range(2)),
            (4, "exact", range(2)),
        ],
    ),
)
def test_a_resume_in_another_order_has_the_same_bits(
    tmp_path: Path, num_processes: int, reduce: str, seeds: range
) -> None:
    names = [*OPTIMIZERS] if num_processes == 1 else ["built in", "AdamW", "a user's"]
    processes.run(
        in_any_order,
        tmp_path,
        seeds,
        names,
        reduce,
        num_processes=num_processes,
        folder=tmp_path / "logs",
    )
    for seed in seeds:
        for name in names:
            whole, parts = (tmp_path / f"{name}-{seed}-{how}" for how in ("whole", "parts"))
            assert final_files(whole) == final_files(parts), (name, seed)


class KillItself(Callback):
    def on_step_end(self, trainer: Any, report: Any) -> None:
        if report.optimizer_step == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


def hashed(names: Iterable[str]) -> list[str]:
    """The order of a set in this process."""
    return [*frozenset(names)]


def start_python(folder: Path, *, hash_seed: int, kill_at: int = 0) -> int:
    """Train in a new interpreter, and return its exit code."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "KILL_AT": str(kill_at),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    code = (
        "import sys; from pathlib import Path; from tests.training import test_orders as t; "
        "t.train(Path(sys.argv[1]), t.hashed, callbacks=(t.KillItself(),))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, cwd=root, check=False).returncode


def test_a_run_is_killed_and_resumed_with_other_hash_seeds(tmp_path: Path) -> None:
    assert start_python(tmp_path / "whole", hash_seed=1) == 0
    assert start_python(tmp_path / "killed", hash_seed=1, kill_at=4) == -signal.SIGKILL
    assert start_python(tmp_path / "killed", hash_seed=2) == 0
    assert final_files(tmp_path / "whole") == final_files(tmp_path / "killed")


def test_a_model_takes_any_order_and_keeps_its_layers() -> None:
    for seed in range(20):
        first, second = Net(drawn(f"{seed} a")), Net(drawn(f"{seed} b"))
        second.load_state_dict(first.state_dict())
        layers = [*second.body]
        take_order(second, first.state_dict())
        assert [*second.state_dict()] == [*first.state_dict()]
        assert [*second.heads] == [*first.heads]
        assert [*second.scales] == [*first.scales]
        assert [name for name, _ in second.named_buffers()] == [n for n, _ in first.named_buffers()]
        assert [*second.body] == layers
        inputs = torch.randn(5, 4)
        assert torch.equal(first(inputs), second(inputs)), "the same sums"


def test_other_names_and_layers_of_a_sequence_stay_as_they_are() -> None:
    model = Net(sorted)
    before = [*model.state_dict()]
    take_order(model, [*before[::-1], "more"])
    assert [*model.state_dict()] == before
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    take_order(layers, [*layers.state_dict()][::-1])
    assert [layer.out_features for layer in layers] == [3, 4]
