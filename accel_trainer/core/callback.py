"""The hooks of a callback, and what it may read of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from accelerate import Accelerator

from .train_state import BestCheckpoint, TrainState
from .types import Loader, StepReport


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    `metrics` are those of the last evaluation; `state` is `done`, `stopped` or `preempted`.
    """

    state: Literal["done", "stopped", "preempted"]
    stop_reason: str
    position: TrainState
    metrics: Mapping[str, Any]
    best: BestCheckpoint | None


class TrainerView(Protocol):
    """What a callback may read of a trainer, and the one request it may make."""

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
    def learning_rate_at(self) -> Callable[[int], float]:
        """The learning rate of a step, counted from 0."""

    @property
    def best(self) -> BestCheckpoint | None:
        """The best evaluation so far."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train."""

    @property
    def data_wait_s(self) -> float:
        """Seconds that training has waited for data in this attempt."""

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary. Call it on every process at the same step."""


class Callback:
    """Observes a run, on every process.

    It may call `trainer.request_stop`; it assigns nothing to the trainer.

    The order of a run: on_fit_start, then per step on_step_end, per evaluation on_evaluate_end, per
    epoch on_epoch_end, per checkpoint on_checkpoint; at the end on_fit_end, or on_error.

    What `state_dict` returns is stored in every checkpoint under the class's name, and the number
    of the callback among those of its class. An exception ends the run, with the callback's name.
    """

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Before the first step; `trainer.state` is where the run starts or continues."""

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """After optimizer step `report.optimizer_step`.

        Reading one of its tensors is a host sync.
        """

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, Any]) -> None:
        """After an evaluation; the metrics are the same on every process."""

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """After the evaluation of an epoch, if it had one; `trainer.state.epoch` counts it as finished."""

    def on_checkpoint(self, trainer: TrainerView, name: str) -> None:
        """After the state was copied for the background save, which logs when the checkpoint is durable."""

    def on_fit_end(self, trainer: TrainerView, result: RunResult) -> None:
        """After the last checkpoint is durable."""

    def on_error(self, trainer: TrainerView, error: BaseException) -> None:
        """When an exception ends the run; it is raised again afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values and tensors. May be **Collective**."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
