"""What interrupts a program: a signal at a moment that is counted, never timed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from accel_trainer import Trainer
from accel_trainer.callbacks.export import Exporter
from accel_trainer.callbacks.result import ResultWriter
from accel_trainer.checkpoint import manager, retention
from accel_trainer.training import trainer
from tests.faults.disks import KillingDisk, When, installed

# By name: the call before which the signal comes, and the largest number of it that is drawn.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "gradients": (Trainer, "compute_gradients", 6),
    "update": (Trainer, "apply_gradients", 6),
    "evaluation": (trainer, "run_evaluation", 2),
    "save": (manager, "write_checkpoint", 2),
    "best": (retention, "update_best", 2),
    "export": (Exporter, "on_fit_end", 1),
    "result": (ResultWriter, "on_fit_end", 1),
}
AT_THE_END = ("export", "result")
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
        os.kill(os.getpid(), getattr(signal, f"SIG{self.signal}"))


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
    return Fault(moment, number, chosen.choice(("KILL", "KILL", "TERM")), rank)


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
    for name in ("TERM", "USR2", "INT"):
        if sys.platform != "win32":
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
