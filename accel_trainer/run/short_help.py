"""The everyday flags of a recipe on one screen."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shutil
import textwrap
from dataclasses import is_dataclass
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from ..core.config import config_to_dict, flatten_config
from .parser import config_fields

_MAX_COLUMNS, _ROOMY, _MAX_DEFAULT = 120, 80, 20
_WHOLE = ("model.name",)  # the settings whose text is a list of names


def short_help(config_class: Any, *, description: str) -> str:
    """Return a line for each setting that has a short flag, the recipe's own first: the default and what it does."""
    defaults, texts = dict(flatten_config(config_to_dict(config_class()))), _texts(config_class)
    everyday = {
        name: field.flags[-1]
        for name, field in config_fields(config_class).items()
        if len(field.flags) > 1 or "." not in name
    }
    own = set(vars(config_class)["__annotations__"])
    columns = min(_MAX_COLUMNS, shutil.get_terminal_size((_MAX_COLUMNS, 0)).columns)
    width = max(map(len, everyday.values())) + 2
    lines = []
    for name in sorted(everyday, key=lambda name: name.partition(".")[0] not in own):
        default = str(defaults[name])
        shown = f" [{default}]" if len(default) <= _MAX_DEFAULT and default not in ("None", "[]", "False") else ""
        room = max(columns - 2 - width - len(shown), 10)
        max_lines = None if name in _WHOLE and columns >= _ROOMY else 1
        text = textwrap.wrap(texts[name], room, max_lines=max_lines, placeholder=" ...")
        lines.append(f"  {everyday[name]:<{width}}" + f"\n{'':{width + 2}}".join(text) + shown)
    above = textwrap.wrap("Flags override --config FILE (YAML). The everyday flags, with their defaults:", columns)
    below = textwrap.wrap("--help-all lists every setting, with its choices and its nested name.", columns)
    return "\n".join([*textwrap.wrap(description.strip(), columns), "", *above, *lines, *below])


def _texts(config_class: Any, prefix: str = "") -> dict[str, str]:
    """Return the first sentence below each field of a config class, and of the config classes in it."""
    texts: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if is_dataclass(base):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(cast(type, base)))).body
            assert isinstance(body, ast.ClassDef)
            for field, text in itertools.pairwise(body.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    sentence = re.split(r"(?<=[.;])\s", " ".join(ast.literal_eval(text.value).split()))[0]
                    texts[prefix + ast.unparse(field.target)] = sentence.rstrip(".;")
    for name, hint in get_type_hints(config_class, include_extras=True).items():
        inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if is_dataclass(inner):
            texts |= _texts(inner, f"{prefix}{name}.")
    return texts
