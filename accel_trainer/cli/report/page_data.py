"""The numbers that the page's script draws, and the policy that lets no other script run."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from typing import Any

from ..common.output import is_fraction
from ..runs.run_reader import RunReader, Runs
from .charts import CUT_OFF, group_curves, kinds_of, top_of
from .figures import series_name

_MAX_POINTS = 8_000  # of a line in all runs together
_MIN_POINTS = 400  # of a line in each run


def page_data(runs: Runs) -> dict[str, Any]:
    """Return the runs, their lines and the charts in the order of the page, as values for JSON."""
    charts = group_curves(runs)
    limit = max(_MIN_POINTS, _MAX_POINTS // max(1, len(runs)))
    return {
        "runs": [_run(run, number, limit) for number, run in enumerate(runs)],
        "charts": [
            {
                "names": names,
                "format": "percent" if is_fraction(chart) else "number",
                "fromZero": chart.startswith("perf/"),
                "top": top_of(chart, names, runs),
            }
            for chart, names in charts.items()
        ],
        "cutOff": CUT_OFF,
        "kinds": {
            name: {"label": kind.label, "color": kind.color}
            for name, kind in kinds_of(runs).items()
        },
    }


def policy(scripts: Sequence[str], *, is_live: bool = False) -> str:
    """Return a content security policy: no other script, and nothing from the network.

    A page that is live may ask its own server.
    """
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    own_server = "connect-src 'self'; " if is_live else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; {own_server}"
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _run(run: RunReader, number: int, limit: int) -> dict[str, Any]:
    """Return the lines of a run; lines with the same steps share one list of steps."""
    all_steps: list[list[int]] = []
    series: dict[str, tuple[int, list[float | None]]] = {}
    for name in run.metric_names():
        steps, values = (_thin_out(column, limit) for column in run.series(name))
        if steps not in all_steps:
            all_steps.append(steps)
        series[name] = all_steps.index(steps), [_short(value) for value in values]
    return {
        "name": run.name,
        "color": series_name(number),
        "restarts": _thin_out(sorted({*run.restarts}), _MIN_POINTS),
        "steps": all_steps,
        "series": series,
        "steps_per_epoch": run.steps_per_epoch,
        "clock": run.training_clock and [_thin_out(column, limit) for column in run.training_clock],
    }


def _thin_out(values: Sequence[Any], limit: int) -> list[Any]:
    """Return every n-th value, and the last, where n keeps at most `limit` values and the last."""
    every = math.ceil(len(values) / limit) or 1
    return [*values[:-1:every], *values[-1:]]


def _short(value: float) -> float | None:
    """Return six digits of a number, None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
