"""A self-contained page about a comparison: a line for each pair, from A to B."""

from __future__ import annotations

import math
from html import escape

from accel_trainer.commands import format_number, write_html, write_table

from .compare import Comparison
from .paired import Pair
from .text import verdict_line

_WIDTH = 400
_HEIGHT = 240
_LEFT, _RIGHT = 64, 390
_STYLE = """
:root { --better: light-dark(#0c7a5c, #4fd1a5); --worse: light-dark(#c4571b, #ff9d5c); }
svg { width: 100%; max-width: 34rem; height: auto; overflow: visible; } line { stroke-width: 2; }
text { font-size: 13px; fill: var(--muted); } .axis { stroke: var(--line); stroke-width: 1; }
.better { stroke: var(--better); } .worse { stroke: var(--worse); } .equal { stroke: var(--muted); }
td.better { color: var(--better); } td.worse { color: var(--worse); }
.answer { font-size: 1.15rem; } table { font-variant-numeric: tabular-nums; }
"""


def draw_page(found: Comparison, text: str) -> str:
    """Return the page as HTML, without scripts and links; `text` is what the command has said."""
    title = f"Is B better? A with {found.plan.question.b_flags}"
    parts = [
        f'<p class="answer">{escape(verdict_line(found))}</p>',
        f"<h2>{escape(found.metric)} of each seed, from A to B</h2>",
        _slopes(found),
        _table(found),
        f"<h2>How it was found</h2>\n<pre>{escape(text)}</pre>",
    ]
    return write_html(title, "\n".join(parts), style=_STYLE, width_rem=46)


def _slopes(found: Comparison) -> str:
    """Return a line for each pair that has both numbers."""
    pairs = [pair for pair in found.paired.pairs if math.isfinite(pair.a + pair.b)]
    if not pairs:
        return "<p>No pair has two numbers: in each, an arm has diverged.</p>"
    numbers = [number for pair in pairs for number in (pair.a, pair.b)]
    low, high = min(numbers), max(numbers)

    def y(number: float) -> float:
        return _HEIGHT * (high - number) / ((high - low) or 1)

    lines = [
        f'<line class="{_kind(found, pair)}" x1="{_LEFT}" y1="{y(pair.a):.1f}" x2="{_RIGHT}" '
        f'y2="{y(pair.b):.1f}"><title>seed {pair.seed}: {_shown(found, pair.a)} -&gt; '
        f"{_shown(found, pair.b)}</title></line>"
        for pair in pairs
    ]
    axes = [
        f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}"/>' for x in (_LEFT, _RIGHT)
    ]
    ends = [
        f'<text x="{_LEFT - 10}" y="{y(number) + 4:.1f}" text-anchor="end">'
        f"{escape(format_number(found.metric, number))}</text>"
        for number in dict.fromkeys((high, low))
    ]
    names = [
        f'<text x="{x}" y="{_HEIGHT + 22}" text-anchor="middle">{name}</text>'
        for x, name in ((_LEFT, "A"), (_RIGHT, "B"))
    ]
    box = f"0 -8 {_WIDTH} {_HEIGHT + 36}"
    drawn = "".join([*axes, *lines, *ends, *names])
    return f'<svg viewBox="{box}" role="img" aria-label="A and B of each seed">{drawn}</svg>'


def _table(found: Comparison) -> str:
    rows = (
        f"<tr><td>{pair.seed}</td><td>{escape(_shown(found, pair.a))}</td>"
        f'<td>{escape(_shown(found, pair.b))}</td><td class="{kind}">{kind}</td></tr>'
        for pair in found.paired.pairs
        for kind in [_kind(found, pair)]
    )
    return write_table(("seed", "A", "B", "B is"), rows)


def _kind(found: Comparison, pair: Pair) -> str:
    winner = found.paired.winner(pair)
    return {"b": "better", "a": "worse", None: "equal"}[winner]


def _shown(found: Comparison, number: float) -> str:
    return format_number(found.metric, number) if math.isfinite(number) else "diverged"
