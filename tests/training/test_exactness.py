"""The promises: one model for any split of the batch, the same bytes after any interruption."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    OptimizerConfig,
    RuntimeConfig,
    StepOutput,
    Trainer,
)

from .. import processes, workload
from ..variants import slow, slow_but


def final_files(folder: Path) -> dict[str, bytes]:
    """What a run's newest checkpoint holds, and its history, without times."""
    newest = max((folder / "checkpoints").glob("step-*"))
    files = {path.name: path.read_bytes() for path in newest.iterdir() if path.is_file()}
    del files["manifest.json"], files["COMMIT"]
    trainer = json.loads(files.pop("trainer.json"))
    trainer["callbacks"]["MetricLogger"].pop("history_bytes")  # throughput numbers vary in length
    progress = {"newest": newest.name, "trainer": trainer, "history": history(folder)}
    return files | {"progress": json.dumps(progress).encode()}


def history(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows
    ]


def weights(folder: Path) -> dict[str, Tensor]:
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        **load_file(newest / "model.safetensors"),
        **{f"ema.{k}": v for k, v in load_file(newest / "ema.safetensors").items()},
    }


def largest_difference(one: Path, other: Path) -> float:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    floats = [name for name in mine if mine[name].is_floating_point()]
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in floats)


SPLITS = {"1x(8x2)": (1, 8, 2), "2x8": (2, 8, 1), "2x(4x2)": (2, 4, 2), "4x4": (4, 4, 1)}


@pytest.mark.parametrize("num_train", slow_but([65], [64, 65, 72]))
def test_any_split_of_the_global_batch_trains_the_same_model(
    tmp_path: Path, num_train: int
) -> None:
    options = {"num_train": num_train, "dtype": torch.float64}
    processes.run(run_split, tmp_path / "whole", 16, 1, options, folder=tmp_path / "logs")
    whole = history(tmp_path / "whole")
    for name, (num_processes, micro, accumulation) in SPLITS.items():
        folder = tmp_path / name
        processes.run(
            run_split,
            folder,
            micro,
            accumulation,
            options,
            num_processes=num_processes,
            folder=tmp_path / f"logs-{name}",
        )
        # float64 leaves no room for a wrong term: 1e-12 is a thousand roundings.
        assert largest_difference(tmp_path / "whole", folder) <= 1e-12, name
        for mine, theirs in zip(whole, history(folder), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9), name


@pytest.mark.parametrize("num_train", slow_but([65], [64, 65, 72]))
def test_batch_norm_trains_the_same_model_on_any_number_of_processes(
    tmp_path: Path, num_train: int
) -> None:
    options = {"num_train": num_train, "norm": "batch", "dtype": torch.float64}
    for num_processes in (1, 2, 4):
        arguments = (tmp_path / str(num_processes), 16 // num_processes, 1, options)
        processes.run(
            run_split,
            *arguments,
            num_processes=num_processes,
            folder=tmp_path / f"logs-{num_processes}",
        )
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= 1e-9
    assert largest_difference(tmp_path / "1", tmp_path / "4") <= 1e-9


def run_split(folder: Path, micro: int, accumulation: int, options: dict[str, Any]) -> None:
    batch = BatchConfig(
        per_device_batch_size=micro, accumulation_steps=accumulation, eval_batch_size=10
    )
    workload.train(
        workload.make_config(folder, batch=batch, checkpoint=CheckpointConfig()), **options
    )


LOADERS = {"images in memory": None, "a dataset": 0, "a dataset with workers": 2}
NUM_TRAIN = 44
NUM_STEPS = 6
ONCE = [(step,) for step in range(1, NUM_STEPS + 1)]
ALWAYS = tuple(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize(
    ("optimizer", "ema_decay", "accumulation", "runs"),
    [
        ("sgd", 0.9, 4, [ALWAYS]),
        *slow(itertools.product(("sgd", "adamw"), (None, 0.9), (1, 4), [[*ONCE, ALWAYS]])),
    ],
)
def test_resume_after_every_step_is_bitwise_equal(
    tmp_path: Path,
    optimizer: str,
    ema_decay: float | None,
    accumulation: int,
    runs: Sequence[tuple[int, ...]],
) -> None:
    """Fault (Resume): stopped after any step -> identical results, for SGD and AdamW, with and
    without EMA, accumulation and data workers

    Fault (Resume): a resume of a resume; at the end of an epoch; of a finished run -> in this
    order: identical results; the evaluation still happens; "this run is finished", exit 0
    """
    jobs = [
        processes.start(
            resume_everywhere,
            tmp_path / name,
            optimizer,
            ema_decay,
            accumulation,
            num_workers,
            runs,
            folder=tmp_path / f"logs {name}",
            has_workers=bool(num_workers),
        )
        for name, num_workers in LOADERS.items()
    ]
    for job in jobs:
        assert job.wait() == [0], job.output()


def resume_everywhere(
    folder: Path,
    optimizer: str,
    ema_decay: float | None,
    accumulation: int,
    num_workers: int | None,
    runs: Sequence[tuple[int, ...]],
) -> None:
    """Train for 2 epochs without a stop, and again for each of `runs`, stopped after its steps."""
    base = workload.make_config(
        folder,
        optimizer=OptimizerConfig(name=optimizer, learning_rate=0.01),
        batch=BatchConfig(
            per_device_batch_size=16 // accumulation,
            accumulation_steps=accumulation,
            eval_batch_size=10,
        ),
    )
    base = replace(base, trainer=replace(base.trainer, ema_decay=ema_decay))

    def run(name: str, *stops: int) -> dict[str, bytes]:
        for max_steps in (*stops, None):
            trainer = replace(base.trainer, max_steps=max_steps)
            config = replace(base, trainer=trainer, run=replace(base.run, output_dir=folder / name))
            workload.train(config, num_train=NUM_TRAIN, dropout=0.2, num_workers=num_workers)
        return final_files(folder / name)

    folder.mkdir()
    undisturbed = run("undisturbed")
    for stops in runs:
        assert run(f"stop-{stops}", *stops) == undisturbed, f"stopped after {stops}"
    assert run("undisturbed") == undisturbed  # a finished run has nothing left to do


class Noisy(ClassificationTask):
    """Scales its losses by numbers from the generators that programs use for mixup and the like."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        scale = random.uniform(0.5, 1) * np.random.beta(2, 2) * torch.rand(())
        return output._replace(losses=output.losses * scale)


class Halved(ClassificationTask):
    """Its losses have a hook that changes their gradient in place."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        output.losses.register_hook(lambda gradient: gradient.mul_(0.5))
        return output


@pytest.mark.parametrize("task", [Noisy(), Halved()])
def test_a_task_may_draw_from_any_generator_and_change_gradients(
    tmp_path: Path, task: ClassificationTask
) -> None:
    def run(name: str, *stops: int) -> dict[str, bytes]:
        base = workload.make_config(tmp_path / name)
        for max_steps in (*stops, None):
            config = replace(base, trainer=replace(base.trainer, max_steps=max_steps))
            workload.train(config, num_train=NUM_TRAIN, task=task)
            random.random()  # a resume begins elsewhere in the streams
            np.random.rand()
        return final_files(tmp_path / name)

    assert run("stopped", 1, 4) == run("undisturbed")


def test_what_ddp_may_assume_of_the_graph_changes_no_bit(tmp_path: Path) -> None:
    for name, options in {"plain": {}, "unused": {"find_unused_parameters": True}}.items():
        processes.run(
            run_with,
            tmp_path / name,
            options,
            num_processes=2,
            folder=tmp_path / f"logs-{name}",
        )
    assert final_files(tmp_path / "unused") == final_files(tmp_path / "plain")


def run_with(folder: Path, options: dict[str, Any]) -> None:
    runtime = RuntimeConfig(num_threads=1, timeout_s=300, **options)
    batch = BatchConfig(per_device_batch_size=8, eval_batch_size=10)
    config = workload.make_config(
        folder, batch=batch, runtime=runtime, checkpoint=CheckpointConfig()
    )
    workload.train(config, callbacks=(AssertGraphOptions(options),))


class AssertGraphOptions(Callback):
    """DistributedDataParallel was told what was asked for, and nothing else."""

    is_essential = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def on_fit_start(self, trainer: Trainer) -> None:
        is_told = trainer._step.wrapped_model.find_unused_parameters
        assert is_told == self._options.get("find_unused_parameters", False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes train without a stop."""
    folder = tmp_path_factory.mktemp("four processes")
    processes.run(run_until, folder / "whole", None, num_processes=4, folder=folder / "logs")
    return folder / "whole"


def test_a_resume_on_many_processes_is_bitwise_equal(tmp_path: Path, whole: Path) -> None:
    """Three or more add up gradients in an order that must not depend on when they started."""
    for max_steps in (3, None):
        processes.run(
            run_until, tmp_path / "stopped", max_steps, num_processes=4, folder=tmp_path / "logs"
        )
    assert final_files(tmp_path / "stopped") == final_files(whole)


def test_a_run_continues_on_fewer_processes_with_the_same_trajectory(
    tmp_path: Path, whole: Path
) -> None:
    """Fault (Resume): a different number of processes -> the global batch stays the same, each
    sample is used once, and the weights agree up to rounding
    """
    for num_processes, max_steps in ((4, 3), (2, 7), (1, None)):
        processes.run(
            run_until,
            tmp_path / "shrinking",
            max_steps,
            num_processes=num_processes,
            folder=tmp_path / f"logs-{num_processes}",
        )
    assert largest_difference(whole, tmp_path / "shrinking") <= 1e-9
    for mine, theirs in zip(history(whole), history(tmp_path / "shrinking"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)


def run_until(folder: Path, max_steps: int | None) -> None:
    # 4 per device on 4 processes; on fewer, the global batch of 16 stays and is accumulated.
    batch = BatchConfig(per_device_batch_size=4, eval_batch_size=10)
    config = workload.make_config(folder, batch=batch, checkpoint=CheckpointConfig())
    workload.train(
        replace(config, trainer=replace(config.trainer, max_steps=max_steps)), dtype=torch.float64
    )
