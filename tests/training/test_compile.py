"""A compiled net resumes as exactly as any other, and compiling is timed separately."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._inductor import config as inductor

from accel_trainer import (
    Batch,
    BatchConfig,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RuntimeConfig,
    StepOutput,
)
from accel_trainer.checks.explain import explain
from accel_trainer.cli.flags.parser import parse_config
from accel_trainer.core.timing import Stopwatch
from accel_trainer.fault_tolerance.activity import Activity
from accel_trainer.training import compile as compile_module
from accel_trainer.training.compile import compile_model

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


@pytest.mark.slow
def test_without_a_compiler_the_first_step_ends_the_run_in_one_line(tmp_path: Path) -> None:
    processes.run(train_refused, tmp_path / "run", folder=tmp_path)


def train_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile= cannot compile this model \(.*compiler"):
        train(folder, None, True, "/no/compiler")


def compile_in_each_mode() -> None:
    given = []

    def record(graph: Any, inputs: list[Tensor], config_patches: object) -> Any:
        given.append(config_patches)
        return graph.forward

    from torch._inductor import compile_fx

    compile_fx.compile_fx = record
    for mode in (None, "reduce-overhead"):
        model = Doubled()
        compile_model(model, Stopwatch(), mode)
        model(torch.zeros(1, 2))
    assert given == [{}, {"triton.cudagraphs": True}]


def test_a_mode_reaches_torchs_compiler(tmp_path: Path) -> None:
    processes.run(compile_in_each_mode, folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compile", "fastest"], "--compile fastest: expected bool or reduce-overhead"),
        (["--no-compile", "reduce-overhead"], "only --compile or --no-compile"),
    ],
)
def test_a_mode_that_is_none_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(RecipeConfig, words, description="")


def test_compile_is_a_switch_that_may_name_a_mode() -> None:
    found = [
        parse_config(RecipeConfig, words, description="").runtime.compile
        for words in ([], ["--compile"], ["--compile", "reduce-overhead"], ["--no-compile"])
    ]
    assert found == [False, True, "reduce-overhead", False]


# --- more variants than torch compiles by default ---


graphs: list[Any] = []


def leave_out_compilation() -> None:
    """Only collect the graphs: their compilation takes seconds each."""

    def collect(preparation: Stopwatch, graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module.compile_graph = collect


class Doubled(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2


def compile_ten_shapes() -> None:
    leave_out_compilation()
    model = Doubled()
    compile_model(model, Stopwatch())
    for size in range(1, 11):
        model(torch.zeros(size, 2))
    assert len(graphs) == 10


def test_more_shapes_than_torchs_recompile_limit_are_all_compiled(tmp_path: Path) -> None:
    processes.run(compile_ten_shapes, folder=tmp_path)


def compile_for_both() -> None:
    torch._dynamo.lookup_backend = lambda _: lambda graph, inputs, config_patches: graph.forward
    model, preparation = Doubled(), Stopwatch()
    compile_model(model, preparation)
    with torch.no_grad():
        model(torch.zeros(2))
    assert preparation.seconds == 0
    model(torch.zeros(2))
    assert preparation.seconds > 0


def test_compiling_for_an_evaluation_is_not_counted_twice(tmp_path: Path) -> None:
    processes.run(compile_for_both, folder=tmp_path)


class ReadsNumber(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + int(inputs[0].item()))


def compile_too_many_numbers() -> None:
    compile_module.MAX_VARIANTS = 3
    model = ReadsNumber()
    leave_out_compilation()
    compile_model(model, Stopwatch())
    for number in range(3):
        model(torch.full((2,), float(number)))
    with pytest.raises(Exception, match="recompile") as refused:
        model(torch.full((2,), 3.0))
    batch, accelerator = BatchConfig(), Accelerator(cpu=True)
    explained = explain(refused.value, batch, Activity(), accelerator)
    assert explained is not None
    assert "read no number" in explained.message


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
