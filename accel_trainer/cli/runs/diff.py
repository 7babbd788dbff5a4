"""`accel-trainer diff RUN_A RUN_B`: show how two runs differ, in settings and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.config import diff_config
from ...core.history import is_number
from ..common.output import format_number, show
from ..common.parser import CommandParser
from .run_reader import RunReader, read_run, reading

# Folder, time, command and addresses differ between any two runs and never change a result.
_IGNORED = (
    "run.",
    "cache_dir",
    "started",
    "command",
    "config_origins",
    "variables.MASTER_",
    "variables.TORCHELASTIC_",
    "variables.SLURM_",
    "variables.ACCELERATE_USE_CPU",
)
_RESULTS = ("optimizer_step", "samples_per_s", "wall_s")
_EXAMPLE = "example: accel-trainer diff runs/first runs/second"

Change = tuple[str, Any, Any]
"""A dotted name, the old value and the new value."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences by group, without empty groups."""
    parser = CommandParser(prog="accel-trainer diff", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("run", type=Path, nargs=2, help="a run folder")
    options = parser.parse_args(argv)
    first, second = (read_run(folder) for folder in options.run)
    show(f"{first.name} -> {second.name}")
    with reading(*options.run):
        groups = compare(first, second)
    for title, changes in groups.items():
        if changes:
            show(title)
            width = max(len(name) for name, _, _ in changes)
            for name, old, new in changes:
                show(f"  {name.ljust(width)}  {_show(name, old)} -> {_show(name, new)}")
    if not any(groups.values()):
        show("no difference")
    return 0


def compare(first: RunReader, second: RunReader) -> dict[str, list[Change]]:
    """Return the differences in config, data, environment (code and versions) and results."""
    data: list[Change] = []
    old, new = first.data_fingerprint, second.data_fingerprint
    if old is not None and new is not None and old != new:
        data.append(("data_fingerprint", old, new))
    environment: list[Change] = []
    if first.environment and second.environment:
        environment = _changes(first.environment, second.environment)
    return {
        "config": _changes(first.config, second.config),
        "data": data,
        "environment": environment,
        "results": _changes(_results(first), _results(second)),
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    return [change for change in diff_config(old, new) if not change[0].startswith(_IGNORED)]


def _results(run: RunReader) -> dict[str, Any]:
    """Return the final numbers of the run, without matrices."""
    numbers = {name: run.result.get(name) for name in _RESULTS}
    measured = run.result.get("metrics") or {}
    metrics = {name: value for name, value in measured.items() if is_number(value)}
    return {"state": run.state, **metrics, **numbers}


def _show(name: str, value: Any) -> str:
    if is_number(value) and "/" in name:
        return format_number(name, value)
    if isinstance(value, float) and name in _RESULTS:
        return f"{value:,.1f}"
    return str(value)
