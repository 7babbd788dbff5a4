"""A start of a recipe as data: commands write it, and the started process reads it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...run.extra_callbacks import START_VARIABLE
from ...run.keywords import Settings

Arguments = Mapping[str, Any]
"""Keyword arguments of a class, as values of JSON."""
SHOWN_BY_COMMAND = "ACCEL_TRAINER_SHOWN_BY_COMMAND"
"""Set for a recipe if the command that starts it says what comes next."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of `recipe` with `flags`, and with what no flag can set."""

    recipe: str
    flags: Sequence[str] = ()
    num_processes: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    """They are added to the environment."""
    changes: Settings = field(default_factory=dict)
    """They count more than flags."""
    defaults: Settings = field(default_factory=dict)
    """They fill what flags leave open."""
    until: int | None = None
    """The step that it trains up to, at most; None: as the flags say."""
    resume: str | None = None
    """`auto` or `never`, unless the flags name a run to branch off from; None: as they say."""
    callbacks: Mapping[str, Arguments] = field(default_factory=dict)
    """Files of callbacks, and the arguments with which their classes are called."""
    disk: tuple[str, Arguments] | None = None
    """What it writes to instead of the disk: `module:class` of a `Disk`, which is called with the
    folder of the run and these arguments."""


@contextmanager
def added_callbacks(file: str, arguments: Arguments) -> Iterator[None]:
    """Add a file of callbacks to the runs that start inside, whoever has started this process."""
    before = os.environ.get(START_VARIABLE)
    start = this_start() or Start(recipe=sys.argv[0])
    start = replace(start, callbacks={**start.callbacks, file: arguments})
    os.environ[START_VARIABLE] = json.dumps(asdict(start))
    try:
        yield
    finally:
        if before is None:
            del os.environ[START_VARIABLE]
        else:
            os.environ[START_VARIABLE] = before


def this_start() -> Start | None:
    """Return the start of this process; None if a user has started it."""
    text = os.environ.get(START_VARIABLE)
    return Start(**json.loads(text)) if text else None
