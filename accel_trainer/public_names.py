"""Public names, each imported when it is first used: what needs no torch starts without it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec, resolve_name
from typing import Any, NoReturn, cast

from .removed import refuse_removed


def public_name(api: str, name: str) -> Any:
    """Return what the module `api` imports as `name`.

    Raises AttributeError or, for `from package import name`, ImportError if it does not.
    """
    homes = modules_by_name(api)
    if name not in homes:
        refuse_unknown(api.rpartition(".")[0], name, homes)
    home = import_module(homes[name])
    # A module is no attribute of its package before it is imported.
    return getattr(home, name) if hasattr(home, name) else import_module(f"{homes[name]}.{name}")


def refuse_unknown(package: str, name: str, known: Collection[str]) -> NoReturn:
    """Raise an error with the public names of `package` that `name` may stand for.

    For the `__getattr__` of a package, or for what that calls. It is an AttributeError, so that
    `hasattr` works. `from package import name` would replace its message, and gets an ImportError,
    as does a name that is gone.
    """
    refuse_removed(f"{package}.{name}")
    lower = {each.lower(): each for each in known}
    near = [lower[each] for each in get_close_matches(name.lower(), lower)]
    hint = _called_elsewhere(name) or f"did you mean {' or '.join(near)}? " * bool(near)
    fact = f"{package} has no public name {name}: {hint}{package}.__all__ lists them all"
    frame: Any = sys._getframe()
    while frame.f_globals.get("__name__") in (__name__, package):
        frame = frame.f_back
    is_from_import = frame.f_globals.get("__name__") == "importlib._bootstrap"
    if is_from_import and find_spec(f"{package}.{name}") is None:  # it imports modules as well
        raise ImportError(fact, name=package)
    raise AttributeError(fact)


def _called_elsewhere(name: str) -> str:
    """Return what a class of another toolkit is here, such as `EarlyStopping`; empty if none."""
    from .names import everyday, unknown

    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
    rows = [ours for ours, names in unknown.familiar_names().items() if words in names.split()]
    return f"instead: {everyday.in_python(rows[0])}. " if "-" in words and rows else ""


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
