"""A self-contained page about a finding: both curves, and the modules with the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from accel_trainer.commands import RunReader, write_html, write_table

from .finding import Finding, ModuleState

_LOSS = "train/loss"
_WIDTH = 640
_HEIGHT = 180
_COLORS = ("var(--a)", "var(--b)")
_INDENT_EM = 1.4

_STYLE = """
:root { --a: light-dark(#2563c9, #7aa7ff); --b: light-dark(#c4571b, #ff9d5c);
  --first: light-dark(#b3261e, #ff8f85); }
svg { width: 100%; height: auto; overflow: visible; } polyline { fill: none; stroke-width: 2; }
text { font-size: 11px; fill: var(--muted); }
thead th:first-child { padding-left: 0; } .other { color: var(--b); }
.first { color: var(--first); font-weight: 650; }
"""


def draw_page(finding: Finding, runs: Sequence[RunReader]) -> str:
    """Return the page as HTML, without scripts and links."""
    names = " and ".join(run.name for run in runs)
    title = f"{names}: {'equal' if finding.is_equal else 'where they start to differ'}"
    parts = [_lead(finding), _curves(finding, runs)]
    if finding.modules:
        parts.append(_modules(finding.modules))
    parts.append(f"<h2>What was found</h2>\n<pre>{escape(finding.text)}</pre>")
    return write_html(title, "\n".join(parts), style=_STYLE, width_rem=46)


def _lead(finding: Finding) -> str:
    """Return the answer in one sentence; empty if the runs are equal."""
    if finding.step is None:
        return ""
    place = f"step {finding.step}" + f", {finding.phase}" * (finding.phase is not None)
    place += f" of {finding.module}" * bool(finding.module)
    what = f": {finding.operator}" * (finding.operator is not None)
    cause = f". The cause: {finding.cause}" * (finding.cause is not None)
    first = f'<span class="first">{escape(place)}</span>'
    return f"<p>They differ first in {first}{escape(what + cause)}.</p>"


def _curves(finding: Finding, runs: Sequence[RunReader]) -> str:
    """Return the losses of the runs as lines, and the first step that differs as a mark."""
    series = [run.series(_LOSS) for run in runs]
    steps = [step for found, _ in series for step in found]
    losses = [loss for _, found in series for loss in found if loss == loss]
    if not losses:
        return ""
    low, high = min(losses), max(losses)
    first, last = min(steps), max(steps)

    def place(step: int, loss: float) -> str:
        x = _x(step, first, last)
        y = _HEIGHT * (high - loss) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    lines = []
    keys = []
    for (found, values), run, color in zip(series, runs, _COLORS, strict=False):
        pairs = zip(found, values, strict=True)
        points = " ".join(place(step, loss) for step, loss in pairs if loss == loss)
        lines.append(f'<polyline points="{points}" style="stroke: {color}"/>')
        keys.append(f'<span style="color: {color}">{escape(run.name)}</span>')
    if finding.step is not None:
        x = _x(finding.step, first, last)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" style="stroke: var(--first)" '
            f'stroke-dasharray="4 3"/><text x="{x + 4:.1f}" y="10">step {finding.step}</text>'
        )
    axis = (
        f'<text x="0" y="{_HEIGHT + 16}">step {first}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{last}</text>'
    )
    box = f"0 -4 {_WIDTH} {_HEIGHT + 24}"
    drawn = (
        f'<svg viewBox="{box}" role="img" aria-label="training loss">{"".join(lines)}{axis}</svg>'
    )
    return f"<h2>Training loss of {', '.join(keys)}</h2>\n{drawn}"


def _x(step: int, first: int, last: int) -> float:
    return _WIDTH * max(0, step - first) / ((last - first) or 1)


def _modules(modules: Sequence[ModuleState]) -> str:
    rows = (
        f'<tr><th scope="row" style="padding-left: {_INDENT_EM * depth:.1f}em">'
        f"{escape(each.name.rpartition('.')[2] or 'the model itself')}</th>"
        f"{_cell(each, 'forward')}{_cell(each, 'backward')}</tr>"
        for each in modules
        for depth in [each.name.count(".") + bool(each.name)]
    )
    return f"<h2>Modules in the step</h2>\n{write_table(('module', 'forward', 'backward'), rows)}"


def _cell(module: ModuleState, phase: str) -> str:
    if module.first == phase:
        return '<td class="first">differs first</td>'
    state = module.is_equal.get(phase)
    if state is None:
        return "<td></td>"
    return "<td>equal</td>" if state else '<td class="other">differs</td>'
