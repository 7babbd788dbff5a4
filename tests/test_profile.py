from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.profiler import profile, record_function

from accel_trainer import Batch, ClassificationTask, Trainer, Window
from accel_trainer.callbacks.profile import flops_per_sample, per_step, sum_phases

from . import processes, workload
from .test_exactness import final_files


def run_profiled(folder: Path, is_profiled: bool, num_epochs: int) -> None:
    config = workload.make_config(folder)
    config = replace(
        config,
        run=replace(config.run, profile=is_profiled),
        trainer=replace(config.trainer, num_epochs=num_epochs),
    )
    workload.train(config, dropout=0.2, norm="batch", num_train=120)


def test_a_profile_is_a_trace_and_a_table_and_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    # 8 steps an epoch: an evaluation and a save fall into the steps that are traced.
    processes.run(run_profiled, tmp_path / "profiled", True, 2, folder=tmp_path / "logs")
    processes.run(run_profiled, tmp_path / "plain", False, 2, folder=tmp_path / "logs-plain")
    assert final_files(tmp_path / "profiled") == final_files(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    table = (tmp_path / "profiled" / "profile" / "table.txt").read_text()
    rows = {name: float(ms) for name, ms in re.findall(r"^  (.+?) +([\d.-]+) ms", table, flags=re.MULTILINE)}
    assert all(rows[name] > 0 for name in ("data", "forward", "backward", "optimizer", "step")), table
    assert "evaluation" in table
    assert "GFLOP an image" in table
    assert table.strip() in (tmp_path / "logs" / "rank-0.log").read_text()
    events = json.loads((tmp_path / "profiled" / "profile" / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event.get("name") == "forward"]) == 10


def test_a_run_that_is_too_short_for_a_profile_says_so(tmp_path: Path) -> None:
    job = processes.run(run_profiled, tmp_path / "run", True, 1, folder=tmp_path / "logs")
    assert "no profile: it needs 15 steps, there were 8" in job.output()


def test_a_phase_inside_itself_is_counted_once() -> None:
    with profile() as profiler, record_function("Optimizer.step#Muon.step"):
        torch.ones(1)
        with record_function("Optimizer.step#SGD.step"):
            torch.ones(1)
    events = list(profiler.events())
    outer = next(event for event in events if event.name == "Optimizer.step#Muon.step")
    sums = sum_phases(events, is_on_device=False)
    assert sums["optimizer"] == pytest.approx(outer.cpu_time_total / 1000)
    assert sums["forward"] == 0.0


def test_the_rows_of_a_table_make_the_whole_step() -> None:
    rows = per_step({"step": 0.5, "data": 0.1}, {"forward": 150.0, "backward": 200.0})
    assert rows == {"data": 10.0, "forward": 15.0, "backward": 20.0, "other": 5.0, "step": 50.0}


@pytest.mark.parametrize("rows", [1, 8])
def test_the_operations_of_a_linear_layer_are_counted_per_sample(rows: int) -> None:
    model = nn.Linear(32, 10)
    batch = Batch(torch.randn(rows, 32), torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
    loader = SimpleNamespace(windows=lambda epoch, first_step: iter([Window([batch], rows)]))
    parts: dict[str, Any] = {"raw_model": model, "loader": loader, "task": ClassificationTask()}
    trainer = SimpleNamespace(**parts, accelerator=Accelerator(cpu=True), state=SimpleNamespace(epoch=0))
    # A product and a sum for each weight, forward and for its gradient; the input needs none.
    assert flops_per_sample(cast(Trainer, trainer)) == 2 * 2 * 32 * 10
    assert model.weight.grad is None
    assert model.training
