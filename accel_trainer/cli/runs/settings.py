"""Compares settings of runs, by their dotted names, with the defaults and with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.config import config_to_dict, diff_config
from ...optim.config import OptimizerConfig
from ...run.config import RecipeConfig, with_defaults
from ...vision import AugmentConfig, BadImageConfig, ImageClassificationConfig, ModelConfig
from .changes import settings_that_differ
from .run_reader import RunReader, Runs

# Settings of folders and checkpoints, which a comparison leaves out. The engine's MUTABLE_ON_RESUME
# is longer: a reader wants to see how batches were split and how many steps were allowed.
_NOT_COMPARED = ("run.", "checkpoint.")


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by their dotted names."""
    return {name: value for name, _, value in diff_config({}, values)}


def changed_settings(run: RunReader) -> list[tuple[str, Any, Any]]:
    """Return name, default and value of each setting that differs from its default."""
    parts = {
        "model": ModelConfig(),
        "augment": AugmentConfig(),
        "task": ImageClassificationConfig(),
        "bad_images": BadImageConfig(),
    }
    optimizer = OptimizerConfig(
        name=run.config.get("optimizer", {}).get("name", OptimizerConfig.name)
    )
    default = with_defaults(RecipeConfig(optimizer=optimizer))
    defaults = config_to_dict(default) | {
        name: config_to_dict(part) for name, part in parts.items()
    }
    defaults["optimizer"]["name"] = OptimizerConfig.name
    own = flatten(run.config)
    return [
        (name, default_value, value)
        for name, default_value, value in diff_config(defaults, run.config)
        if name in own and _is_compared(name)
    ]


def differing_settings(runs: Runs) -> list[dict[str, Any]]:
    """Return name and values of the settings that differ between runs."""
    rows = settings_that_differ(runs)
    return [{"name": name, "values": values} for name, values in rows if _is_compared(name)]


def _is_compared(name: str) -> bool:
    return not name.startswith(_NOT_COMPARED)
