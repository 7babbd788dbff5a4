from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from .. import processes, workload
from ..training.test_exactness import final_files


def run_profiled(folder: Path, is_profiled: bool, num_epochs: int) -> None:
    config = workload.make_config(folder)
    config = replace(
        config,
        run=replace(config.run, profile=is_profiled),
        trainer=replace(config.trainer, num_epochs=num_epochs),
    )
    workload.train(config, dropout=0.2, norm="batch", num_train=120)


def test_a_profile_is_a_trace_and_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    # 8 steps an epoch: an evaluation and a save fall into the steps that are traced.
    (tmp_path / "profiled" / "profile").mkdir(parents=True)
    (tmp_path / "profiled" / "profile" / "trace.json").symlink_to(tmp_path / "elsewhere")
    processes.run(run_profiled, tmp_path / "profiled", True, 2, folder=tmp_path / "logs")
    assert not (tmp_path / "elsewhere").exists(), "a link is replaced, not followed"
    processes.run(run_profiled, tmp_path / "plain", False, 2, folder=tmp_path / "logs-plain")
    assert final_files(tmp_path / "profiled") == final_files(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    events = json.loads((tmp_path / "profiled" / "profile" / "trace.json").read_text())[
        "traceEvents"
    ]
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("name") == "[memory]" for event in events)
    table = (tmp_path / "profiled" / "profile" / "operators.txt").read_text()
    assert "aten::" in table
    assert "CPU Mem" in table
    assert (
        len([event for event in events if str(event.get("name")).startswith("Optimizer.step")])
        == 10
    )


def test_a_run_that_is_too_short_for_a_profile_says_so(tmp_path: Path) -> None:
    job = processes.run(run_profiled, tmp_path / "run", True, 1, folder=tmp_path / "logs")
    early, _, late = job.output().partition("epoch 1/1")
    assert "--profile needs 15 steps, but this run has only 8 left" in early, (
        "before the first step"
    )
    assert "no profile: it needs 15 steps, there were 8" in late
