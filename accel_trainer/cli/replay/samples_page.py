"""A self-contained page of the samples of a step, those of the highest loss first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .samples import Sample

_MAX_PICTURES = 256
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="generator" content="accel-trainer">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: light-dark(#d9d9de, #3b3b42);
  --muted: light-dark(#62626b, #a2a2ad); }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: 1rem; }}
figure {{ margin: 0; }} figcaption {{ font-size: 13px; color: var(--muted); }}
figcaption b {{ color: CanvasText; }}
img {{ width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ text-align: left; font-weight: 400; padding: .15rem .5rem; border-bottom: 1px solid var(--line); }}
thead th {{ color: var(--muted); }}
</style>
<h1>{title}</h1>
<pre>{text}</pre>
{samples}
</html>
"""  # noqa: E501  # a rule of CSS a line


def draw_page(title: str, text: str, samples: Sequence[Sample]) -> str:
    """Return the page as HTML, without scripts and links."""
    pictures = [sample for sample in samples if "picture" in sample][:_MAX_PICTURES]
    others = [sample for sample in samples if sample not in pictures]
    parts = [f"<h2>The {len(samples)} samples of the step, by their losses</h2>"]
    if pictures:
        parts.append(f'<div class="pictures">{"".join(map(_figure, pictures))}</div>')
    if others:
        parts.append(_table(others))
    return _PAGE.format(title=escape(title), text=escape(text), samples="\n".join(parts))


def _figure(sample: Sample) -> str:
    name, *facts = _cells(sample)
    lines = "<br>".join([f"<b>{name}</b>", *filter(None, facts)])
    source = f"data:image/png;base64,{escape(sample['picture'])}"
    return f'<figure><img src="{source}" alt="{name}"><figcaption>{lines}</figcaption></figure>'


def _table(samples: Sequence[Sample]) -> str:
    heads = ("sample", "loss", "target", "values", "shape")
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = [
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in _cells(sample)) + "</tr>"
        for sample in samples
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


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
