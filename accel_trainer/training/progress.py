"""The progress of a run: its state, its last and best evaluation, and why it ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accelerate.utils import recursively_apply
from torch import Tensor

from ..core.errors import ConfigError
from ..core.registry import StateDict, Stateful
from ..core.train_state import BestCheckpoint, Mode, TrainState
from ..core.types import Results
from ..fault_tolerance.preemption import Stop
from .callback import RunResult
from .config import RESTARTS_EPOCH, TrainerConfig
from .evaluation.evaluation import TEST, Evaluations, check_monitored, groups_of
from .plain_values import is_detail

if TYPE_CHECKING:
    from .callback_runner import CallbackRunner
    from .log import Log
    from .step.nonfinite_report import NonfiniteReport

EVALUATION = "evaluation data"
"""Stands among the settings that were changed for data whose numbers cannot be compared."""


class Progress:
    """What a checkpoint holds of a run besides tensors.

    `num_turns` counts the steps of each optimizer that has a name, skipped ones included.
    `monitored` is the number that decides the best checkpoint, such as `eval/loss`, and its
    direction, None if none does. `evaluated_step` is the step of the last evaluation, None before
    the first. `requested_stop` is the reason for which a callback or a subclass has ended the
    training, None if none has.

    Raises:
        ConfigError: the number that the config asks for is not in `monitors` of the `evaluations`.
    """

    def __init__(self, config: TrainerConfig, evaluations: Evaluations) -> None:
        limits = {name: getattr(config, name) for name in ("num_epochs", "num_steps", "max_steps")}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.monitored = next(iter(choose_monitor(config, evaluations).items()), None)
        self.state = TrainState()
        self.num_turns = Counter[str]()
        self.metrics: Results = {}
        self.best: BestCheckpoint | None = None
        self.evaluated_step: int | None = None
        self.requested_stop: str | None = None

    @property
    def end_reason(self) -> str | None:
        """Why nothing is left to train; None while there are steps left."""
        if self.requested_stop is not None:
            return self.requested_stop
        for name, limit in self._limits.items():
            number = self.state.epoch if name == "num_epochs" else self.state.optimizer_step
            if number >= limit:
                return f"{name} reached"
        return None

    @property
    def is_evaluated(self) -> bool:
        """Whether the weights of this state have been evaluated."""
        return self.evaluated_step == self.state.optimizer_step

    def record_evaluation(self, metrics: Results, checkpoint: str) -> str | None:
        """Record an evaluation of the weights that `checkpoint` will hold.

        It becomes the best if the monitored number is better than before; NaN and inf never are:
        the name of the number is then returned.

        Raises EvaluationRefused if the monitored metric is not one number.
        """
        unusable = None
        if self.monitored is not None:
            name, mode = self.monitored
            value = check_monitored(metrics, name)
            unusable = None if math.isfinite(value) else name
            sign = 1 if mode == "max" else -1
            is_better = self.best is None or sign * value > sign * self.best.value
            if is_better and not unusable:
                self.best = BestCheckpoint(checkpoint, name, value, mode)
        self.metrics = metrics
        self.evaluated_step = self.state.optimizer_step
        return unusable

    def result(self, stop: Stop, folder: Path) -> RunResult:
        """Return how the run ended: done and evaluated, or by `stop`."""
        outcome: Literal["done", "stopped", "preempted"] = "stopped"
        reason = stop.reason or "left by the program"
        if self.end_reason is not None and self.is_evaluated:
            outcome, reason = "done", self.end_reason
        elif stop.is_preemption:
            outcome = "preempted"
        return RunResult(outcome, reason, self.state, self.metrics, self.best, folder=folder)

    def state_dict(self) -> StateDict:
        """Return plain values."""
        return {
            "position": self.state._asdict(),
            "best": self.best and asdict(self.best),
            "metrics": {
                name: value for name, value in self.metrics.items() if not is_detail(value)
            },
            "evaluated_step": self.evaluated_step,
            "requested_stop": self.requested_stop,
            **({"num_turns": dict(self.num_turns)} if self.num_turns else {}),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.state = TrainState.from_dict(state["position"])
        self.num_turns = Counter(state.get("num_turns"))
        self.metrics = state["metrics"]
        self.evaluated_step = state["evaluated_step"]
        self.requested_stop = state["requested_stop"]
        if state["best"]:
            best = BestCheckpoint(**state["best"])
            self.best = best if (best.metric, best.mode) == self.monitored else None

    def go_on_with(self, changes: Collection[str]) -> None:
        """Drop the requested stop, since settings were changed; some restart more than that."""
        if changes:
            self.requested_stop = None
        if EVALUATION in changes:
            self.best = None
        if RESTARTS_EPOCH & set(changes):
            self.state = self.state._replace(step_in_epoch=0)


@dataclass(eq=False)
class LoopState(Stateful):
    """The progress, the latest skipped steps, the callbacks, and the numbers for the next row."""

    progress: Progress
    nonfinite: NonfiniteReport
    callbacks: CallbackRunner
    log: Log

    def state_dict(self) -> StateDict:
        """Return plain values and tensors. **Collective** if the state of a callback is."""
        return {
            **self.progress.state_dict(),
            "skipped_steps": self.nonfinite.skipped_steps,
            "callbacks": self.callbacks.state_dict(),
            "log": self.log.settle(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.progress.load_state_dict(state)
        self.nonfinite.skipped_steps = state["skipped_steps"]
        # In memory of their own, as in `load_all`.
        self.callbacks.load_state_dict(recursively_apply(Tensor.clone, state["callbacks"]))
        self.log.pending = state["log"]


def choose_monitor(config: TrainerConfig, evaluations: Evaluations) -> dict[str, Mode]:
    """Return the numbers that may decide which evaluation is best; the one that does comes first.

    The first evaluation is preferred, with the averaged weights. The result is empty if none has a
    number that may decide, and the config needs none.

    Raises:
        ConfigError: the number that the config asks for is not in the `monitors`.
    """
    known: dict[str, Mode] = {
        f"{group}/{number}": "max" if is_higher else "min"
        for name, evaluation in evaluations.items()
        if name != TEST
        for group in reversed(groups_of(name, evaluation)[: 1 + (config.ema_decay is not None)])
        for number, is_higher in evaluation.monitors.items()
    }
    first = next(iter(known), None)
    accuracy = f"{(first or '').partition('/')[0]}/accuracy"
    name = config.monitor or (accuracy if accuracy in known else first)
    if name is None and config.patience is None:
        return {}
    if name not in known:
        choices = "the metrics declare none"
        if known:
            choices = f"set --trainer.monitor to one of {', '.join(known)}"
        raise ConfigError("CONFIG", f"no metric {name or ''!r} to monitor: {choices}")
    mode = known.pop(name)
    return {name: config.monitor_mode or mode, **known}
