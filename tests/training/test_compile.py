"""A compiled net resumes as exactly as any, compiling is timed separately, and what cannot be compiled runs eagerly."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from torch._inductor import config as inductor

from accel_trainer import BatchConfig, RuntimeConfig

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
    trainer = replace(config.trainer, max_steps=max_steps, num_epochs=1, log_every_n_steps=1, ema_decay=None)
    workload.train(replace(config, trainer=trainer), num_train=NUM_TRAIN, norm="batch")


@pytest.mark.slow
def test_a_compiled_run_resumes_with_the_same_bits_and_counts_compiling_apart(tmp_path: Path) -> None:
    processes.run(train, tmp_path / "whole", None, True, folder=tmp_path / "1")
    for max_steps in (2, None):
        processes.run(train, tmp_path / "stopped", max_steps, True, folder=tmp_path / "2")
    assert final_files(tmp_path / "stopped") == final_files(tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    first, second, third, _ = rows
    assert first["perf/compile_s"] > 0
    assert "perf/compile_s" not in second
    assert third["perf/compile_s"] > 0, "the last step has a shape of its own"
    assert 16 / first["perf/images_per_s"] > 0


def test_without_a_compiler_the_model_runs_in_eager_mode_and_says_so_once(tmp_path: Path) -> None:
    """Once for two graphs: that of a step, and that of the evaluation."""
    job = processes.run(train, tmp_path / "as it is", 1, True, "/no/compiler", folder=tmp_path / "1")
    assert job.output().count("cannot compile this model, which runs in eager mode") == 1
    assert "Traceback" not in job.output()
    processes.run(train, tmp_path / "plain", 1, False, folder=tmp_path / "2")
    assert final_files(tmp_path / "as it is") == final_files(tmp_path / "plain")
