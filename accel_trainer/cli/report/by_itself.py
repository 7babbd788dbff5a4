"""Draws the runs of a page so that a malformed one leaves the others there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from ...core.errors import UserError
from ..runs.run_reader import RunReader, Runs, reading

T = TypeVar("T")


class Fault(NamedTuple):
    """Why a run is not on a page; its message is there in its place."""

    run: str
    message: str


def fault_of(folder: Path, error: UserError | OSError) -> Fault:
    """Return what a page shows in the place of the run in `folder`."""
    return Fault(os.path.basename(os.path.realpath(folder)), getattr(error, "message", str(error)))


def draw_soundly(
    runs: Runs,
    draw: Callable[[Runs, Sequence[Fault]], T],
    faults: Sequence[Fault] = (),
) -> tuple[T, Sequence[Fault]]:
    """Return what `draw` returns for the runs that can be drawn, and the faults of the others.

    All are drawn together. Only if that fails, each is drawn by itself, to find those at fault.

    Raises UserError or OSError if there is no other run.
    """
    try:
        with reading(*(run.folder for run in runs)):
            return draw(runs, faults), faults
    except (UserError, OSError):
        if len(runs) < 2:
            raise
        sound: list[RunReader] = []
        found = [*faults]
        for run in runs:
            try:
                with reading(run.folder):
                    draw([run], ())
                sound.append(run)
            except (UserError, OSError) as error:
                found.append(fault_of(run.folder, error))
        if not sound or len(sound) == len(runs):
            raise
        with reading(*(run.folder for run in sound)):
            return draw(sound, found), found
