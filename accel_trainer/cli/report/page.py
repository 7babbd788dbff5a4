"""Writes the page of a report from the runs and their charts."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ...vision.rules import RULED
from ..runs.run_reader import RunReader, Runs
from ..runs.settings import changed_settings, differing_settings, flatten
from .by_itself import Fault
from .charts import kinds_of
from .classes import class_rows
from .facts import facts_of
from .figures import DARK, LIGHT, Chart, series_name
from .logged import read_pictures
from .page_data import page_data, policy
from .pictures import read_samples
from .templates import fill_in

# Where a run ends that nothing cuts short. `max_steps` leaves steps for a later start.
_PLANNED_ENDS = ("num_epochs reached", "num_steps reached")
# What is shown of the environment before its other values are asked for.
_SUMMARY = (
    "started",
    "packages.torch",
    "hardware.device",
    "hardware.num_processes",
    "command.arguments",
    "code.git_commit",
)
_MAX_OPEN = 3  # a page of at most this many runs shows their details from the start


def report_script() -> str:
    """Return the script of the curves."""
    return resources.files(__package__).joinpath("report.js").read_text(encoding="utf-8")


def write_page(
    runs: Runs,
    curves: Sequence[Chart],
    classes: Sequence[Sequence[Chart]],
    *,
    scripts: Sequence[str],
    version: int | None = None,
    faults: Sequence[Fault] = (),
) -> str:
    """Return the HTML page, in which no other scripts than `scripts` may run.

    `classes` are the charts of the classes of each run; `faults` lists the runs that cannot be
    shown, and why.
    A page with a `version` is live: it may ask its server whether there is a newer one.
    """
    is_live = version is not None
    described = [
        _describe(run, number) | {"classes": drawn}
        for number, (run, drawn) in enumerate(zip(runs, classes, strict=True))
    ]
    return fill_in(
        "report.html.jinja",
        title=runs[0].name if len(runs) == 1 else f"{len(runs) or 'no'} runs",
        runs=described,
        faults=faults,
        # Those that any run has: not every run is evaluated.
        columns=list(dict.fromkeys(name for each in described for name in each["cells"])),
        curves=curves,
        data=page_data(runs),
        scripts=scripts,
        is_live=is_live,
        version=version,
        shape=_shape(runs, curves),
        policy=policy(scripts, is_live=is_live),
        differences=differing_settings(runs),
        equal=_equal_runs(runs),
        datasets=sorted({run.dataset or "unnamed" for run in runs}),
        palettes={"light": LIGHT.variables(), "dark": DARK.variables()},
        is_open=len(runs) <= _MAX_OPEN,
    )


def _shape(runs: Runs, curves: Sequence[Chart]) -> str:
    """Return a text that changes if the page needs other charts than it has."""
    names = [[str(run.folder) for run in runs], [chart.title for chart in curves]]
    return hashlib.sha256(repr((names, list(kinds_of(runs)))).encode()).hexdigest()


def _equal_runs(runs: Runs) -> list[list[str]]:
    """Return the names of runs that have measured the same, several in each group."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        measured = [name for name in run.metric_names() if not name.startswith("perf/")]
        key = repr([(name, run.series(name)) for name in measured])
        groups.setdefault(key, []).append(run.name)
    return [names for names in groups.values() if len(names) > 1]


def _describe(run: RunReader, number: int) -> dict[str, Any]:
    """Return what the page shows for one run besides its charts."""
    facts = facts_of(run)
    environment = _environment(run)
    reason = run.result.get("stop_reason")
    return {
        "name": run.name,
        "color": series_name(number),
        "state": run.state,
        "stop_reason": None if reason in _PLANNED_ENDS else reason,
        "subtitle": _subtitle(run),
        "facts": facts,
        "cells": {fact["name"]: fact["value"] for fact in facts},
        "restarts": run.restarts,
        "num_killed": run.num_killed,
        "predictions": read_samples(run, "predictions"),
        "mistakes": read_samples(run, "mistakes"),
        "logged": read_pictures(run),
        "class_rows": class_rows(run),
        "changed": _chosen_settings(run),
        "config": list(flatten(run.config).items()),
        "environment": environment,
        "summary": [(name, value) for name, value in environment if name in _SUMMARY],
        "origin": run.origin,
    }


def _chosen_settings(run: RunReader) -> list[tuple[str, Any, Any, bool]]:
    """Return the settings that differ from the defaults: of the recipe, if the run knows them.

    The last value tells whether a rule chooses the setting where nobody has given it.
    """
    defaults = run.environment.get("recipe_defaults", {})
    recipe = flatten(defaults)
    ruled = RULED if "photos" in defaults else frozenset()
    rows = [
        (name, recipe.get(name, of_library), value, name in ruled)
        for name, of_library, value in changed_settings(run)
    ]
    return [row for row in rows if row[1] != row[2]]


def _subtitle(run: RunReader) -> str:
    parts = (run.settings.get("model.name"), run.dataset)
    return " on ".join(str(part) for part in parts if part)


def _environment(run: RunReader) -> list[tuple[str, Any]]:
    """Return name and value of the recorded environment, with the command as typed."""
    recorded = {
        name: run.environment[name] for name in run.environment if name != "recipe_defaults"
    }
    values = flatten(recorded)
    if "command.arguments" in values:
        values["command.arguments"] = shlex.join(map(str, values["command.arguments"]))
    return list(values.items())
