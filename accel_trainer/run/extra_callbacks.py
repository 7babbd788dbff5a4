"""Callbacks from a file that is no part of the recipe: `ACCEL_TRAINER_CALLBACKS=probe.py`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from ..core.callback import Callback
from ..core.errors import ConfigError

VARIABLE = "ACCEL_TRAINER_CALLBACKS"


def extra_callbacks() -> list[Callback]:
    """Return one of each class of callbacks that the files in the variable define.

    It is a variable and no setting, so that no config of a stranger can name a program. Several
    files are separated as in PATH.

    Raises:
        ConfigError: a file is missing, or defines no class of callbacks.
    """
    named = os.environ.get(VARIABLE, "")
    return [each for name in named.split(os.pathsep) if name for each in callbacks_in(name)]


def callbacks_in(name: str) -> list[Callback]:
    """Return one of each class of callbacks that a file defines. Raises ConfigError if it has none.

    The file is run.
    """
    path = Path(name).resolve()
    spec = importlib.util.spec_from_file_location(f"callbacks_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("CALLBACKS", f"{VARIABLE} names {name}: give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Callback)
        and value.__module__ == module.__name__
    ]
    if not classes:
        raise ConfigError("CALLBACKS", f"{name} defines no subclass of Callback: define one")
    return [make() for make in classes]
