"""Draws matplotlib charts as SVG, with the colours and font of the page around it, and as PNG.

Charts are drawn in the colours of light mode; in the SVG each is replaced by a CSS variable, which
the page defines for light and dark mode.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.own_files import SOFTWARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_SERIES = 20
_PNG_DPI = 200


@dataclass(frozen=True)
class Palette:
    """The colour of each role."""

    page: str
    card: str
    ink: str
    muted: str
    line: str
    on_fill: str
    series: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Return the colours by the names of their CSS variables."""
        roles = {
            name.replace("_", "-"): color for name, color in vars(self).items() if name != "series"
        }
        return roles | {series_name(number): color for number, color in enumerate(self.series)}


def series_name(number: int) -> str:
    """Return the CSS variable with the colour of run `number`, which counts from 0."""
    return f"series-{number % NUM_SERIES + 1}"


_LIGHT_SERIES = (
    "#2f62d3 #d96f10 #0c8a6c #8a4bcb #c8345e #7a7034 #1593b8 #8c5a3c #5f6b7a #b8369f "
    "#7fa3f0 #f0a55c #56bd9f #bd93e8 #ec7f9f #b5a94f #5fc0dc #c4957a #a1abb8 #e286d3"
)
LIGHT = Palette(
    page="#fafaf8",
    card="#ffffff",
    ink="#1b1c1f",
    muted="#66686f",
    line="#e4e3df",
    on_fill="#ffffff",
    series=tuple(_LIGHT_SERIES.split()),
)
_DARK_SERIES = (
    "#7ea6ff #f4a04c #4cc9a4 #c093f2 #f4819f #cfc37a #5cc8e8 #d09a78 #a9b4c2 #f08fe0 "
    "#4a72d0 #b87224 #2a8f72 #8b5cc4 #c04c6e #918639 #2d8fb0 #9a6a4a #75808f #b85aa8"
)
DARK = Palette(
    page="#121316",
    card="#1a1b1f",
    ink="#ececea",
    muted="#9c9ea6",
    line="#303238",
    on_fill="#ffffff",
    series=tuple(_DARK_SERIES.split()),
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": LIGHT.ink,
    "axes.labelcolor": LIGHT.muted,
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT.line,
    "xtick.color": LIGHT.line,
    "ytick.color": LIGHT.line,
    "xtick.labelcolor": LIGHT.muted,
    "ytick.labelcolor": LIGHT.muted,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT.line,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.labelcolor": LIGHT.muted,
    "legend.loc": "lower left",
    "legend.borderpad": 0,
    "axes.xmargin": 0.01,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # names may contain dollar signs
}


@dataclass(frozen=True)
class Chart:
    """A chart: file name, title, SVG for the page, and PNG."""

    name: str
    title: str
    svg: str
    png: bytes


def draw_chart(
    name: str, *, title: str, size: tuple[float, float], draw: Callable[[Axes], None]
) -> Chart:
    """Return the chart that `draw` draws on the axes of a figure of `size` in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    svg = io.StringIO()
    png = io.BytesIO()
    # The salt makes the ids in the SVG reproducible, and unique in the page.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # The font of matplotlib lacks some scripts. The SVG holds text, which a browser can draw.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=size)
        draw(figure.add_subplot())
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        if title:
            figure.suptitle(title, x=0.02, ha="left", color=LIGHT.ink, fontsize=11)
        figure.savefig(png, format="png", facecolor=LIGHT.card, dpi=_PNG_DPI, metadata=SOFTWARE)
    return Chart(name, title, _for_page(svg.getvalue(), title), png.getvalue())


def _for_page(svg: str, title: str) -> str:
    """Return only the SVG element, without external references and with variables for colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    end_of_tag = svg.index(">")
    attributes = r' (xmlns(:\w+)?|width|height|version)="[^"]*"'
    svg = re.sub(attributes, "", svg[:end_of_tag]) + svg[end_of_tag:]
    for variable, color in LIGHT.variables().items():
        if variable not in ("page", "card"):  # colours around the chart
            svg = svg.replace(color, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
