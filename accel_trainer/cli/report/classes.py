"""The charts of an evaluation's classes: the confusion matrix, the accuracies, the calibration."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.json_files import read_json_object
from ...training.evaluation_file import read_details
from ..runs.confusion import read_confusion
from ..runs.metric_groups import preferred_groups
from ..runs.run_reader import RunReader
from .figures import Chart


def draw_classes(run: RunReader) -> list[Chart]:
    """Return the charts of the last evaluation; none if it was not of classes.

    They show the averaged weights if these were evaluated.
    """
    from .charts import draw_calibration, draw_class_accuracy, draw_confusion

    metrics = run.result.get("metrics") or {}
    with suppress(OSError, ValueError):
        step, details = read_details(run.folder)
        if run.state == "running" or not metrics:
            metrics = details
        elif step == run.result.get("optimizer_step"):
            metrics = {
                name: details.get(name) if _is_in_file(value) else value
                for name, value in metrics.items()
            }
    prefixes = [f"{group}/" for group in preferred_groups(metrics)]
    groups = [prefix for prefix in prefixes if f"{prefix}per_class_accuracy" in metrics]
    confusion = read_confusion(metrics, groups[0]) if groups else None
    if confusion is None:
        return []
    names = _class_names(run.folder / "export")
    if len(names) != confusion.num_classes:
        names = [str(number) for number in range(confusion.num_classes)]
    charts = [
        draw_confusion(f"{run.name}-confusion", confusion, names),
        draw_class_accuracy(f"{run.name}-classes", confusion.accuracy.tolist(), names),
    ]
    if bins := metrics.get(f"{groups[0]}calibration"):
        charts.append(draw_calibration(f"{run.name}-calibration", bins))
    return charts


def _is_in_file(value: Any) -> bool:
    """Whether a value in the result only names the file that holds it."""
    return isinstance(value, dict) and "file" in value


def _class_names(export: Path) -> list[str]:
    try:
        if export.is_symlink():
            return []
        names = read_json_object(export / "config.json")["class_names"]
        return [str(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return []
