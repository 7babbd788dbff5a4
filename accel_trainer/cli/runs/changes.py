"""How two runs differ: in settings, data, environment and results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.config import diff_config, flatten_config
from ...core.history import is_number
from .run_reader import RunReader, Runs

# Folder, time, command and addresses differ between any two runs and never change a result.
_IGNORED = (
    "run.",
    "cache_dir",
    "started",
    "command",
    "recipe_defaults",
    "variables.MASTER_",
    "variables.TORCHELASTIC_",
    "variables.SLURM_",
    "variables.ACCELERATE_USE_CPU",
)
RESULTS = ("optimizer_step", "samples_per_s", "wall_s")

NOT_RECORDED = "not recorded"
"""In place of the value of a setting that a run does not have, such as one of a newer version."""

Change = tuple[str, Any, Any]
"""A dotted name, the old value and the new value."""


def settings_that_differ(runs: Runs) -> list[tuple[str, list[Any]]]:
    """Return name and values of each setting in which runs differ.

    A run without a setting is taken to be at its default, which the other runs have recorded.
    """
    configs = [dict(flatten_config(run.config)) for run in runs]
    defaults = {
        name: value
        for run in runs
        for name, value in flatten_config(run.environment.get("recipe_defaults", {}))
    }
    rows = []
    for name in dict.fromkeys(name for config in configs for name in config):
        effective = [config.get(name, defaults.get(name)) for config in configs]
        if any(value != effective[0] for value in effective):
            rows.append((name, [config.get(name, NOT_RECORDED) for config in configs]))
    return rows


def compare_runs(first: RunReader, second: RunReader) -> dict[str, list[Change]]:
    """Return the differences in config, data, environment (code and versions) and results."""
    # Other data have another order, too.
    data = [
        (name, old, new)
        for name in ("data_fingerprint", "order")
        if (old := first.manifest.get(name)) and (new := second.manifest.get(name)) and old != new
    ][:1]
    environment: list[Change] = []
    if first.environment and second.environment:
        environments = [{**run.environment, "id": None, "sources": None} for run in (first, second)]
        environment = _changes(*environments)
    return {
        "config": [
            (name, old, new)
            for name, (old, new) in settings_that_differ([first, second])
            if not name.startswith(_IGNORED)
        ],
        "data": data,
        "environment": environment,
        "results": _changes(_results(first), _results(second)),
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    return [change for change in diff_config(old, new) if not change[0].startswith(_IGNORED)]


def _results(run: RunReader) -> dict[str, Any]:
    """Return the final numbers of the run, without matrices."""
    numbers = {name: run.result.get(name) for name in RESULTS}
    measured = run.result.get("metrics") or {}
    metrics = {name: value for name, value in measured.items() if is_number(value)}
    return {"state": run.state, **metrics, **numbers}
