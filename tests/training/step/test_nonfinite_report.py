"""A NaN or inf is found before the update, on all processes, and told with the sample it came
from."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

from accel_trainer import (
    Batch,
    BatchConfig,
    Callback,
    ClassificationTask,
    DivergedError,
    OptimizerConfig,
    RunResult,
    StepBatch,
    StepOutput,
    StepReport,
    Trainer,
)
from accel_trainer.checkpoint.serialization import encode
from accel_trainer.lab.replay import command as replay
from accel_trainer.training.step.nonfinite_check import NonfiniteCheck
from accel_trainer.training.step.nonfinite_report import skips_too_often

from ... import processes, workload
from ...changing_net import ChangingNet
from ..test_exactness import final_files
from . import test_mixed_precision

BAD = 47  # of 72 training samples; the evaluation's have ids below 37


class Poisoned(ClassificationTask):
    """A classification in which the training sample `bad` has a NaN pixel."""

    def __init__(self, bad: int = BAD) -> None:
        super().__init__()
        self.bad = bad

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().step(model, self.poisoned(batch))

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().eval_step(model, self.poisoned(batch))

    def poisoned(self, batch: Batch) -> Batch:
        inputs = batch.inputs.clone()
        inputs[batch.sample_ids == self.bad, 0, 0, 0] = float("nan")
        return replace(batch, inputs=inputs)


class PoisonedLater(Poisoned):
    """Only from the second epoch on."""

    def poisoned(self, batch: Batch) -> Batch:
        return super().poisoned(batch) if batch.position.epoch else batch


class Exploding(ClassificationTask):
    """A classification whose gradient overflows although its loss is finite."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        losses = super().step(model, batch).losses
        return StepOutput(losses + (losses - losses.detach()).abs().sqrt())


class Watcher(Callback):
    """Keeps a copy of all tensors after each update, and of those that an error leaves."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.after: list[dict[str, Tensor]] = []
        self.left: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        self.after.append(tensors(trainer))

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        self.reports.append(report)
        self.after.append(tensors(trainer))

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.left = tensors(trainer)


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    pieces = trainer._states.state_dict()
    return {
        f"{name}.{key}": tensor.clone()
        for name, piece in pieces.items()
        for key, tensor in encode(piece, name=name).tensors.items()
    }


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def run(
    folder: Path,
    *,
    policy: str,
    watcher: Watcher | None = None,
    max_steps: int | None = None,
    task: ClassificationTask | None = None,
    norm: str = "batch",
    **changes: Any,
) -> RunResult:
    clipping = changes.pop("max_grad_norm", None)
    config = workload.make_config(folder, **changes)
    trainer = replace(
        config.trainer, on_nonfinite=policy, max_steps=max_steps, max_grad_norm=clipping
    )
    callbacks = () if watcher is None else (watcher,)
    return workload.train(
        replace(config, trainer=trainer), task=task or Poisoned(), norm=norm, callbacks=callbacks
    )


def test_a_skipped_step_leaves_no_trace_in_an_assigned_buffer(tmp_path: Path) -> None:
    watcher = Watcher()
    config = workload.make_config(
        tmp_path, batch=BatchConfig(per_device_batch_size=16, eval_batch_size=10)
    )
    config = replace(config, trainer=replace(config.trainer, on_nonfinite="skip", ema_decay=None))
    workload.train(config, task=Poisoned(), net=ChangingNet, callbacks=(watcher,))
    ((step, _),) = [(n, report) for n, report in enumerate(watcher.reports) if report.was_skipped][
        :1
    ]
    before, after = watcher.after[step], watcher.after[step + 1]
    for name in ("model.center", "model.calls", "model.layers.1.running_mean"):
        assert torch.equal(before[name], after[name]), name
        assert not torch.equal(watcher.after[step - 1][name], before[name]), name


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("nonfinite-step-*.json"))]


def run_of_two(folder: Path) -> None:
    watcher = Watcher()
    try:
        batch = BatchConfig(per_device_batch_size=4, accumulation_steps=2, eval_batch_size=10)
        run(folder, policy="stop", watcher=watcher, batch=batch)
    except DivergedError as error:
        print(int(error.exit_code), are_equal(watcher.after[-1], watcher.left), error)


def test_of_two_processes_both_stop_before_the_update_and_name_the_sample(tmp_path: Path) -> None:
    """Fault (Numbers): NaN or inf in a gradient, on whichever process -> all processes notice it
    before the update and report the samples. The run ends with exit code 79; with
    `--on-nonfinite skip` it skips the step, at most 3 times in a row and 10 times in 1000 steps.
    `accel-trainer replay` repeats the step
    """
    job = processes.run(run_of_two, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    (record,) = records(tmp_path / "run")
    step = record["optimizer_step"]
    for rank in (0, 1):
        (line,) = [text for text in job.output(rank).splitlines() if "NONFINITE" in text]
        assert line.startswith(f"79 True error[NONFINITE]: step {step}, epoch 1: ")
        assert f"sample ids {BAD}; see" in line
    assert record["nonfinite_sample_ids"] == [BAD]
    assert (record["loss_sum"], record["position"]["optimizer_step"]) == ("nan", step - 1)
    assert newest_and_finite(tmp_path / "run") == f"step-{step - 1:010d}-epoch-00000"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("diverged", 79)


class Poison(Callback):
    """Puts a NaN into something of the state after step 4, past every look at a gradient."""

    is_essential = True

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if report.optimizer_step != 4:
            return
        group, _, name = self.what.partition(" ")
        if group == "optimizer":
            momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
            momenta[0][0] = float("nan")
            return
        assert trainer.average_model is not None
        model = trainer.model if group == "model" else trainer.average_model
        with torch.no_grad():
            model.state_dict()[name][0] = float("inf")


def newest_and_finite(folder: Path) -> str:
    """The newest checkpoint, after a look at all of them."""
    for path in (folder / "checkpoints").rglob("*.safetensors"):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values()), path
    return max(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "what",
    ["model layers.1.running_var", "ema layers.0.weight", "ema layers.1.running_mean", "optimizer"],
)
def test_a_state_that_is_not_finite_ends_the_run_and_is_in_no_checkpoint(
    tmp_path: Path, what: str
) -> None:
    """Fault (Numbers): NaN or inf in weights, EMA, running statistics or momentum; in the loss of
    an evaluation -> in weights or other state, the next save finds it: exit 79; it is never
    saved, and the previous checkpoint remains. In the loss of an evaluation: a warning; if it is
    the last evaluation, exit 79 after everything is saved and the best weights are exported
    """
    config = workload.make_config(tmp_path)
    with pytest.raises(
        DivergedError, match=rf"CKPT_NONFINITE\]: {what.split()[0]}: .*step-0000000003"
    ):
        workload.train(config, norm="batch", callbacks=(Poison(what),))
    assert newest_and_finite(tmp_path) == "step-0000000003-epoch-00000"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("diverged", 79)


class Masked(workload.SmallNet):
    """Keeps a mask of -inf in a buffer, as models with causal attention do."""

    def __init__(self) -> None:
        super().__init__(norm="group")
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def test_a_mask_of_minus_infinity_is_saved_and_resumed(tmp_path: Path) -> None:
    config = workload.make_config(tmp_path)
    for max_steps in (3, 5):
        trainer = replace(config.trainer, max_steps=max_steps)
        workload.train(replace(config, trainer=trainer), net=Masked)
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    for piece in ("model", "ema"):
        assert torch.equal(load_file(newest / f"{piece}.safetensors")["mask"], Masked().mask)


def test_weights_that_a_guard_let_pass_are_in_no_checkpoint_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NonfiniteCheck, "_is_skipped", lambda *unused: False)
    with pytest.raises(DivergedError, match="CKPT_NONFINITE"):
        run(tmp_path, policy="stop")
    assert newest_and_finite(tmp_path) < "step-0000000005"


def unfused(model: nn.Module, config: OptimizerConfig) -> SGD:
    return SGD(model.parameters(), lr=config.learning_rate, momentum=config.momentum, fused=False)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "unfused"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_skipped_step_leaves_no_trace_and_training_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    optimizer: str,
    max_grad_norm: float | None,
) -> None:
    changes = {
        "optimizer": OptimizerConfig(
            name="adamw" if optimizer == "adamw" else "sgd", learning_rate=0.01
        )
    }
    if optimizer == "unfused":
        monkeypatch.setattr("accel_trainer.run.optimization.build_optimizer", unfused)
    watcher = Watcher()
    with caplog.at_level(logging.WARNING):
        run(tmp_path, policy="skip", watcher=watcher, max_grad_norm=max_grad_norm, **changes)
    skipped = [report.optimizer_step for report in watcher.reports if report.was_skipped]
    assert len(skipped) == 2  # the sample comes once an epoch
    for step in range(1, len(watcher.reports) + 1):
        assert are_equal(watcher.after[step - 1], watcher.after[step]) == (step in skipped)
    assert [record["optimizer_step"] for record in records(tmp_path)] == skipped
    assert sum("was not applied" in message for message in caplog.messages) == 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("optim/skipped_steps", 0) for row in rows) == 2
    assert all(isinstance(row["train/loss"], float) for row in rows if row["event"] == "train")


def test_a_run_that_stopped_goes_on_with_skip(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="on_nonfinite=.skip"):
        run(tmp_path / "stopped", policy="stop")
    run(tmp_path / "stopped", policy="skip")
    run(tmp_path / "whole", policy="skip")
    assert final_files(tmp_path / "stopped") == final_files(tmp_path / "whole")


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_finite_loss_with_a_gradient_that_is_not_blames_no_sample(
    tmp_path: Path, max_grad_norm: float | None
) -> None:
    watcher = Watcher()
    with pytest.raises(DivergedError, match="no single sample"):
        run(tmp_path, policy="stop", task=Exploding(), watcher=watcher, max_grad_norm=max_grad_norm)
    assert are_equal(watcher.after[0], watcher.left)


def test_three_steps_in_a_row_end_the_run_also_across_a_restart(tmp_path: Path) -> None:
    for max_steps in (1, 2):
        run(tmp_path, policy="skip", task=Exploding(), max_steps=max_steps)
    with pytest.raises(DivergedError, match="step 3, .* too often"):
        run(tmp_path, policy="skip", task=Exploding())


@pytest.mark.parametrize(
    ("steps", "is_end"),
    [
        ([5, 6, 7], True),
        ([5, 6, 8], False),
        ([1, *range(100, 900, 100), 1000], True),
        ([1, *range(100, 900, 100), 1001], False),
        (list(range(100, 1000, 100)), False),
    ],
)
def test_three_in_a_row_or_ten_of_a_thousand_end_a_run(steps: list[int], is_end: bool) -> None:
    assert skips_too_often(steps) == is_end


class Overflowing(ClassificationTask):
    """A classification whose gradient always overflows, as if no scale were small enough."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().step(model, batch)
        output.losses.register_hook(lambda gradient: gradient * float("inf"))
        return output


def test_an_overflow_under_loss_scaling_is_not_mistaken_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault (Numbers): a float16 overflow under loss scaling -> not a fault: the scale is lowered
    and training continues; if it falls below 1e-3, the run ends with exit code 79
    """
    test_mixed_precision.run(tmp_path)
    assert records(tmp_path) == []
    assert not any("NaN" in message for message in caplog.messages)


def test_a_loss_scale_that_falls_without_end_ends_the_run(tmp_path: Path) -> None:
    config = workload.make_config(tmp_path)
    config = replace(config, trainer=replace(config.trainer, max_grad_norm=None))
    watcher = Watcher()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-6)
    with pytest.raises(DivergedError, match="step 4, "):
        workload.train(config, task=Overflowing(), scaler=scaler, callbacks=(watcher,))
    assert [report.was_skipped for report in watcher.reports] == [True] * 3
    momentum = [tensor for key, tensor in watcher.left.items() if key.startswith("optimizer")]
    assert all(not tensor.any() for tensor in momentum), "momentum of uninitialised memory"


class Replacing(Trainer):
    """Sets gradients that are not finite to zero."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        gradients = self.compute_gradients(step_batch)
        finite = {name: each.nan_to_num(0, 0, 0) for name, each in gradients.tensors.items()}
        return self.apply_gradients(replace(gradients, tensors=finite))


def test_a_step_that_the_scaler_skips_is_skipped_for_the_run(
    tmp_path: Path,
) -> None:
    watcher = Watcher()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    config = workload.make_config(tmp_path)
    workload.train(
        replace(config, trainer=replace(config.trainer, max_steps=2)),
        task=Overflowing(),
        scaler=scaler,
        callbacks=(watcher,),
        trainer_class=Replacing,
    )
    assert [report.was_skipped for report in watcher.reports] == [True] * 2
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_nan_under_loss_scaling_is_named_at_once(
    tmp_path: Path, policy: str
) -> None:
    config = workload.make_config(tmp_path)
    config = replace(
        config, trainer=replace(config.trainer, max_grad_norm=None, on_nonfinite=policy)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(DivergedError) if policy == "stop" else nullcontext():
        workload.train(config, task=Poisoned(BAD), scaler=scaler)
    assert records(tmp_path)[0]["nonfinite_sample_ids"] == [BAD]
    assert scaler.get_scale() >= 256.0


def test_a_loss_that_depends_on_the_position_is_blamed_on_its_sample(tmp_path: Path) -> None:
    run(tmp_path, policy="skip", task=PoisonedLater())
    (record,) = records(tmp_path)
    assert record["position"]["epoch"] == 1
    assert record["nonfinite_sample_ids"] == [BAD]


@pytest.mark.usefixtures("python_is_forked")
def test_replay_repeats_the_step_and_does_not_change_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    recipe = tmp_path / "recipe.py"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    recipe.write_text(
        "from recipes import cifar\n"
        "from tests.training.step.test_nonfinite_report import Poisoned\n"
        "cifar.ImageClassificationTask = lambda config, **counts: Poisoned(1000)\n"
        "cifar.main(cifar.train, cifar.Config, description='poisoned')\n"
    )
    folder = tmp_path / "run"
    flags = (
        "--dataset digits --model resnet8 --epochs 1 --max-steps 60 --checkpoint-every-n-steps 4 "
    )
    flags += f"--runtime.num-threads 1 --output-dir {folder} --cache-dir {tmp_path / 'cache'}"
    done = subprocess.run(
        [sys.executable, recipe, *flags.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 79, done.stderr
    (record,) = records(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.chdir(tmp_path)  # the project of the recipe
    assert replay.main([str(folder), "--step", str(record["optimizer_step"])]) == 0
    shown = capsys.readouterr().out
    assert f"step {record['optimizer_step']} (epoch 1, " in shown
    assert "loss sum nan" in shown
    assert "NaN or inf: [1000]" in shown
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


class OtherSamples(Poisoned):
    """Its evaluation needs other samples than its training."""

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if len(batch) > 10:  # the batches of the evaluation have 10
            raise KeyError("labels")
        return super().eval_step(model, batch)


@pytest.mark.parametrize(("task", "num_blamed"), [(Poisoned, 1), (OtherSamples, 72)])
def test_epochs_whose_only_step_is_skipped_end_no_run(
    tmp_path: Path, task: type[Poisoned], num_blamed: int
) -> None:
    one_an_epoch = BatchConfig(per_device_batch_size=72, eval_batch_size=10)
    result = run(tmp_path, policy="skip", batch=one_an_epoch, task=task())
    assert result.state == "done"
    assert [len(each["nonfinite_sample_ids"]) for each in records(tmp_path)] == [num_blamed] * 2
