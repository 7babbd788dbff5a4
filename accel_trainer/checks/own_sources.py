"""The user's own code: a run that continues with other code says so.

It is no error: somebody may have corrected a mistake, and want to go on.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from ..core.errors import listed
from ..core.filesystem import sha256_of
from ..core.json_files import read_json_object
from .unsaved_state import is_of_users_file


def own_sources() -> dict[str, str]:
    """Return the SHA-256 of the recipe and of all that it has imported but libraries, by path.

    In a notebook they are those of its classes and functions.
    """
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):
        return dict(_of_cells(vars(main)))
    recipe = os.path.realpath(sys.argv[0])
    files = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    found = {}
    for file in {recipe, *files}:
        if file.endswith(".py") and is_of_users_file(file):
            # Late: for all libraries it takes a tenth of a second.
            name = os.path.relpath(os.path.realpath(file), os.path.dirname(recipe))
            with suppress(OSError):
                found[name] = sha256_of(Path(file))
    return dict(sorted(found.items()))


def _of_cells(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in [*names.items()]:
        if getattr(value, "__module__", None) != "__main__":
            continue
        # Before Python 3.13, inspect finds the source of functions alone.
        parts = [*vars(value).values()] if isinstance(value, type) else [value]
        with suppress(OSError, TypeError):
            texts = [inspect.getsource(part) for part in parts if isinstance(part, FunctionType)]
            yield name, hashlib.sha256("".join(texts).encode()).hexdigest()


def describe_edits(folder: Path, sources: Mapping[str, str]) -> str | None:
    """Return a line that names what was edited since the last start of a run; None if nothing."""
    try:
        before = dict(read_json_object(folder / "environment.json")["sources"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # What is imported may depend on where a run begins.
    edited = [name for name, digest in sources.items() if before.get(name, digest) != digest]
    if not edited:
        return None
    return f"note: edited since the last start of this run: {listed(edited)}"
