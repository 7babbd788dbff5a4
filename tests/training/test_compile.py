"""A compiled net resumes as exactly as any other, and compiling is timed separately.

What cannot be compiled runs eagerly.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from accel_trainer import (
    Batch,
    BatchConfig,
    ClassificationTask,
    ConfigError,
    RuntimeConfig,
    StepOutput,
)
from accel_trainer.core.timing import Stopwatch
from accel_trainer.training import compile as compile_module
from accel_trainer.training.compile import Compiler, compile_errors_explained

from .. import processes, workload
from .test_exactness import final_files

NUM_TRAIN = 44  # three steps, of which the last has fewer samples


def train(folder: Path, max_steps: int | None, compiles: bool, compiler: str | None = None) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.with_name("kernels"))
    if compiler is not None:
        inductor.cpp.cxx = (None, compiler)  # what it reads from CXX as it is loaded
    config = workload.make_config(
        folder,
        batch=BatchConfig(per_device_batch_size=16, eval_batch_size=37),
        runtime=RuntimeConfig(num_threads=1, compile=compiles),
    )
    trainer = replace(
        config.trainer, max_steps=max_steps, num_epochs=1, log_every_n_steps=1, ema_decay=None
    )
    workload.train(replace(config, trainer=trainer), num_train=NUM_TRAIN, norm="batch")


@pytest.mark.slow
def test_a_compiled_run_resumes_exactly_and_counts_compiling_apart(tmp_path: Path) -> None:
    processes.run(train, tmp_path / "whole", None, True, folder=tmp_path / "1")
    for max_steps in (2, None):
        processes.run(train, tmp_path / "stopped", max_steps, True, folder=tmp_path / "2")
    assert final_files(tmp_path / "stopped") == final_files(tmp_path / "whole")
    rows = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    first, second, third, _ = rows
    assert first["perf/compile_s"] > 0
    assert "perf/compile_s" not in second
    assert third["perf/compile_s"] > 0, "the last step has a shape of its own"
    assert 16 / first["perf/samples_per_s"] > 0


def test_without_a_compiler_the_model_runs_in_eager_mode_and_says_so_once(tmp_path: Path) -> None:
    """Once for two graphs: that of a step, and that of the evaluation."""
    job = processes.run(
        train, tmp_path / "as it is", 1, True, "/no/compiler", folder=tmp_path / "1"
    )
    assert job.output().count("cannot compile this model, which runs in eager mode") == 1
    assert "Traceback" not in job.output()
    processes.run(train, tmp_path / "plain", 1, False, folder=tmp_path / "2")
    assert final_files(tmp_path / "as it is") == final_files(tmp_path / "plain")


def test_a_run_that_began_in_eager_mode_resumes_in_it_with_a_compiler(tmp_path: Path) -> None:
    processes.run(train, tmp_path / "eager", 1, True, "/no/compiler", folder=tmp_path / "1")
    job = processes.run(train, tmp_path / "eager", None, True, folder=tmp_path / "2")
    assert "it continues in eager mode" in job.output()
    processes.run(train, tmp_path / "plain", None, False, folder=tmp_path / "3")
    assert final_files(tmp_path / "eager") == final_files(tmp_path / "plain")


@pytest.mark.slow
def test_a_compiled_run_does_not_continue_where_there_is_no_compiler(tmp_path: Path) -> None:
    processes.run(train, tmp_path / "run", 1, True, folder=tmp_path / "1")
    processes.run(train_refused, tmp_path / "run", folder=tmp_path / "2")


def train_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="this run's model was compiled, and --compile fails here"
    ):
        train(folder, None, True, "/no/compiler")


# --- more variants than torch compiles by default ---


class Traced(Compiler):
    """Counts the graphs, and leaves out their compilation, which takes seconds each."""

    num_graphs = 0

    def _compile_graph(self, graph: Any, inputs: list[Tensor]) -> Any:
        self.num_graphs += 1
        return graph.forward


class Doubled(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2


def compile_ten_shapes() -> None:
    compiler = Traced(Stopwatch())
    model = Doubled()
    compiler.compile(model)
    for size in range(1, 11):
        model(torch.zeros(size, 2))
    assert compiler.num_graphs == 10


def test_more_shapes_than_torchs_recompile_limit_are_all_compiled(tmp_path: Path) -> None:
    processes.run(compile_ten_shapes, folder=tmp_path)


class ReadsNumber(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + int(inputs[0].item()))


def compile_too_many_numbers() -> None:
    compile_module.MAX_VARIANTS = 3
    model = ReadsNumber()
    Traced(Stopwatch()).compile(model)
    for number in range(3):
        model(torch.full((2,), float(number)))
    refused = pytest.raises(
        ConfigError, match="--compile has compiled a forward 3 times, .*read no number"
    )
    with refused, compile_errors_explained():
        model(torch.full((2,), 3.0))


def test_reaching_the_limit_of_variants_ends_the_run_in_one_line(tmp_path: Path) -> None:
    processes.run(compile_too_many_numbers, folder=tmp_path)


class ManyVariants(ClassificationTask):
    """Cuts each batch to a size of its own, as batches of texts are cut to their longest."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        number = int(batch.sample_ids.sum()) % 14
        return super().step(
            model, replace(batch, inputs=batch.inputs[..., : 4 + number // 5, : 4 + number % 5])
        )


class NumberNet(nn.Module):
    """Multiplies by a number read from its inputs, which torch.compile takes as a constant."""

    def __init__(self, *, norm: str, dropout: float) -> None:
        super().__init__()
        self.head = nn.Linear(3, workload.NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(images.mean((2, 3)))
        return self.head(hidden * (1 + int(images[0, 0, 0, 0].item() * 100) / 300))


def train_many_variants(folder: Path, kind: str, stops: list[int | None]) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.with_name("kernels"))
    if kind == "number":
        workload.SmallNet = NumberNet  # type: ignore[misc,assignment]
    runtime = RuntimeConfig(num_threads=1, compile=True)
    for max_steps in stops:
        torch._dynamo.reset()
        config = workload.make_config(
            folder, runtime=runtime, batch=BatchConfig(per_device_batch_size=4)
        )
        trainer = replace(config.trainer, max_steps=max_steps, num_epochs=1)
        task = ManyVariants() if kind == "shape" else None
        workload.train(replace(config, trainer=trainer), num_train=64, num_test=4, task=task)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shape", "number"])
def test_a_compiled_run_beyond_torchs_recompile_limit_resumes_anywhere(
    tmp_path: Path, kind: str
) -> None:
    processes.run(train_many_variants, tmp_path / "whole", kind, [None], folder=tmp_path / "1")
    processes.run(
        train_many_variants, tmp_path / "parts", kind, [3, 10, None], folder=tmp_path / "2"
    )
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")
