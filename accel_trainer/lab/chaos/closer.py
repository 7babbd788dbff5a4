"""A closer look at a recipe that did not survive: `accel-trainer why` on its undisturbed run."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from accel_trainer import OneLineError
from accel_trainer.commands import new_process_context, read_run

from ..replay.replay import STOP, Replay
from ..why.why import why
from .campaign import Verdict
from .runs import Ending
from .start import Recipe

_LIMIT_S = 300.0
_POLL_S = 0.2
_KEEP_ALL = ("--checkpoint.keep-last-n", "1000")
_NOT_REPLAYED = ("workers", "processes")
_WHERE = ("step ", "before step ")


def look_closer(failed: Verdict, recipe: Recipe, reference: Ending) -> list[str]:
    """Return lines with the first operator or attribute that differs, and the cause.

    The undisturbed run is trained again, from its start and from a checkpoint, up to the step of
    the first difference: that shows state that a resume loses, and randomness. No lines: nothing
    was found, or not within five minutes.

    Raises:
        KeyboardInterrupt: a signal to stop came.
    """
    plan = failed.ending.plan
    # A replay keeps the workers and processes of the run, so it cannot show what others change.
    is_replayed = not plan or plan[-1].kind not in _NOT_REPLAYED
    if failed.difference is None or failed.difference.step is None or not is_replayed:
        return []
    receiver, sender = new_process_context().Pipe(duplex=False)
    arguments = (sender, reference, Path(recipe.path), failed.difference.step, bool(plan))
    place = (Path.cwd(), dict(os.environ))  # a server of forks keeps those it started with
    process = new_process_context().Process(target=_find, args=(*arguments, *place))
    process.start()
    sender.close()  # so that the end of the process is seen
    deadline = time.monotonic() + _LIMIT_S
    lines: list[str] = []
    try:
        while not receiver.poll(_POLL_S) and time.monotonic() < deadline and not recipe.stops:
            pass
        if receiver.poll():
            with suppress(EOFError):
                lines = receiver.recv()
    finally:
        process.kill()  # what it has started ends with it
        process.join()
    if recipe.stops:
        raise KeyboardInterrupt
    return lines


def _find(
    sender: Connection,
    reference: Ending,
    recipe: Path,
    step: int,
    has_faults: bool,
    directory: Path,
    environment: Mapping[str, str],
) -> None:
    """Send the lines, in a process of its own."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    base = reference.folder / "all-checkpoints"
    with redirect_stderr(io.StringIO()), suppress(OneLineError, OSError, KeyboardInterrupt):
        replay = Replay.of(read_run(reference.run), recipe).with_flags(_KEEP_ALL)
        replay.train_silently(base, until=step, after=step - 1, callbacks=STOP)
        found = why(base, recipes=[recipe], until=step, keep=reference.folder / "why")
        if found.step is not None and found.cause is not None:
            # With faults, the cause is known: what they change, or what a resume loses.
            wanted = _WHERE if has_faults else (*_WHERE, "cause: ")
            sender.send([line for line in found.text.splitlines() if line.startswith(wanted)])
