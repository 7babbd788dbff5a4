"""Callbacks that a run forgot: norms of gradients, a number of evaluations, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from accel_trainer import Callback, StepReport
from accel_trainer.training.callback import TrainerView


class LogsGradients(Callback):
    """Logs the norm of the gradient of each parameter."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        self.norms: dict[str, Tensor] = {}
        for name, parameter in trainer.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self.measure, name))

    def measure(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.norms[name] = parameter.grad.norm()

    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        for name, norm in self.norms.items():
            trainer.log(f"grad/{name}", norm)
        if report.optimizer_step % 15 == 0:
            trainer.log.picture("drawn", b"\x89PNG\r\n\x1a\n" + bytes([report.optimizer_step]))

    def on_evaluate_end(self, trainer: TrainerView, metrics: Mapping[str, Any]) -> None:
        trainer.log("evaluated", trainer.state.optimizer_step)
