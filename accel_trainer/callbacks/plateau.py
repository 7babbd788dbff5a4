"""Lower learning rates once an evaluation improves no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from ..core.config import INSIDE_ONE, NOT_NEGATIVE
from ..core.errors import ConfigError
from ..core.learning_rate import Schedule
from ..core.registry import StateDict
from ..core.train_state import Mode
from ..core.types import Results
from ..training.callback import Callback, TrainerView
from ..training.evaluation.evaluation import check_monitored

_MIN_CHANGE = 1e-8  # torch's `eps`
_MAX_SAMPLES = 1000  # of the steps, to see whether a schedule falls


@dataclass(eq=False)
class ReduceLROnPlateau(Callback):
    """Multiplies all learning rates by `factor` after more than `patience` bad evaluations.

    The rule is that of torch's ReduceLROnPlateau, with an evaluation as its epoch. One is bad if
    the number `monitor` is not better than the best so far by a fraction `threshold`; `cooldown`
    evaluations after a reduction are not judged. No rate falls below `min_lr`. None: the number
    that chooses the best checkpoint, of the model and not of its average; and the `mode`, `min`
    or `max`, that its metric declares.

    The rates are the schedule's, which must not fall by itself, times the factors of their groups.
    Checkpoints store the reductions. With `--reduce float`, a close decision may differ between
    numbers of processes.

    Raises:
        ConfigError: an argument is out of range.
    """

    _: KW_ONLY
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    cooldown: int = 0
    min_lr: float = 0.0
    mode: Mode | None = None
    monitor: str | None = None

    def __post_init__(self) -> None:
        INSIDE_ONE.check(self, "ReduceLROnPlateau", "factor")
        NOT_NEGATIVE.check(self, "ReduceLROnPlateau", "patience", "threshold", "cooldown", "min_lr")
        if self.mode not in (None, "min", "max"):
            raise ConfigError("CONFIG", f"ReduceLROnPlateau.mode is {self.mode!r}: use min or max")
        self.num_reductions = 0
        self._best: float | None = None
        self._num_bad = 0
        self._cooldown_left = 0

    def prepare(
        self,
        monitors: Mapping[str, Mode],
        schedule: Schedule,
        *,
        num_steps: int,
        is_same_data: bool = True,
    ) -> None:
        """Choose one of the `monitors`, of which the first chooses the best checkpoint.

        `is_same_data`: the checkpoint that the run continues from has numbers of the same
        evaluation data.

        Raises ConfigError if none is the one to monitor, or the `schedule` of the run also falls.
        """
        last = max(0, num_steps - 1)
        rates = [schedule(step) for step in [*range(0, last, last // _MAX_SAMPLES + 1), last]]
        if any(after < before for before, after in pairwise(rates)):
            raise ConfigError(
                "SCHEDULE",
                f"ReduceLROnPlateau lowers a learning rate that falls from {max(rates):g} to "
                f"{rates[-1]:g} by itself: set --schedule.shape constant, or pass a schedule= that "
                "is constant after its warmup",
            )
        name = self.monitor or next(iter(monitors), "").replace("eval_ema", "eval", 1)
        if name not in monitors:
            raise ConfigError(
                "CONFIG",
                f"ReduceLROnPlateau has no number {name!r} to monitor: "
                f"set monitor= to one of {', '.join(monitors) or 'those that a metric declares'}",
            )
        self._number = [name, self.mode or monitors[name]]
        self._is_same_data = is_same_data

    def on_evaluate_end(self, trainer: TrainerView, metrics: Results) -> None:
        """Count bad evaluations, and lower the rates after too many."""
        name, mode = self._number
        value = check_monitored(metrics, name)
        sign = 1 if mode == "max" else -1
        best = -sign * math.inf if self._best is None else self._best
        self._num_bad += 1
        if sign * value > sign * best * (1 + sign * self.threshold):
            self._best = value
            self._num_bad = 0
        if self._cooldown_left:
            self._cooldown_left -= 1
            self._num_bad = 0
        if self._num_bad > self.patience:
            self.num_reductions += 1
            self._cooldown_left = self.cooldown
            self._num_bad = 0

    def reduced_rate(self, rate: float) -> float:
        """Return `rate` after all reductions so far."""
        for _ in range(self.num_reductions):
            lower = max(rate * self.factor, self.min_lr)
            if rate - lower <= _MIN_CHANGE:
                break
            rate = lower
        return rate

    def state_dict(self) -> StateDict:
        """Return the reductions, and what the next one depends on."""
        return {
            "num_reductions": self.num_reductions,
            "best": self._best,
            "num_bad": self._num_bad,
            "cooldown_left": self._cooldown_left,
            "judged": self._number,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; a new number or new data is judged from the start."""
        self.num_reductions = state["num_reductions"]
        if self._is_same_data and state["judged"] == self._number:
            self._best = state["best"]
            self._num_bad = state["num_bad"]
            self._cooldown_left = state["cooldown_left"]
