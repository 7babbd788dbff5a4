"""Callbacks from files that are no part of the recipe: `ACCEL_TRAINER_CALLBACKS=probe.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..training.callback import Callback
from .data import RunData

VARIABLE = "ACCEL_TRAINER_CALLBACKS"
START_VARIABLE = "ACCEL_TRAINER_START"
"""The variable of a start that a command has made, as JSON: see `cli.recipe.start`."""
_NO_ARGUMENTS: Mapping[str, Any] = {}


class Observer(Callback):
    """A callback of a command, which also sees what the run is built from."""

    ends_run = False
    """Whether it decides when a run of `--hours` ends."""

    def build_data(self, build: Callable[..., RunData], *sets: Any) -> RunData:
        """Return what `build` makes of the sets of a run, or watch them."""
        return build(*sets)

    def see_parts(self, parts: Mapping[str, Any]) -> None:
        """Called once with the model, the optimizer, the task and other objects by name.

        `decay` is where a trunk decays, which an observer may change; None: a different shape.
        """


def extra_callbacks() -> list[Callback]:
    """Return one of each class of callbacks that the files in the variable and the start define.

    It is a variable and no setting, so that no config of a stranger can name a program. Several
    files are separated as in PATH.

    Raises:
        ConfigError: a file is missing, or defines no class of callbacks.
    """
    files = {name: _NO_ARGUMENTS for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name}
    files |= json.loads(os.environ.get(START_VARIABLE, "{}")).get("callbacks", {})
    return [each for name in files for each in callbacks_in(name, files[name])]


def callbacks_in(name: str, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> list[Callback]:
    """Return one of each class of callbacks that a file defines, called with the `arguments`.

    The file is run. Raises ConfigError if it has none.
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
    return [make(**arguments) for make in classes]
