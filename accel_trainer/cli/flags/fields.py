"""The settings of a recipe: their dotted names, types and flags.

Every field of a config class has a default. A short flag is declared with its field as
`Annotated[int, short_flag("--epochs")]`, which means tyro's `arg(aliases=["--epochs"])`.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import tyro

from ...core.config import type_name
from ...core.errors import ConfigError
from ...names.everyday import flag_of

_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "Path": "a path"}


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of a config class, at any depth: its dotted name, type, class and flags."""

    name: str
    type: Any
    owner: type
    flags: Sequence[str]

    @property
    def negations(self) -> list[str]:
        """The flags that turn a switch off, as in tyro's help: `--no-ema`, `--trainer.no-ema`."""
        flags = self.flags if self.is_switch else ()
        return [re.sub(r"([^.-][^.]*)$", r"no-\1", flag) for flag in flags]

    @property
    def is_switch(self) -> bool:
        """Whether its flag needs no value."""
        return bool in (self.type, *get_args(self.type))

    @property
    def holds_dict(self) -> bool:
        """Whether its value may be a dict."""
        return any(issubclass(kind, Mapping) for kind in self._classes)

    @property
    def holds_several(self) -> bool:
        """Whether its value may have several items, so that its flag may have several words."""
        several = (tuple, list, Set, Mapping)
        return any(issubclass(kind, several) for kind in self._classes)

    @property
    def _classes(self) -> list[type]:
        """The classes of its values, such as dict for `dict[str, int] | None`."""
        kinds = [get_origin(kind) or kind for kind in (self.type, *get_args(self.type))]
        return [kind for kind in kinds if isinstance(kind, type)]

    def convert(self, words: Sequence[str], where: str) -> Any:
        """Return the value that the words mean. Raises ConfigError, which begins with `where`."""
        is_path = Path in {self.type, *get_args(self.type)}
        if is_path and "" in words:  # an empty path is the current folder
            raise ConfigError("CONFIG", f"{where} is empty: give a path, or leave it out")
        if any("\0" in word for word in words):  # only a file can hold it, and no path
            raise ConfigError("CONFIG", f"{where} contains a NUL character: remove it")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # tyro's report has several lines
                return tyro.cli(self.type, args=["--", *words])
        except SystemExit:
            names = type_name(self.type).split(" or ")
            expected = " or ".join(_WORDS.get(name, name) for name in names)
            if percent := re.fullmatch(r"([\d.]+)%", " ".join(words)):
                expected += f", such as {float(percent[1]) / 100:g}"
            raise ConfigError(
                "CONFIG", f"{' '.join([where, *words])}: expected {expected}"
            ) from None


def config_fields(config_class: Any, prefix: str = "") -> dict[str, ConfigField]:
    """Return the fields of a config class, with those of nested config classes, by dotted name."""
    found: dict[str, ConfigField] = {}
    types = get_type_hints(config_class)
    hints = get_type_hints(config_class, include_extras=True)
    for field in fields(config_class):
        name = prefix + field.name
        kind = types[field.name]
        if field.default is field.default_factory:  # MISSING
            raise ConfigError("CONFIG", f"{name} has no default: give it one")
        if is_dataclass(kind):
            found |= config_fields(kind, f"{name}.")
        else:
            notes = getattr(hints[field.name], "__metadata__", ())
            aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
            flags = [flag_of(name), *aliases]
            found[name] = ConfigField(name, kind, config_class, flags)
    return found


def fields_by_flag(config_class: Any) -> dict[str, ConfigField]:
    """Return the fields of a config class by each flag that sets them."""
    fields = config_fields(config_class).values()
    return {flag: field for field in fields for flag in (*field.flags, *field.negations)}


def words_of(field: ConfigField, value: Any, where: str) -> list[str]:
    """Return a value of YAML as the words of a flag. Raises ConfigError for a text to be quoted."""
    if isinstance(value, dict):  # its keys and values take turns
        return [str(each) for pair in value.items() for each in pair]
    items = value if isinstance(value, list) else [value]
    types = {field.type, *get_args(field.type)}
    for item in items:
        if types & {str, Path} and type(item) not in {str, type(None), *types}:
            raise ConfigError("CONFIG", f"{where}: YAML reads {item!r}, not text: quote it")
    return [str(item) for item in items]
