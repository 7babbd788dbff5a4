"""Shows `Annotated[int, short_flag("--epochs")]` in the reference as `int`, and names the flag."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class PlainAnnotations(griffe.Extension):
    """Replaces the annotations of attributes; parameters of dataclasses follow from them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the type from an `Annotated`, and append the flag to the docstring."""
        annotation = attr.annotation
        if not isinstance(annotation, griffe.ExprSubscript) or str(annotation.left) != "Annotated":
            return
        kind, note = annotation.slice.elements
        attr.annotation = kind
        if attr.docstring and str(note).startswith("short_flag("):
            flag = ast.literal_eval(str(note).removeprefix("short_flag"))
            attr.docstring.value += f"\n\nShort flag: `{flag}`."
