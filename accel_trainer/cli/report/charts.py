"""Draws the charts of a report: logged metrics, and results per class."""

from __future__ import annotations

import heapq
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..common.output import is_fraction
from ..runs.confusion import Confusion
from ..runs.metric_groups import (
    TEST_GROUP,
    evaluation_groups,
    group_in_words,
    weights_of_metric,
)
from ..runs.run_reader import RunReader, Runs
from .figures import LIGHT, NUM_SERIES, Chart, draw_chart, series_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Semi-transparent, these colours are readable on white and on black.
_RIGHT = (0.23, 0.45, 0.85)
_WRONG = (0.90, 0.45, 0.13)

CUT_OFF = "higher values are cut off"
_SIZE = (4.6, 2.6)  # inches; about the width of a phone
_SQUARE = (4.6, 4.3)


class Kind(NamedTuple):
    """How the lines of a group of metrics are drawn; `color` is used on a page with one run."""

    label: str
    color: str
    style: Mapping[str, Any]


_TRAINING = Kind("training", "muted", {"linewidth": 1.0, "alpha": 0.75})
_LABELS = {"eval": "evaluation", "eval_ema": "averaged weights"}
_SHOWN_SHARE = 0.98  # of the values of a line, if the others are far higher
_NEVER_CUT = ("perf/", "optim/learning_rate")
_OUTLIER = 5  # times the height of the other values
_MAX_NAMED_CLASSES = 20
_MIN_SAMPLES = 10  # of a class whose cells have their full colour
_MAX_NAME = 18  # characters of a class
_MAX_MARKERS = 40
_MAX_RESTARTS = 400
_MAX_RUNS_IN_LEGEND = 6
_LEGEND_CHARACTERS = 60
_LEGEND_ROW = 0.19  # inches
_ABOVE = (-0.02, 1)  # the place of a legend
_BAR = 0.62  # the height of a bar


def kinds_of(runs: Runs) -> dict[str, Kind]:
    """Return how the lines of each group are drawn: of training, and of each evaluation."""
    kinds = {"train": _TRAINING}
    for number, group in enumerate(evaluation_groups(_metric_names(runs))):
        style: dict[str, Any] = {"marker": "o", "markersize": 3.2}
        if weights_of_metric(group) == "ema":
            style["linestyle"] = (0, (4, 2))
        label = _LABELS.get(group, group_in_words(group))
        kinds[group] = Kind(label, series_name(number), style)
    return kinds


def _metric_names(runs: Runs) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metric_names()))


def group_curves(runs: Runs) -> dict[str, list[str]]:
    """Return the names of the metrics of each chart, in the order of the page.

    The test set has none: it is measured once.
    """
    kinds = kinds_of(runs)
    charts: dict[str, list[str]] = {"loss": [], "accuracy": []}
    for name in _metric_names(runs):
        group, _, quantity = name.partition("/")
        if group != TEST_GROUP:
            charts.setdefault(quantity if group in kinds else name, []).append(name)
    ordered = sorted(charts.items(), key=lambda item: "/" in item[0])
    return {chart: members for chart, members in ordered if members}


def draw_curves(runs: Runs, *, quantities: Collection[str] | None = None) -> list[Chart]:
    """Return a chart per recorded quantity, or only of `quantities` if they are given."""
    return [
        _draw_curve(chart, members, runs)
        for chart, members in group_curves(runs).items()
        if quantities is None or chart in quantities
    ]


def title_of(chart: str) -> str:
    """Return the title of a chart: the name of its quantity in words, or one that a user chose."""
    group, _, words = chart.rpartition("/")
    if group not in ("", "optim", "perf"):
        return chart
    words = words.replace("_per_s", " per second").replace("_gib", " (GiB)").replace("_", " ")
    words = words.replace("grad ", "gradient ")
    words = words.replace("data wait fraction", "time waiting for data")
    words = re.sub(r"\btop(\d+)", r"top-\1", words)
    return words[:1].upper() + words[1:]


def top_of(chart: str, names: Sequence[str], runs: Runs) -> float | None:
    """Return where the values of a chart are cut off, so that a few do not flatten all others.

    None: they are shown whole. Cut off are spikes, the highest 2 % of a line that are several times
    as high as the rest of it, and lines several times as high as most: runs that have diverged.
    Fractions, speeds and learning rates are whole: they do not diverge.
    """
    if is_fraction(chart) or chart.startswith(_NEVER_CUT):
        return None
    lines = [
        sorted(value for value in run.series(name)[1] if math.isfinite(value))
        for run in runs
        for name in names
    ]
    lines = [values for values in lines if values]
    if not lines:
        return None
    low = min(values[0] for values in lines)
    heights = [_height(values, low) for values in lines]
    usual = statistics.median_low(heights)
    top = max(height for height in heights if height <= _OUTLIER * usual)
    highest = max(values[-1] for values in lines) - low
    return low + 1.05 * top if highest > top > 0 else None


def _height(values: Sequence[float], low: float) -> float:
    """Return how far a line rises above `low`, without its spikes; its values are sorted."""
    without_spikes = values[math.ceil(_SHOWN_SHARE * len(values)) - 1] - low
    whole = values[-1] - low
    return whole if whole <= _OUTLIER * without_spikes else without_spikes


def _draw_curve(chart: str, names: Sequence[str], runs: Runs) -> Chart:
    kinds = kinds_of(runs)
    last_step = max(row["optimizer_step"] for run in runs for row in run.rows)
    top = top_of(chart, names, runs)

    def draw(axes: Axes) -> None:
        for number, run in enumerate(runs):
            color = LIGHT.series[number % NUM_SERIES] if len(runs) > 1 else None
            line_color = color or LIGHT.muted
            steps = sorted({*run.restarts})
            axes.vlines(
                steps[:: len(steps) // _MAX_RESTARTS + 1],
                0,
                1,
                transform=axes.get_xaxis_transform(),
                color=line_color,
                linewidth=0.9,
                linestyle=":",
                zorder=0,
            )
            _plot_run(axes, run, names, kinds, color=color, earlier=runs[:number])
        axes.set_xlim(0, max(last_step, 1) * 1.02)  # the same x-axis in all charts
        if top is not None:
            axes.set_ylim(top=top)
            axes.text(1, 1, CUT_OFF, transform=axes.transAxes, ha="right", color=LIGHT.muted)
        axes.set_xlabel("optimizer step")
        axes.locator_params(nbins=6)
        if is_fraction(chart):
            axes.yaxis.set_major_formatter(
                lambda value, _: f"{round(100 * value, 4):g}%" if value <= 1 else ""
            )
        elif chart.startswith("perf/"):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        if columns:
            axes.legend(bbox_to_anchor=_ABOVE, ncols=columns)

    if len(runs) > 1:
        labels = [run.name for run in runs]
    else:
        groups = [name.partition("/")[0] for name in names]
        labels = [kinds[group].label for group in groups if group in kinds]
    columns, rows = _legend_shape(labels)
    name = re.sub(r"\W+", "_", chart.rpartition("/")[2])
    return draw_chart(
        name,
        title=title_of(chart),
        size=(_SIZE[0], _SIZE[1] + _LEGEND_ROW * max(0, rows - 1)),
        draw=draw,
    )


def _legend_shape(labels: Sequence[str]) -> tuple[int, int]:
    """Return columns and rows of a legend.

    There is none for one line, nor for many lines: then the page's table is the legend.
    """
    if not 1 < len(labels) <= _MAX_RUNS_IN_LEGEND:
        return 0, 0
    columns = max(1, min(3, _LEGEND_CHARACTERS // (max(map(len, labels)) + 5)))
    return columns, math.ceil(len(labels) / columns)


def _plot_run(
    axes: Axes,
    run: RunReader,
    names: Sequence[str],
    kinds: Mapping[str, Kind],
    *,
    color: str | None,
    earlier: Runs,
) -> None:
    """Draw the series of one run, in one colour per run, or per kind if there is one run.

    A line that an `earlier` run also has is dashed, so that both are seen.
    """
    colors = LIGHT.variables()
    for name in names:
        steps, values = run.series(name)
        kind = kinds.get(name.partition("/")[0], Kind("", "series-1", {}))
        style = dict(kind.style)
        if len(steps) > _MAX_MARKERS:
            style.pop("marker", None)
        if copies := sum(other.series(name) == (steps, values) for other in earlier):
            style["linestyle"] = (0, (4, 4 * copies))
        if color is None:
            label: str | None = kind.label
        else:
            label = run.name if name == names[-1] else None
        axes.plot(steps, values, color=color or colors[kind.color], label=label, **style)


def draw_confusion(name: str, confusion: Confusion, class_names: Sequence[str]) -> Chart:
    """Return the confusion matrix with true classes as rows.

    For many classes it is a chart of the pairs that are confused most.
    """
    if confusion.num_classes > _MAX_NAMED_CLASSES:
        return _draw_confused_pairs(name, confusion, class_names)
    counts = np.array(confusion.matrix())
    # A row of few samples stays pale: its only photo would be the darkest cell.
    fractions = counts / counts.sum(1, keepdims=True).clip(_MIN_SAMPLES)
    classes = range(len(counts))
    colors = np.where(np.eye(len(counts), dtype=bool)[:, :, None], _RIGHT, _WRONG)
    pixels = np.dstack([colors, np.sqrt(fractions)])  # the root keeps rare mistakes visible

    def draw(axes: Axes) -> None:
        axes.imshow(pixels, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(xlabel="predicted", ylabel="true")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        has_long_names = max(map(len, class_names)) > 3
        turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(classes, class_names, **(turned if has_long_names else {}))
        axes.set_yticks(classes, class_names)
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
        for (row, column), count in np.ndenumerate(counts):
            color = LIGHT.ink if count else LIGHT.line
            if fractions[row, column] > 0.35:  # a dark cell
                color = LIGHT.on_fill
            axes.text(column, row, str(count), color=color, **style)

    return draw_chart(name, title="Confusion", size=_SQUARE, draw=draw)


def _draw_confused_pairs(name: str, confusion: Confusion, class_names: Sequence[str]) -> Chart:
    mistakes = [
        (count, row, column) for row, column, count in confusion.pairs.tolist() if row != column
    ]
    worst = heapq.nsmallest(_MAX_NAMED_CLASSES, mistakes, key=lambda pair: (-pair[0], pair[1:]))
    samples = confusion.samples()
    bars = []
    for count, row, column in worst:
        label = f"{_cut(class_names[row])} → {_cut(class_names[column])}"
        bars.append((label, count, f"{count} of {samples[row]}"))
    longest = max((count for count, _, _ in worst), default=1)
    return _draw_bars(name, "Most confused: true → predicted", bars, longest=longest, series=1)


def _draw_bars(
    name: str,
    title: str,
    bars: Sequence[tuple[str, float, str]],
    *,
    longest: float,
    series: int,
    start: float = 0.0,
) -> Chart:
    """Return horizontal bars: each has a label, a length up to `longest`, and text beside it.

    They are drawn from `start`, which the title has to name.
    """

    def draw(axes: Axes) -> None:
        lengths = [length - start for _, length, _ in bars]
        axes.barh(range(len(bars)), lengths, _BAR, start, color=LIGHT.series[series])
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        axes.invert_yaxis()  # the first on top
        room = longest - start
        axes.set_xlim(start, start + 1.3 * room)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for position, (_, length, text) in enumerate(bars):
            axes.text(length + 0.015 * room, position, text, va="center", color=LIGHT.muted)

    width, most = _SQUARE
    size = width, min(most, 0.4 + 0.24 * len(bars))
    return draw_chart(name, title=title, size=size, draw=draw)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"


def draw_class_accuracy(name: str, confusion: Confusion, class_names: Sequence[str]) -> Chart:
    """Return a bar per class with samples, the hardest on top.

    Of many classes only the hardest and the easiest are shown.
    """
    rows = zip(confusion.accuracy.tolist(), class_names, confusion.samples(), strict=True)
    shown = sorted(row for row in rows if not math.isnan(row[0]))
    title = "Accuracy by class"
    if len(shown) > _MAX_NAMED_CLASSES:
        half = _MAX_NAMED_CLASSES // 2
        shown = [*shown[:half], *shown[-half:]]
        title = "The hardest and the easiest classes"
    # So that classes can be told apart that are all good.
    start = max(0.0, math.floor(10 * min((row[0] for row in shown), default=0) - 0.5) / 10)
    if start:
        title += f" (bars start at {start:.0%})"
    return _draw_bars(
        name,
        title,
        [(_cut(label), value, f"{value:.1%} of {count:,}") for value, label, count in shown],
        longest=1,
        series=0,
        start=start,
    )
