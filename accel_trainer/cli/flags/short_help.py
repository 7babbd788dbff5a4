"""The everyday flags of a recipe, in four groups."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import shutil
import textwrap
from dataclasses import is_dataclass
from typing import Any

from ...callbacks.console import wrap_lines
from ...core.config import config_values, unchecked_defaults
from .fields import config_fields

_MAX_COLUMNS = 120
_INDENT = 31
_EMPTY_DEFAULTS = ("None", "False", "[]")  # not worth printing
_GROUPS = {
    "Batches": ("seed", "batch"),
    "Training": ("trainer", "optimizer", "schedule"),
    "Machine and files": ("checkpoint", "runtime", "run"),
}


def short_help(config_class: Any, *, description: str) -> str:
    """Return the flags with a short name, with texts and defaults; the recipe's own are first."""
    columns = min(shutil.get_terminal_size((_MAX_COLUMNS, 0)).columns, _MAX_COLUMNS)
    defaults = config_values(unchecked_defaults(config_class))
    groups: dict[str, list[str]] = {"This recipe": [], **{title: [] for title in _GROUPS}}
    for name, field in config_fields(config_class).items():
        if len(field.flags) == 1 and "." in name:
            continue
        root = name.partition(".")[0]
        title = next((key for key, roots in _GROUPS.items() if root in roots), "This recipe")
        text = _first_sentences(field.owner).get(name.rpartition(".")[2], "")
        if (default := str(defaults[name])) not in _EMPTY_DEFAULTS:
            text += f" (default: {default})"
        groups[title] += textwrap.wrap(
            f"{f'  {field.flags[-1]}':<{_INDENT - 2}}  {text.strip()}",
            columns,
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
        )
    lines = [description.strip(), "The everyday flags, which override --config FILE (YAML):"]
    for title, rows in groups.items():
        if rows:
            lines += ["", title, *rows]
    lines += ["", "--help-all lists every setting, its choices and its nested name."]
    return wrap_lines("\n".join(lines), columns)


@functools.cache
def _first_sentences(config_class: type) -> dict[str, str]:
    """Return the first sentence below each field of a config class."""
    found = {}
    for base in filter(is_dataclass, reversed(config_class.__mro__)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, text in itertools.pairwise(ast.iter_child_nodes(body)):
            match field, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    found[name] = re.split(r"[.;](?:\s|$)", " ".join(words.split()))[0]
    return found
