"""The charts of an evaluation's classes: the confusion matrix and the accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ...callbacks.evaluation_file import read_details
from ...core.json_files import read_json_object
from ..runs.confusion import Confusion, read_confusion
from ..runs.metric_groups import preferred_groups
from ..runs.run_reader import RunReader
from .figures import Chart


class Classes(NamedTuple):
    """The classes in the last evaluation of a run, which is of averaged weights if it has any."""

    confusion: Confusion
    names: Sequence[str]


class ClassRow(NamedTuple):
    """The numbers of a class, as text."""

    name: str
    samples: str
    precision: str
    recall: str


def read_classes(run: RunReader) -> Classes | None:
    """Read the last evaluation; None if it was not of classes."""
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
        return None
    names = _class_names(run.folder / "export")
    if len(names) != confusion.num_classes:
        names = [str(number) for number in range(confusion.num_classes)]
    return Classes(confusion, names)


def draw_classes(run: RunReader) -> list[Chart]:
    """Return the charts of the last evaluation; none if it was not of classes."""
    from .charts import draw_class_accuracy, draw_confusion

    found = read_classes(run)
    if found is None:
        return []
    return [
        draw_confusion(f"{run.name}-confusion", found.confusion, found.names),
        draw_class_accuracy(f"{run.name}-classes", found.confusion, found.names),
    ]


def class_rows(run: RunReader) -> list[ClassRow]:
    """Return precision and recall of each class that has samples, the lowest recall first."""
    found = read_classes(run)
    if found is None:
        return []
    confusion = found.confusion
    counts = zip(confusion.samples(), confusion.predictions(), confusion.hits(), strict=True)
    rows = [
        (hits / samples, name, samples, f"{hits / predicted:.1%}" if predicted else "–")
        for name, (samples, predicted, hits) in zip(found.names, counts, strict=True)
        if samples
    ]
    rows.sort(key=itemgetter(0))
    return [
        ClassRow(name, f"{samples:,}", precision, f"{recall:.1%}")
        for recall, name, samples, precision in rows
    ]


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
