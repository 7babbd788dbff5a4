"""`accel-trainer diff RUN_A RUN_B`: compare the settings and results of two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.output import format_number, show, tell
from ..common.parser import CommandParser
from .changes import Change, compare_runs
from .run_reader import RunReader, read_run, reading

_WITH_ONE_DECIMAL = ("samples_per_s", "wall_s")
_EXAMPLE = "example: accel-trainer diff runs/first runs/second"


def main(argv: Sequence[str]) -> int:
    """Print the differences by group, without empty groups."""
    parser = CommandParser(__doc__, _EXAMPLE)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_A", help="a run folder")
    add("other", type=Path, metavar="RUN_B", help="the run folder to compare it with")
    parser.add_json_option()
    options = parser.parse_args(argv)
    first, second = (read_run(folder) for folder in (options.run, options.other))
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


def _show(name: str, value: Any) -> str:
    if type(value) in (int, float) and "/" in name:
        return format_number(name, value)
    if isinstance(value, float) and name in _WITH_ONE_DECIMAL:
        return f"{value:,.1f}"
    return str(value)
