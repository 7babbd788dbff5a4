"""The everyday flags of a recipe on one screen."""

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

from ...core.config import config_values, unchecked_defaults
from .fields import config_fields

_MAX_COLUMNS = 120
_INDENT = 31
_EMPTY_DEFAULTS = ("None", "False", "[]")  # not worth printing
_MAX_LINES = {"model.name": 3}  # its text is a list of names; any other text has one line


def short_help(config_class: Any, *, description: str) -> str:
    """Return the flags with a short name, with defaults and texts; the recipe's own are first."""
    columns = min(shutil.get_terminal_size((_MAX_COLUMNS, 0)).columns, _MAX_COLUMNS)
    lines = [description.strip(), "The everyday flags, which override --config FILE (YAML):"]
    defaults = config_values(unchecked_defaults(config_class))
    own = inspect.get_annotations(config_class)
    known = config_fields(config_class)
    for name in sorted(known, key=lambda name: name.partition(".")[0] not in own):
        flags = known[name].flags
        if len(flags) > 1 or "." not in name:
            default = str(defaults[name])
            typed = f"  {flags[-1]} {'' if default in _EMPTY_DEFAULTS else default}"
            text = _first_sentences(known[name].owner).get(name.rpartition(".")[2], "")
            lines += textwrap.wrap(
                f"{typed:<{_INDENT - 2}}  {text}",
                columns,
                subsequent_indent=" " * _INDENT,
                max_lines=_MAX_LINES.get(name, 1),
                placeholder=" ...",
            )
    return "\n".join([*lines, "--help-all lists every setting, its choices and its nested name."])


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
