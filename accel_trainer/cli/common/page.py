"""The HTML pages that commands write: each is one file without scripts or links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .own_files import GENERATOR

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
{generator}
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: light-dark(#d9d9de, #3b3b42);
  --muted: light-dark(#62626b, #a2a2ad); }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: {width_rem}rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ text-align: left; font-weight: 400; padding: .15rem .5rem; border-bottom: 1px solid var(--line); }}
thead th {{ color: var(--muted); }}
{style}
</style>
<h1>{title}</h1>
{body}
</html>
"""  # noqa: E501  # a rule of CSS a line


def write_html(title: str, body: str, *, style: str, width_rem: int) -> str:
    """Return a page with the text `title`, and with the HTML `body` below it.

    `style` are rules of CSS that only this page has.
    """
    return _PAGE.format(
        generator=GENERATOR, title=escape(title), body=body, style=style, width_rem=width_rem
    )


def write_table(heads: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table; its rows, `<tr>...</tr>`, are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
