"""Fills in the templates of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def fill_in(name: str, **values: Any) -> str:
    """Return the template of a file with `values`, whose letters are escaped in HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=name.endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template(name).render(values)
