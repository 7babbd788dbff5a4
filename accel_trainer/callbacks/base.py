"""The seven moments of a run that can be observed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..types import StepReport

if TYPE_CHECKING:
    from ..trainer import RunResult, Trainer


class Callback:
    """Observes a run, on every process. It may call `trainer.request_stop`; it assigns nothing to the trainer.

    The order of a run: on_fit_start, then per step on_step_end, per evaluation on_evaluate_end, per
    epoch on_epoch_end, per checkpoint on_checkpoint; at the end on_fit_end, or on_error.

    What `state_dict` returns is stored in every checkpoint under the class's name; of several callbacks of one
    class, each has its own, by their order. An exception ends the run, with the callback's name.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step; `trainer.state` is where the run starts or continues."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """After optimizer step `report.optimizer_step`. Reading one of its tensors is a host sync."""

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """After an evaluation; the metrics are the same on every process."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After the evaluation of an epoch, if it had one; `trainer.state.epoch` counts it as finished."""

    def on_checkpoint(self, trainer: Trainer, name: str) -> None:
        """After a snapshot was handed to the writer. It is durable once the writer logs it as saved."""

    def on_fit_end(self, trainer: Trainer, result: RunResult) -> None:
        """After the last checkpoint is durable."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """When the run ends by an exception, which is raised again afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values and tensors. May be **Collective**."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
