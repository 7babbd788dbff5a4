"""`accel-trainer diff RUN_A RUN_B`: show how two runs differ, in settings and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.config import diff_config
from ...training.metrics import is_number
from ..common.output import format_number, show
from ..common.parser import CommandParser
from .run_reader import RunReader, read_run, reading

# Folder, time, command and addresses: these never cause a different result.
_EVERY_RUN_ITS_OWN = (
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences by group; empty groups are left out."""
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
    known = first.environment and second.environment
    prints = [run.data_fingerprint for run in (first, second)]
    return {
        "config": _changes(first.config, second.config),
        "data": []
        if None in prints or len(set(prints)) == 1
        else [("data_fingerprint", prints[0], prints[1])],
        "environment": _changes(first.environment, second.environment) if known else [],
        "results": _changes(_results(first), _results(second)),
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    return [
        change for change in diff_config(old, new) if not change[0].startswith(_EVERY_RUN_ITS_OWN)
    ]


def _results(run: RunReader) -> dict[str, Any]:
    """Return the final numbers of the run, without matrices."""
    numbers = {name: run.result.get(name) for name in _RESULTS}
    metrics = {
        name: value for name, value in (run.result.get("metrics") or {}).items() if is_number(value)
    }
    return {"state": run.state, **metrics, **numbers}


def _show(name: str, value: Any) -> str:
    if is_number(value) and "/" in name:
        return format_number(name, value)
    if isinstance(value, float) and name in _RESULTS:
        return f"{value:,.1f}"
    return str(value)
