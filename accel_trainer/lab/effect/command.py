"""`accel-trainer diff RUN_A RUN_B`: compare the settings and results of two runs."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_trainer.commands import (
    Change,
    CommandParser,
    RunReader,
    compare_runs,
    format_number,
    read_run,
    reading,
    say_unless,
    show,
    tell,
)

_WITH_ONE_DECIMAL = ("samples_per_s", "wall_s")
_EXAMPLE = "example: accel-trainer diff runs/first runs/second"


def main(argv: Sequence[str]) -> int:
    """Print the differences by group, without empty groups.

    With `--effect`, find the settings that change the result: the first run is trained again up to
    a step with its own and with the other's values, and then with those of some settings. What
    comes of it is compared bit by bit after each step, and learning rates for the whole run.
    """
    parser = CommandParser(__doc__, _EXAMPLE)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_A", help="a run folder")
    add("other", type=Path, metavar="RUN_B", help="the run folder to compare it with")
    add("--effect", action="store_true", help="train, to find out which settings change the result")
    until_help = "the last step to train; default: past an evaluation and an epoch, at most 200"
    parser.add_number("--until", until_help, metavar="STEP")
    parser.add_number("--jobs", "runs to train at once; default: 1", default=1, lowest=1)
    parser.add_recipe_option()
    parser.add_json_option()
    options = parser.parse_args(argv)
    first, second = (read_run(folder) for folder in (options.run, options.other))
    if options.effect:
        return _show_effect(first, second, options)
    with reading(options.run, options.other):
        groups = compare_runs(first, second)
    if options.json:
        tell(json.dumps(groups))
    else:
        _show_groups(first, second, groups)
    return 0


def _show_groups(
    first: RunReader, second: RunReader, groups: Mapping[str, Sequence[Change]]
) -> None:
    show(f"{first.name} -> {second.name}")
    for title, changes in groups.items():
        if changes:
            show(title)
            width = max(len(name) for name, _, _ in changes)
            for name, old, new in changes:
                show(f"  {name.ljust(width)}  {_show(name, old)} -> {_show(name, new)}")
    if not any(groups.values()):
        show("no difference")


def _show_effect(first: RunReader, second: RunReader, options: Namespace) -> int:
    from .effect import find_effects  # imports torch
    from .text import lines_of

    with reading(options.run, options.other):
        found = find_effects(
            first,
            second,
            recipe=options.recipe,
            until=options.until,
            num_jobs=options.jobs,
            say=say_unless(options.json),
        )
    if options.json:
        tell(json.dumps(asdict(found)))
    else:
        for line in lines_of(found, first, second):
            show(line)
    return 0


def _show(name: str, value: Any) -> str:
    if type(value) in (int, float) and "/" in name:
        return format_number(name, value)
    if isinstance(value, float) and name in _WITH_ONE_DECIMAL:
        return f"{value:,.1f}"
    return str(value)
