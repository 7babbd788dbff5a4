"""Draws the charts of a report: logged metrics, time per phase, and results per class."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.run_reader import RunReader
from ..runs.tables import format_duration, is_fraction
from .figures import NUM_SERIES, Chart, Palette, draw_chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Semi-transparent, these are readable on white and on black.
_RIGHT, _WRONG = (0.23, 0.45, 0.85), (0.90, 0.45, 0.13)

_SIZE = (4.6, 2.6)  # inches; about the width of a phone
_SQUARE = (4.6, 4.3)
# Line styles for training, evaluation, and evaluation of the averaged weights.
_KINDS: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.0, "alpha": 0.75},
    "eval": {"marker": "o", "markersize": 3.2},
    "eval_ema": {"marker": "o", "markersize": 3.2, "linestyle": (0, (4, 2))},
}
_KIND_NAMES = {"train": "training", "eval": "evaluation", "eval_ema": "averaged weights"}
_PHASES = {"training": "training", "evaluation": "evaluation", "save": "saves", "start": "start"}
_MAX_NAMED_CLASSES = 20
_MAX_MARKERS = 40


def draw_curves(runs: Sequence[RunReader], *, quantities: Collection[str] | None = None) -> list[Chart]:
    """Return a chart per recorded quantity, of `quantities` only (None: of all)."""
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    charts: dict[str, list[str]] = {"loss": [], "accuracy": []}
    for name in names:
        group, _, quantity = name.partition("/")
        charts.setdefault(quantity if group in _KINDS else name, []).append(name)
    return [
        _draw_curve(chart, members, runs)
        for chart, members in sorted(charts.items(), key=lambda item: "/" in item[0])
        if members and (quantities is None or chart in quantities)
    ]


def _title(chart: str) -> str:
    words = chart.rpartition("/")[2].replace("_per_s", " per second").replace("_", " ")
    words = words.replace("grad ", "gradient ").replace("data wait fraction", "time that waits for data")
    return re.sub(r"\btop(\d+)", r"top-\1", words).capitalize()


def _draw_curve(chart: str, names: Sequence[str], runs: Sequence[RunReader]) -> Chart:
    last_step = max(row["optimizer_step"] for run in runs for row in run.rows)

    def draw(axes: Axes, palette: Palette) -> None:
        for number, run in enumerate(runs):
            own = palette.series[number % NUM_SERIES] if len(runs) > 1 else None
            for step in run.restarts:
                axes.axvline(step, color=own or palette.muted, linewidth=0.9, linestyle=":", zorder=0)
            _plot_run(axes, palette, run, names, color=own)
        axes.set_xlim(0, last_step * 1.02)  # the same x-axis in all charts
        axes.set_xlabel("optimizer step")
        axes.locator_params(nbins=6)
        if is_fraction(chart):
            axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 4):g}%" if value <= 1 else "")
        elif chart.startswith("perf/"):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        if len(names) > 1 or len(runs) > 1:
            columns = min(3, len(names) if len(runs) == 1 else len(runs))
            axes.legend(
                loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=columns, labelcolor=palette.muted, borderpad=0
            )  # fmt: skip

    name = re.sub(r"\W+", "_", chart.rpartition("/")[2])
    return draw_chart(name, title=_title(chart), size=_SIZE, draw=draw)


def _plot_run(axes: Axes, palette: Palette, run: RunReader, names: Sequence[str], *, color: str | None) -> None:
    """Draw the series of one run, in one colour per run, or per kind if there is one run."""
    kind_colors = {"train": palette.muted, "eval": palette.series[0], "eval_ema": palette.series[1]}
    for name in names:
        steps, values = run.series(name)
        kind = name.partition("/")[0]
        style = dict(_KINDS.get(kind, {}))
        if len(steps) > _MAX_MARKERS:
            style.pop("marker", None)
        label = _KIND_NAMES.get(kind, "") if color is None else run.name if name == names[-1] else None
        axes.plot(steps, values, color=color or kind_colors.get(kind, palette.series[0]), label=label, **style)


def draw_time(runs: Sequence[RunReader]) -> Chart | None:
    """Return the seconds per phase over the attempts that ended cleanly; None if there are none."""
    timed = [(run, number % NUM_SERIES) for number, run in enumerate(runs) if run.phase_s]
    if not timed:
        return None

    def draw(axes: Axes, palette: Palette) -> None:
        height = 0.62 / len(timed)
        longest = max(max(run.phase_s.values()) for run, _ in timed)
        for number, (run, series) in enumerate(timed):
            total_s = sum(run.phase_s.values())
            color = palette.series[series]
            for row, phase in enumerate(_PHASES):
                seconds = run.phase_s.get(phase, 0.0)
                place = row + (number - (len(timed) - 1) / 2) * height
                axes.barh(place, seconds, color=color, height=height)
                text = f"{format_duration(seconds)}, {seconds / total_s:.0%}"
                axes.text(seconds + longest * 0.015, place, text, va="center", color=palette.muted)
        axes.set_yticks(range(len(_PHASES)), list(_PHASES.values()))
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.4)
        _clear(axes)

    return draw_chart("time", title="Where the time went", size=_SIZE, draw=draw)


def draw_confusion(name: str, counts: Sequence[Sequence[int]], class_names: Sequence[str]) -> Chart:
    """Return the confusion matrix: true classes as rows, predicted classes as columns."""
    fractions = [[count / max(1, sum(row)) for count in row] for row in counts]
    # The square root keeps rare mistakes visible.
    pixels = [
        [(*(_RIGHT if column == row else _WRONG), math.sqrt(fraction)) for column, fraction in enumerate(line)]
        for row, line in enumerate(fractions)
    ]

    def draw(axes: Axes, palette: Palette) -> None:
        axes.imshow(pixels, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(xlabel="predicted", ylabel="true")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if len(counts) > _MAX_NAMED_CLASSES:
            return
        ticks = range(len(counts))
        is_long = max(map(len, class_names)) > 3
        turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
        axes.set_xticks(ticks, class_names, **turned)
        axes.set_yticks(ticks, class_names)
        for row, line in enumerate(counts):
            for column, count in enumerate(line):
                is_dark = fractions[row][column] > 0.35
                color = palette.on_fill if is_dark else palette.ink if count else palette.line
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=7.5)

    return draw_chart(name, title="Confusion", size=_SQUARE, draw=draw)


def draw_class_accuracy(name: str, values: Sequence[float | None], class_names: Sequence[str]) -> Chart:
    """Return a bar per class, the hardest on top; of many classes only the hardest and the easiest."""
    known = [(value, label) for value, label in zip(values, class_names, strict=True) if value is not None]
    shown, title = sorted(known), "Accuracy by class"
    if len(shown) > _MAX_NAMED_CLASSES:
        half = _MAX_NAMED_CLASSES // 2
        shown, title = [*shown[:half], *shown[-half:]], "The hardest and the easiest classes"

    def draw(axes: Axes, palette: Palette) -> None:
        positions = range(len(shown))
        axes.barh(positions, [value for value, _ in shown], color=palette.series[0], height=0.62)
        axes.set_yticks(positions, [label for _, label in shown])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12)
        _clear(axes)
        for position, (value, _) in zip(positions, shown, strict=True):
            axes.text(value + 0.015, position, f"{value:.1%}", va="center", color=palette.muted)

    return draw_chart(name, title=title, size=_SQUARE, draw=draw)


def _clear(axes: Axes) -> None:
    """Remove ticks, grid and frame."""
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
