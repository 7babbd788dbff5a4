"""A recipe that lists which attributes of this package's modules and classes a command replaces.

Each process that trains adds a JSON file to the folder in the variable UNPATCHED.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accel_trainer
from accel_trainer import RecipeConfig, RunResult, main
from tests.lab.replay import poisoned

PACKAGE = accel_trainer.__name__


def attributes() -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the imported modules of the package, and of their classes."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != PACKAGE:
            continue
        for key, value in [*vars(module).items()]:
            yield f"{name}.{key}", value
            if isinstance(value, type) and value.__module__ == name:
                for part, inner in [*vars(value).items()]:
                    yield f"{name}.{key}.{part}", inner


for module in pkgutil.walk_packages(accel_trainer.__path__, f"{PACKAGE}."):
    if not module.name.startswith(
        (f"{PACKAGE}.cli", f"{PACKAGE}.lab", f"{PACKAGE}.vision", f"{PACKAGE}.__main__")
    ):
        importlib.import_module(module.name)
BEFORE = dict(attributes())


def train(config: RecipeConfig) -> RunResult:
    """Train as `poisoned.py` does, and write the names of what is not what it was."""
    try:
        return poisoned.train(config)
    finally:
        after = dict(attributes())
        names = [name for name in BEFORE if after.get(name) is not BEFORE[name]]
        with tempfile.NamedTemporaryFile(
            "w", dir=Path(os.environ["UNPATCHED"]), suffix=".json", delete=False
        ) as file:
            json.dump(names, file)


if __name__ == "__main__":
    main(train, RecipeConfig)
