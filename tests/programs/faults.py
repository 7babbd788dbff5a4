"""What interrupts a program: a signal at a moment that is counted, never timed."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch.utils.data import get_worker_info

from accel_trainer import MeanLoss, Trainer
from accel_trainer.callbacks.export import Exporter
from accel_trainer.callbacks.result import ResultWriter
from accel_trainer.checkpoint import manager, retention
from accel_trainer.core.platform import RUN_SIGNALS
from accel_trainer.run import build
from accel_trainer.training import trainer
from accel_trainer.training.log import Log
from tests.faults.disks import KillingDisk, When, installed

from . import draft
from .data import Points

# By name: the call before which the signal comes, and the largest number of it that is drawn.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "start": (draft, "build_trainer", 1),
    "data": (Points, "__getitem__", 150),
    "gradients": (Trainer, "compute_gradients", 6),
    "update": (Trainer, "apply_gradients", 6),
    "evaluation": (trainer, "run_evaluation", 2),
    "evaluated batch": (MeanLoss, "update", 12),
    "picture": (Log, "picture", 3),
    "save": (manager, "write_checkpoint", 2),
    "best": (retention, "update_best", 2),
    "test": (build, "load_best_weights", 1),
    "export": (Exporter, "on_fit_end", 1),
    "result": (ResultWriter, "on_fit_end", 1),
}
# Half of them are kills; a second one comes when the save begins that the first one asks for.
SIGNALS = ("KILL",) * 6 + ("TERM", "INT", "USR1", "HUP", "USR2", "TERM KILL", "USR2 KILL")
AT_THE_END = ("test", "export", "result")
OF_MAIN = ("save", "best", "disk", *AT_THE_END)
NUM_CHANGES = 80  # of the disk, that an attempt makes, about


@dataclass(frozen=True)
class Fault:
    """A signal to a rank at the `number`-th of such moments in an attempt.

    At a change of the `disk`, it comes before, half-way through or after it.
    """

    moment: str
    number: int
    signal: str = "KILL"
    rank: int = 0
    when: When = "before"

    def installed(self) -> AbstractContextManager[Any]:
        """Let the fault come inside the block, in the process that it is for."""
        if self.rank != int(os.environ.get("RANK", 0)):
            return nullcontext()
        if self.moment == "disk":
            return installed(KillingDisk(self.number, self.when))
        owner, name, _ = MOMENTS[self.moment]
        act_in_call(owner, name, self.number, self.send)
        return nullcontext()

    def send(self) -> None:
        if get_worker_info() is not None:
            return  # it is for a process that trains
        first, *second = self.signal.split()
        if second:
            act_in_call(manager, "write_checkpoint", 1, lambda: _send(*second))
        _send(first)


def _send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, f"SIG{name}"))


def as_python(value: Any) -> str:
    """Return a dataclass as Python, without the fields that have their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(as_python, value))}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    given = [
        f"{each.name}={as_python(getattr(value, each.name))}"
        for each in fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def draw_fault(chosen: random.Random, num_processes: int) -> Fault:
    """Return a fault of a run on so many processes."""
    moment = chosen.choice([*MOMENTS, "disk", "disk", "update"])
    rank = 0 if moment in OF_MAIN else chosen.randrange(num_processes)
    if moment == "disk":
        when: When = chosen.choice(("before", "half", "half", "after"))
        return Fault(moment, chosen.randrange(NUM_CHANGES), rank=rank, when=when)
    number = chosen.randint(1, MOMENTS[moment][2])
    return Fault(moment, number, chosen.choice(SIGNALS), rank)


def act_in_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` before a function of `owner`, in its call of that number in a process."""
    counter = itertools.count(1)
    function = getattr(owner, name)

    def acting(*args: Any, **options: Any) -> Any:
        if next(counter) == number:
            act()
        return function(*args, **options)

    setattr(owner, name, acting)


def reset_signals() -> None:
    """Let signals end this process as usual: a background job may ignore some."""
    for number in RUN_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
