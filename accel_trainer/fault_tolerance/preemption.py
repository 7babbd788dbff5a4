"""Stops and saves on request: a signal raises a flag, and all processes agree on the step."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from ..core.errors import Preempted, PreemptedCell, here
from ..core.platform import SAVE_SIGNALS, signals_handled
from ..distributed.process_group import find_cpu_group
from .activity import Activity

TIME_LIMIT = 100  # above every signal number
# In the reduction, the smallest code wins: a signal wins over the time limit, that over a save,
# which the end of the run makes anyway, and a save over no request.
_SAVE = 500
_NOTHING = 1000
# A launcher turns the INT of a terminal into a TERM, which may come before the INT itself does.
_SAME_INTERRUPT_S = 0.25

T = TypeVar("T")


class Stop(int):
    """Why a run stops: 0 if it does not, the number of a signal, or `TIME_LIMIT`."""

    @property
    def is_preemption(self) -> bool:
        """Whether the run stops because of a signal."""
        return 0 < self < TIME_LIMIT

    @property
    def reason(self) -> str | None:
        """The signal's name, `time limit`, or None."""
        if self.is_preemption:
            return signal.Signals(self).name
        return "time limit" if self else None


class EvaluationStopped(Preempted):
    """A signal ended the evaluation early on all processes; there is no result.

    `fit` catches it, and saves. Elsewhere it ends the run.
    """


class StopFlag:
    """A request to stop or to save, on which all processes agree.

    A process may raise the flag at any time. Every process calls `poll` once per step, which sets
    `agreed` once *any* process has raised the flag. With several processes that is one step later:
    the reduction runs while the next step computes, and no step waits for it.

    `agreed` is the request that all processes follow; `Stop(0)`, which is false, while there is
    none. The smallest code of any process wins: a signal wins over the time limit.

    `is_save_agreed` is set in the same way once any process has asked for a save. It stays set
    until the trainer has saved and clears it: evaluations poll, too, but do not save.

    `on_interrupt` is called in the handler of INT, with True if the process exits next, once the
    run has begun.

    `num_polls` counts the calls of `poll`: the watchdog sees in it that the process makes progress.
    """

    def __init__(self, *, num_processes: int = 1, timeout_s: float = 1800.0) -> None:
        """With several processes **Collective**.

        `timeout_s` is how long a poll waits for the other processes.
        """
        self.agreed = self._wish = Stop()
        self.num_polls = 0
        self.on_interrupt: Callable[[bool], None] = lambda exits: None
        self.is_save_agreed = False
        self._wants_save = False
        self._num_processes = num_processes
        self._group = None if num_processes == 1 else find_cpu_group(timeout_s=timeout_s)
        # The smallest code of all processes, and whether all of them have run out of items.
        self._reduced = torch.zeros(2, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._have_all_run_out = False

    def request(self, code: int) -> None:
        """Request a stop by signal number or `TIME_LIMIT`; the first signal is kept.

        Safe in a signal handler.
        """
        if not self._wish.is_preemption:
            self._wish = Stop(code)

    def request_save(self) -> None:
        """Request a save. Safe in a signal handler."""
        self._wants_save = True

    def poll(self, *, has_run_out: bool = False) -> bool:
        """Return whether to stop now, the same on every process. **Collective** (asynchronous)."""
        self.num_polls += 1
        self.drain()
        code = self._wish or (_SAVE if self._wants_save else _NOTHING)
        if self._num_processes == 1:
            self._follow(code, has_run_out)
        elif not (self.agreed.is_preemption or self._have_all_run_out):
            self._reduced[0] = code
            self._reduced[1] = has_run_out
            self._pending = dist.all_reduce(
                self._reduced, dist.ReduceOp.MIN, self._group, async_op=True
            )
        return bool(self.agreed)

    def drain(self) -> None:
        """Wait for a reduction in progress: a process must not exit while others reduce.

        **Collective.**
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self._follow(*self._reduced.tolist())

    def _follow(self, code: int, have_all_run_out: bool) -> None:
        """Follow the smallest code of all processes."""
        self._have_all_run_out = have_all_run_out
        if code < _SAVE:
            self.agreed = Stop(code)
        if code == _SAVE:
            # A request of this process that is not reduced yet is served by the same save.
            self._wants_save = False
            self.is_save_agreed = True

    def agree(self) -> None:
        """Set `agreed` if any process has requested a stop so far. **Collective.**"""
        self.poll()
        self.drain()

    def until_preempted(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items` until they end.

        **Collective**: all end after the same round.

        Processes may have different numbers of items: one that has run out keeps polling until all
        have. Raises EvaluationStopped once a signal is agreed on: nothing computes with a part.
        """
        for item in items:
            self._poll_round(has_run_out=False)
            yield item
        while not self._have_all_run_out:
            self._poll_round(has_run_out=True)
        self._have_all_run_out = False

    def _poll_round(self, *, has_run_out: bool) -> None:
        self.poll(has_run_out=has_run_out)
        if self.agreed.is_preemption:
            raise EvaluationStopped(
                "PREEMPTED", f"{self.agreed.reason}: run the same command again"
            )


@contextmanager
def stop_on_signals(flag: StopFlag, activity: Activity) -> Iterator[None]:
    """Raise `flag` on the first TERM, INT, USR1 or HUP inside the block; USR2 requests a save.

    Until the phase `start` ends, nothing needs to be saved: the first one raises Preempted at once.
    A second INT, or one after another signal, exits at once with 130. Which signals are left alone
    is said at `signals_handled`.
    """
    exits_from_s = math.inf  # an INT exits from this time on

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal exits_from_s
        if number in SAVE_SIGNALS:
            flag.request_save()
            return
        now_s = time.monotonic()
        if number == signal.SIGINT:
            exits = now_s >= exits_from_s
            exits_from_s = now_s
            if activity.phase != "start":
                flag.on_interrupt(exits)
            if exits:
                os._exit(128 + signal.SIGINT)
        exits_from_s = min(exits_from_s, now_s + _SAME_INTERRUPT_S)
        is_first = not flag._wish.is_preemption  # a second one must not interrupt the cleanup
        flag.request(number)
        if is_first and activity.phase == "start":
            raise Preempted(
                "PREEMPTED",
                f"{signal.Signals(number).name} before training began; nothing is lost: "
                "run the same command again",
            )

    with signals_handled(handle):
        yield


@contextmanager
def program_stopped(
    flag: StopFlag, activity: Activity, *, is_main: bool, is_quiet: bool
) -> Iterator[None]:
    """Raise Preempted after a block in which a signal came: the program must not go on.

    An error of the block is raised instead. The main process says in one line what happened, unless
    the progress of the run, which is not `is_quiet`, has said it, or whoever shows the exception
    will.
    """
    try:
        yield
        # One that is not agreed on came after the last poll.
        stop = flag.agreed if flag.agreed.is_preemption else flag._wish
        if stop.is_preemption:
            raise Preempted(
                "PREEMPTED",
                f"{stop.reason}: saved step {activity.state.optimizer_step}: "
                "run the same command to continue",
            )
    except Preempted as error:
        stopped = here(error)
        stopped.result = error.result or activity.result
        is_shown = isinstance(stopped, PreemptedCell) or not is_main
        if not is_shown and (is_quiet or activity.phase != "preempted"):
            with suppress(OSError):  # stderr is closed
                os.write(2, f"accel_trainer: {error.message}\n".encode())
        raise stopped from None
