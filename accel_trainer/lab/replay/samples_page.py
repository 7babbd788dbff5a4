"""A self-contained page of the samples of a step, those of the highest loss first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from accel_trainer.commands import counted, write_html, write_table

from .samples import Sample

_MAX_PICTURES = 256
_STYLE = """
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: 13px; color: var(--muted); }
figcaption b { color: CanvasText; }
img { width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
"""


def draw_page(title: str, text: str, samples: Sequence[Sample]) -> str:
    """Return the page as HTML, without scripts and links."""
    pictures = [sample for sample in samples if "picture" in sample][:_MAX_PICTURES]
    others = [sample for sample in samples if sample not in pictures]
    heading = f"<h2>The {counted(len(samples), 'sample')} of the step, by loss</h2>"
    parts = [f"<pre>{escape(text)}</pre>", heading]
    if pictures:
        parts.append(f'<div class="pictures">{"".join(map(_figure, pictures))}</div>')
    if others:
        parts.append(_table(others))
    return write_html(title, "\n".join(parts), style=_STYLE, width_rem=60)


def _figure(sample: Sample) -> str:
    name, *facts = _cells(sample)
    lines = "<br>".join([f"<b>{name}</b>", *filter(None, facts)])
    source = f"data:image/png;base64,{escape(sample['picture'])}"
    return f'<figure><img src="{source}" alt="{name}"><figcaption>{lines}</figcaption></figure>'


def _table(samples: Sequence[Sample]) -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in _cells(sample)) for sample in samples)
    heads = ("sample", "loss", "target", "values", "shape")
    return write_table(heads, (f"<tr>{row}</tr>" for row in cells))


def _cells(sample: Sample) -> list[str]:
    """Return its number, loss, target, values and shape as texts; empty: it has none."""
    loss, target = sample.get("loss"), sample.get("target")
    values = ""
    if "low" in sample:
        values = f"{sample['low']:.4g} to {sample['high']:.4g}"
    shape = f"{sample['dtype']} {sample['shape']}" if "shape" in sample else ""
    cells = [
        f"sample {sample['id']}",
        "" if loss is None else f"loss {float(loss):.4g}",
        "" if target is None else f"target {target}",
        values,
        shape,
    ]
    return [escape(cell) for cell in cells]
