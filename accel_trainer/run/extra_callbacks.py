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
    """Return one of each class of callbacks that the file in the variable defines.

    It is a variable and no setting, so that no config of a stranger can name a program.

    Raises:
        ConfigError: the file is missing, or defines no class of callbacks.
    """
    if not (named := os.environ.get(VARIABLE)):
        return []
    path = Path(named).resolve()
    spec = importlib.util.spec_from_file_location(f"callbacks_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("CALLBACKS", f"{VARIABLE} is {named}: give the path of a Python file")
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
        raise ConfigError("CALLBACKS", f"{named} defines no subclass of Callback: define one")
    return [make() for make in classes]
