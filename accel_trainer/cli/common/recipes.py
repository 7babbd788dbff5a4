"""Finds the config class of a recipe file, for commands that read a recipe's flags."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from accelerate.utils import patch_environment

from ...core.errors import ConfigError, UserError
from ...run.config import RecipeConfig
from ...run.folder import MOVED_FOLDERS
from ..flags.fields import config_fields


def find_config_class(path: Path) -> type[RecipeConfig]:
    """Import a recipe and return its config class: `RecipeConfig` or its most derived subclass.

    As when it is run, it may import the modules beside it.

    Raises:
        ConfigError: `path` is no Python file, cannot be imported, or has no usable config class.
    """
    name = f"planned_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        fact = "is not a recipe" if path.exists() else "does not exist"
        raise ConfigError("RECIPE", f"{path} {fact}: give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their types there
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    try:
        with patch_environment(**{MOVED_FOLDERS: "{}"}):  # refuses a run without flags
            spec.loader.exec_module(module)
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, RecipeConfig)
        ]
        for found in classes:
            config_fields(found)  # its types may not exist
    except UserError:
        raise
    except SystemExit:
        raise ConfigError(
            "RECIPE",
            f'{path} ends when it is imported: call main below `if __name__ == "__main__":`',
        ) from None
    except Exception as error:
        raise ConfigError(
            "RECIPE",
            f"{path} cannot be imported ({type(error).__name__}: {error}): run it to see where",
        ) from error
    if not classes:
        raise ConfigError(
            "RECIPE", f"{path} has no RecipeConfig: give a file like recipes/cifar.py"
        )
    return max(classes, key=lambda found: len(found.__mro__))
