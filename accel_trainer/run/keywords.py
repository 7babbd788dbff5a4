"""Settings as keywords in Python, and configs from values by dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from ..core.config import Config, unchecked_defaults
from ..core.errors import ConfigError
from ..names.everyday import Everyday, config_fields, flag_of, spelt_fields
from ..names.unknown import describe_unknown
from .config import RecipeConfig

C = TypeVar("C")
Settings = dict[str, Any]
"""Values by the dotted names of their settings."""


def everyday_config(settings: Everyday) -> RecipeConfig:
    """Return the config with the keywords of `start_run`. Raises ConfigError."""
    classes = Config.__subclasses__()
    known = Everyday.__annotations__
    if said := describe_unknown("start_run", settings, known, spelt_fields(classes)):
        raise ConfigError("CONFIG", said)
    given = {flag_of(name): name for name in settings}
    names = {
        given[flag]: name
        for *_, name, flags in config_fields(classes)
        for flag in given.keys() & flags
    }
    values = {names[name]: value for name, value in settings.items()}
    return build_config(RecipeConfig, values, {names[name]: f"{name}=" for name in settings})


def build_config(
    config_class: type[C],
    values: Settings,
    given: Mapping[str, str] = MappingProxyType({}),
) -> C:
    """Return the config with `values`, which have dotted names.

    Raises ConfigError, which starts with how the setting was `given`, such as `--epochs`.
    """
    try:
        return with_values(unchecked_defaults(config_class), values)
    except ConfigError as error:
        name, _, rest = error.message.partition(" ")
        if name not in given:
            raise
        raise ConfigError(error.code, f"{given[name]} {rest}") from None
    except ValueError as error:  # of a config class
        raise ConfigError("CONFIG", str(error)) from None


def with_values(config: C, values: Settings, prefix: str = "") -> C:
    """Return the config with `values`, by their dotted names behind `prefix`."""
    changes = {}
    for field in fields(config):  # type: ignore[arg-type]
        name = prefix + field.name
        default = getattr(config, field.name)
        if is_dataclass(default):
            changes[field.name] = with_values(default, values, f"{name}.")
        elif name in values:
            changes[field.name] = values[name]
    return replace(config, **changes)  # type: ignore[type-var]
