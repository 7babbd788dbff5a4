"""Public names, each imported when it is first used: what needs no torch starts without it."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec, resolve_name
from typing import Any, cast


def public_name(api: str, name: str) -> Any:
    """Return what the module `api` imports as `name`. Raises AttributeError if it does not."""
    homes = modules_by_name(api)
    if name not in homes:
        raise AttributeError(f"module {api.rpartition('.')[0]!r} has no attribute {name!r}")
    home = import_module(homes[name])
    # A module is no attribute of its package before it is imported.
    return getattr(home, name) if hasattr(home, name) else import_module(f"{homes[name]}.{name}")


@cache
def modules_by_name(api: str) -> dict[str, str]:
    """Return the module of each name that `api` imports. It is read, and not run."""
    spec = find_spec(api)
    assert spec is not None
    source = cast(Any, spec.loader).get_source(api)
    return {
        alias.name: resolve_name(f"{'.' * node.level}{node.module}", spec.parent)
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
