"""One line from one process, whichever fails, and wherever in its life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from accel_trainer import (
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunResult,
    RuntimeConfig,
    Task,
    main,
    start_run,
)
from accel_trainer.callbacks.console import speaking_flags
from accel_trainer.cli.recipe.notes import warn_if_loss_grew
from accel_trainer.core.train_state import TrainState
from accel_trainer.core.types import Batch, StepOutput
from accel_trainer.distributed.accelerator import start_accelerator

from ... import processes, workload
from ...variants import slow

ROOT = Path(__file__).parents[3]


def test_a_process_that_fails_before_it_connects_reports_its_own_error(tmp_path: Path) -> None:
    job = processes.run(join_unless_mistaken, folder=tmp_path, codes=[70, 64])
    assert job.output(1).splitlines() == [
        "accel_trainer: process 1: error[CONFIG]: unknown flag --epoch: did you mean --epochs?"
    ]
    assert (
        job.output(0)
        .splitlines()[-1]
        .startswith("accel_trainer: error[RENDEZVOUS]: process 0 of 2 did not")
    )


def join_unless_mistaken() -> None:
    """As on two machines of which one has an old script."""
    main(
        join,
        RecipeConfig,
        description="",
        argv=["--epoch", "3"] if os.environ["RANK"] == "1" else [],
    )


def join(config: RecipeConfig) -> RunResult:
    start_accelerator(RuntimeConfig(timeout_s=2))
    raise AssertionError("met nobody")


@pytest.mark.usefixtures("python_is_forked")
def test_a_mistake_that_all_processes_make_is_reported_once() -> None:
    pytest.importorskip("sklearn")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "0",
    ]
    run = subprocess.run(
        [*launcher, "recipes/minimal.py", "--epoch", "3"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    said = [line for line in run.stderr.splitlines() if line.startswith("accel_trainer: ")]
    assert said == ["accel_trainer: error[CONFIG]: unknown flag --epoch: did you mean --epochs?"], (
        run.stderr
    )


class Undefined(ClassificationTask):
    """Has an evaluation loss of NaN, as weights have that grew without bounds."""

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().eval_step(model, batch)
        return output._replace(losses=output.losses * float("nan"))


def fail_late_on_main(folder: Path) -> None:
    def train(config: RecipeConfig) -> RunResult:
        with start_run(workload.make_config(folder), recipe="late"):
            if os.environ["RANK"] == "0":
                time.sleep(0.2)
            raise ConfigError("CONFIG", "a mistake on all processes: correct it")

    main(train, RecipeConfig, description="", argv=[])


def test_no_process_ends_before_the_main_process_has_said_why(tmp_path: Path) -> None:
    """A launcher ends the main process as soon as another one has ended."""
    logs = tmp_path / "logs"
    job = processes.start(fail_late_on_main, tmp_path / "run", num_processes=2, folder=logs)
    job.processes[1].join()
    assert "error[CONFIG]: a mistake on all processes" in job.output(0)
    assert job.wait() == [64, 64]
    assert job.output(1).count("error[") == 0


def train_to_nan(folder: Path) -> None:
    config = workload.make_config(folder)
    main(lambda _: workload.train(config, task=Undefined()), RecipeConfig, description="", argv=[])


@pytest.mark.parametrize("num_processes", [1, *slow([2])])
def test_a_run_whose_last_evaluation_loss_is_nan_ends_as_diverged(
    tmp_path: Path, num_processes: int
) -> None:
    folder = tmp_path / "run"
    for attempt in ("first", "again"):
        job = processes.run(
            train_to_nan, folder, folder=tmp_path / attempt, codes=[79] * num_processes
        )
        last = job.output().splitlines()[-1]
        assert last.startswith(
            "accel_trainer: error[EVAL_NONFINITE]: training has ended, but eval/loss is nan in the"
        )
        assert "the best weights are those of step-" in last, "by their accuracy"
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("diverged", 79)
    assert "WARNING: eval/loss is nan at step " in (tmp_path / "first" / "rank-0.log").read_text()
    assert json.loads((folder / "result.json").read_text())["state"] == "done"
    assert (folder / "export" / "model.safetensors").exists()


def test_a_run_that_ends_well_says_how_to_look_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, task, flags, code in (
        ("a b", ClassificationTask(), [], 0),
        ("quiet", ClassificationTask(), ["--quiet"], 0),
        ("nan", Undefined(), [], 79),
    ):
        argv = ["--output-dir", str(tmp_path / name), "--epochs", "1", "--batch-size", "8", *flags]
        with pytest.raises(SystemExit) as ended:
            main(partial(train_task, task), RecipeConfig, description="", argv=argv)
        shown = capsys.readouterr()
        said = [line for line in shown.out.splitlines() if line.startswith("next: ")]
        assert ended.value.code == code, shown.err
        command = f"next: accel-trainer report '{tmp_path}/a b' --open"
        assert said == ([command] if name == "a b" else [])


def train_task(task: Task, config: RecipeConfig) -> RunResult:
    return workload.train(config, task=task)


def test_a_folder_that_is_no_run_is_noted_once_with_its_number_of_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(name: str, *flags: str) -> list[str]:
        argv = ["--output-dir", str(tmp_path / name), "--epochs", "1", "--batch-size", "8", *flags]
        with pytest.raises(SystemExit) as ended:
            main(partial(train_task, ClassificationTask()), RecipeConfig, description="", argv=argv)
        shown = capsys.readouterr()
        assert ended.value.code == 0, shown.err
        return [line for line in shown.out.splitlines() if line.startswith("note: ")]

    for name in ("full/thesis.docx", "full/data/x.csv", "made/.gitkeep", "made/slurm-1.out"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (note,) = started("full")
    assert f"{tmp_path}/full is not empty and not a run: its 2 items" in note
    assert started("full") == [], "a run by now"
    assert started("made") == [], "what launchers write"
    assert started("new") == []
    assert (tmp_path / "full" / "thesis.docx").exists()


@pytest.mark.parametrize(("losses", "is_warned"), [((2.0, 9e10), True), ((2.0, 19.0, 3), False)])
def test_a_run_whose_loss_has_grown_far_ends_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    losses: tuple[float, ...],
    is_warned: bool,
) -> None:
    rows = ({"event": "train", "optimizer_step": 1, "train/loss": loss} for loss in losses)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = RunResult("done", "num_epochs reached", TrainState(), {}, None, tmp_path)
    with speaking_flags():
        warn_if_loss_grew(result)
    assert ("9e+10" in caplog.text and "--lr" in caplog.text) is is_warned
    caplog.clear()
    warn_if_loss_grew(replace(result, state="preempted"))
    (tmp_path / "metrics.jsonl").write_text("no row\n")
    warn_if_loss_grew(result)
    assert not caplog.text
