"""Writes an HTML page of photos as a model sees them, without scripts or links."""

from __future__ import annotations

import base64
from html import escape
from io import BytesIO

import numpy as np
from torch import Tensor

from ...core.errors import DataError
from ...vision import EvalTransform, PhotoSplit
from ...vision.sources.photo_splits import PhotoSplits
from ..common.own_files import GENERATOR

_MAX_CLASSES = 100
_NUM_PER_CLASS = 6

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
{generator}
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; }}
div {{ display: flex; flex-wrap: wrap; gap: .5rem; }}
img {{ width: 10rem; border-radius: 4px; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""  # noqa: E501  # a rule of CSS a line


def draw_page(source: str, found: PhotoSplits, transform: EvalTransform) -> str:
    """Return the page as HTML. A photo that cannot be decoded is left out."""
    first = next(iter(found.splits.values()))
    sections = []
    for label, name in enumerate(found.class_names[:_MAX_CLASSES]):
        members = np.flatnonzero(first.labels == label)
        pictures = [_picture(first, int(index), transform) for index in members[:_NUM_PER_CLASS]]
        heading = f"<h2>{escape(name)} ({len(members):,})</h2>"
        sections.append(f"{heading}\n<div>{''.join(pictures)}</div>")
    num_more = len(found.class_names) - _MAX_CLASSES
    note = f"{num_more:,} more classes are not shown." if num_more > 0 else ""
    lead = (
        "The first photos of each class as the model sees them in evaluation: a centre crop of "
        f"{transform.crop_ratio:.1%} of the shorter side, resized to {transform.size} x "
        f"{transform.size} pixels. {note}"
    )
    body = "\n".join([f"<p>{lead}</p>", *sections])
    return _PAGE.format(generator=GENERATOR, title=escape(source), body=body)


def _picture(split: PhotoSplit, index: int, transform: EvalTransform) -> str:
    """Return a photo as an HTML image; empty if it cannot be decoded."""
    name = split.name_of(index)
    try:
        pixels = transform(split.encoded_at(index), name)
    except DataError:
        return ""
    return f'<img src="{encode_picture(pixels)}" alt="{escape(name)}" title="{escape(name)}">'


def encode_picture(pixels: Tensor) -> str:
    """Return uint8 [H, W, 3] as a data URL of a JPEG."""
    from PIL import Image

    data = BytesIO()
    Image.fromarray(pixels.numpy()).save(data, "jpeg", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
