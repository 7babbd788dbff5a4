"""The hooks of a callback, and what it may read from the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from ..core.history import read_history
from ..core.learning_rate import Schedule
from ..core.registry import StateDict
from ..core.train_state import BestCheckpoint, TrainState
from ..core.types import Batch, Gradients, Loader, Results, StepOutput, StepReport, Task
from .log import Log


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    `metrics` are the results of the last evaluation, and `folder` is that of the run.
    """

    state: Literal["done", "stopped", "preempted"]
    stop_reason: str
    position: TrainState
    metrics: Results
    best: BestCheckpoint | None
    folder: Path

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of the run's `metrics.jsonl`, also of earlier attempts; NaN and inf are floats.

        They are read when asked for. Empty on a machine without the file.

        Raises:
            OSError: the file cannot be read.
        """
        with suppress(FileNotFoundError):
            return [
                {
                    name: float(value) if value in ("nan", "inf", "-inf") else value
                    for name, value in row.items()
                }
                for row in read_history(self.folder)
            ]
        return []


class TrainerView(Protocol):
    """What a callback may read from a trainer, and what it may ask for."""

    @property
    def accelerator(self) -> Accelerator:
        """Devices and processes."""

    @property
    def state(self) -> TrainState:
        """The position of the run."""

    @property
    def loader(self) -> Loader:
        """The training data; its `plan` says how many steps an epoch has."""

    @property
    def learning_rate_at(self) -> Schedule:
        """Maps a step, counted from 0, to its learning rate."""

    @property
    def best(self) -> BestCheckpoint | None:
        """The best evaluation so far."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What the next checkpoints store as "metadata"; that of the main process counts."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train: no step is left, or a stop was requested."""

    @property
    def data_wait_s(self) -> float:
        """Seconds that training has waited for data in this attempt."""

    @property
    def log(self) -> Log:
        """Takes numbers and pictures for the next row."""

    @property
    def model(self) -> nn.Module:
        """The plain model, to be read or watched by hooks of torch, not to be changed.

        It is in training mode: a forward draws dropout, and changes the means of batch norms.
        """

    @property
    def average_model(self) -> nn.Module | None:
        """The model with averaged weights, in evaluation mode, to be read only in this hook.

        None without `--ema`.
        """

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of a run that names none, to be read only."""

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by name, to be read only; "" is that of a run that names none."""

    @property
    def task(self) -> Task:
        """The task, to be read only."""

    def digests(self) -> dict[str, str]:
        """Return a digest of each part that a checkpoint stores, such as `model` and `optimizer`.

        **Collective** with shards. **Host sync.**
        """

    def load_best(self) -> str:
        """Give the model the weights that the run exports, once it has ended. **Collective.**"""

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary. Call it on every process at the same step."""

    def request_save(self) -> None:
        """Save at the next step boundary. Any process may call it at any time."""


class Callback:
    """Observes a run; its hooks are called on every process.

    A callback may call `trainer.request_stop` and `trainer.request_save`, log numbers of its own
    with `trainer.log`, and change the entries of `trainer.metadata`, but must not assign to the
    trainer's attributes.

    `on_fit_start` is called first. In a step, `before_micro_batch` and `on_micro_batch` come once
    with each micro-batch of this process, in the first call of `compute_gradients`, and
    `before_update` once; with `updates` of the task, once in each of them. `on_step_end` follows
    every step, `on_evaluate_end` every evaluation, `on_epoch_end` every epoch. `before_save` and
    `on_checkpoint` come with every checkpoint. The last call is `on_fit_end`, or `on_error` after
    an exception.

    Every checkpoint stores what `state_dict` returns, under the name of the class and the
    callback's number among the callbacks of that class. An exception in a hook ends the run with an
    error that names the callback.
    """

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Called before the first step; `trainer.state` is where the run starts or resumes."""

    def before_micro_batch(self, trainer: TrainerView, batch: Batch) -> None:
        """Called before the forward of a micro-batch, which is on the device.

        Processes may have different numbers of samples in it, but have equally many micro-batches.
        """

    def on_micro_batch(self, trainer: TrainerView, batch: Batch, output: StepOutput) -> None:
        """Called after the forward and before the backward; `output` has no graph.

        Keep what is needed until `on_step_end`, where a state that all processes share may change.
        """

    def before_update(self, trainer: TrainerView, gradients: Gradients) -> None:
        """Called before the weights change, with the gradients of the whole step, not yet clipped.

        They are to be read only; override `train_step` of the trainer to change them. A group's
        `learning_rate_scale` may be set, by which its learning rate is multiplied.
        """

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Called after optimizer step `report.optimizer_step`.

        Reading a tensor of `report` is a host sync.
        """

    def on_evaluate_end(self, trainer: TrainerView, metrics: Results) -> None:
        """Called after an evaluation; the metrics are the same on every process."""

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Called after an epoch and its evaluation, if any.

        `trainer.state.epoch` already counts the epoch as finished.
        """

    def before_save(self, trainer: TrainerView) -> None:
        """Called before the state is copied for a checkpoint, of which it must not change a value.

        A run that is killed saves more often than one that is not.
        """

    def on_checkpoint(self, trainer: TrainerView, name: str) -> None:
        """Called once the state of checkpoint `name` was copied for the background save.

        The save logs when the checkpoint is durable.
        """

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """Called once the last checkpoint is durable."""

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """Called when an exception ends the run; the exception is raised again afterwards."""

    def reduced_rate(self, rate: float) -> float:
        """Return the learning rate of a parameter group in the next update, here `rate` itself.

        `rate` is the schedule's times the factors of the group. The result may depend on what
        `state_dict` returns, and is the same on every process.
        """
        return rate

    def state_dict(self) -> StateDict:
        """Return what a resumed run needs: plain values and tensors. May be **Collective**."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
