"""The charts of a report, by matplotlib, as SVG that takes its colours and its font from the page around it.

Colours stand for roles: each is drawn as a placeholder, and becomes a CSS variable that the page defines
for light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .run_reader import RunReader
from .tables import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, LINE, ON_FILL = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0a0a0{number}" for number in range(1, 7))
_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", ON_FILL: "on-fill"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES, start=1)
}
# Mixed with what lies behind, these read on white and on black.
_RIGHT, _WRONG = (0.23, 0.45, 0.85), (0.90, 0.45, 0.13)

_SIZE = (5.0, 2.8)  # inches; about the width of a phone at its font size
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.size": 10, "text.color": INK, "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE, "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "ytick.left": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": LINE, "grid.linewidth": 0.7, "lines.linewidth": 1.7, "lines.solid_capstyle": "round",
    "legend.frameon": False, "legend.handlelength": 1.4, "axes.xmargin": 0.01, "figure.constrained_layout.use": True,
}  # fmt: skip
# How the values of a metric are drawn: while training, at evaluations, and of the averaged weights.
_KINDS: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.0, "alpha": 0.75},
    "eval": {"marker": "o", "markersize": 3.2},
    "eval_ema": {"marker": "o", "markersize": 3.2, "linestyle": (0, (4, 2))},
}
_KIND_COLORS = {"train": MUTED, "eval": SERIES[0], "eval_ema": SERIES[1]}  # of several runs, each has its own
_KIND_NAMES = {"train": "training", "eval": "evaluation", "eval_ema": "averaged weights"}
_MAX_NAMED_CLASSES = 20


def draw_curves(runs: Sequence[RunReader]) -> list[dict[str, str]]:
    """Return a chart, as title and SVG, for each quantity that the runs recorded."""
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    charts: dict[str, list[str]] = {"loss": [], "accuracy": []}
    for name in names:
        group, _, quantity = name.partition("/")
        charts.setdefault(quantity if group in _KINDS else name, []).append(name)
    return [
        {"title": _title(chart), "svg": _draw_curve(chart, members, runs)}
        for chart, members in sorted(charts.items(), key=lambda item: "/" in item[0])
        if members
    ]


def _title(chart: str) -> str:
    return chart.rpartition("/")[2].replace("_per_s", " per second").replace("_", " ").capitalize()


def _draw_curve(chart: str, names: Sequence[str], runs: Sequence[RunReader]) -> str:
    with _figure(chart, _SIZE) as (axes, svg):
        for run_number, run in enumerate(runs):
            for name in names:
                steps, values = run.series(name)
                kind = name.partition("/")[0]
                color = (
                    SERIES[run_number % len(SERIES)] if len(runs) > 1 else _KIND_COLORS.get(kind, SERIES[0])
                )
                label = run.name if len(runs) > 1 else _KIND_NAMES.get(kind, "")
                is_first = name == names[-1] or len(runs) == 1
                style = dict(_KINDS.get(kind, {}))
                if len(steps) > 40:
                    style.pop("marker", None)
                axes.plot(steps, values, color=color, label=label if is_first else None, **style)
        axes.set_xlabel("optimizer step")
        axes.locator_params(nbins=6)
        if is_share(chart):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")
        elif chart.endswith("per_s"):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if len(names) > 1 or len(runs) > 1:
            columns = min(3, len(names) if len(runs) == 1 else len(runs))
            axes.legend(
                loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=columns, labelcolor=MUTED, borderpad=0
            )
    return svg[0]


def draw_confusion(counts: Sequence[Sequence[int]], class_names: Sequence[str], *, title: str) -> str:
    """Return how often each true class, a row, was taken for each class, a column."""
    num_classes = len(counts)
    is_named = num_classes <= _MAX_NAMED_CLASSES
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    # Few mistakes must be seen beside many hits: the root of the share.
    pixels = [
        [(*(_RIGHT if column == row else _WRONG), math.sqrt(share)) for column, share in enumerate(line)]
        for row, line in enumerate(shares)
    ]
    with _figure(title, (5.0, 4.7)) as (axes, svg):
        axes.imshow(pixels, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(xlabel="predicted", ylabel="true")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if is_named:
            ticks = range(num_classes)
            is_long = max(map(len, class_names)) > 3
            turned: dict[str, Any] = (
                {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
            )
            axes.set_xticks(ticks, class_names, **turned)
            axes.set_yticks(ticks, class_names)
            for row, line in enumerate(counts):
                for column, count in enumerate(line):
                    color = ON_FILL if shares[row][column] > 0.35 else INK if count else LINE
                    axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=7.5)
    return svg[0]


def draw_class_accuracy(values: Sequence[float | None], class_names: Sequence[str], *, title: str) -> str:
    """Return a bar for each class, the hardest on top; of many classes the hardest only."""
    known = [(value, name) for value, name in zip(values, class_names, strict=True) if value is not None]
    hardest = sorted(known)[:_MAX_NAMED_CLASSES]
    with _figure(title, (5.0, 4.7)) as (axes, svg):
        positions = range(len(hardest))
        axes.barh(positions, [value for value, _ in hardest], color=SERIES[0], height=0.62)
        axes.set_yticks(positions, [name for _, name in hardest])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for position, (value, _) in zip(positions, hardest, strict=True):
            axes.text(value + 0.015, position, f"{value:.1%}", va="center", color=MUTED)
    return svg[0]


@contextmanager
def _figure(name: str, size: tuple[float, float]) -> Iterator[tuple[Axes, list[str]]]:
    """Yield axes to draw on, and a list that holds the SVG after the block."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    svg: list[str] = []
    # The salt makes names within the SVG differ between the charts of a page, and the file the same each time.
    style: Any = _STYLE | {"svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = Figure(figsize=size)
        FigureCanvasSVG(figure)
        yield figure.add_subplot(), svg
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg.append(_for_page(text.getvalue(), name))


def _for_page(svg: str, name: str) -> str:
    """Return the SVG element alone, without references to anything outside, its placeholders replaced."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = (
        re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", svg[: svg.index(">")])
        + svg[svg.index(">") :]
    )
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
