"""Plans the runs of a sweep, from flags and a file with several values for some settings."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.config import flatten_config
from ...core.errors import ConfigError
from ...core.filesystem import read_file
from ...core.yaml_files import MAX_BYTES, read_yaml
from ...run.config import RecipeConfig
from ..common.output import tell
from ..flags.fields import ConfigField, config_fields, fields_by_flag, words_of
from ..flags.parser import FLAG, parse_config, split_at_flags
from ..flags.typed_words import refuse_misread_words


@dataclass(frozen=True)
class Choice:
    """One value of a swept setting: its name, its value, and the flags that set it."""

    name: str
    value: str
    flags: Sequence[str]


@dataclass(frozen=True)
class Trial:
    """A run of the sweep."""

    choices: Sequence[Choice]
    folder: Path
    flags: Sequence[str]
    config: RecipeConfig


def plan_trials(
    config_class: type[RecipeConfig], flags: Sequence[str], *, values: Path | None, folder: Path
) -> list[Trial]:
    """Return one run per combination of the values in `flags` and in the file `values`.

    Raises:
        ConfigError: a flag, a value or the file is wrong, or there is nothing to sweep.
    """
    fixed, axes = _read_flags(config_class, flags)
    if values is not None:
        more_fixed, more_axes = _read_values(config_class, values)
        fixed = [*more_fixed, *fixed]
        axes = [*more_axes, *axes]
    if not axes or not all(axes):
        parse_config(config_class, fixed, description="")  # reports a misspelt flag first
        raise ConfigError(
            "SWEEP", "nothing to sweep: give a flag several values, such as --seed 0 1 2"
        )
    trials: list[Trial] = []
    for choices in itertools.product(*axes):
        name = "_".join(f"{choice.name}-{choice.value}" for choice in choices)
        run_folder = folder / re.sub(r"[^\w.+-]", "-", name)
        if any(trial.folder == run_folder for trial in trials):
            raise ConfigError(
                "SWEEP",
                f"two runs would be {run_folder.name}: give each value once, by a plain name",
            )
        chosen = itertools.chain.from_iterable(choice.flags for choice in choices)
        run_flags = [*fixed, *chosen, "--output-dir", str(run_folder)]
        config = parse_config(config_class, run_flags, description="")
        trial = Trial(choices, run_folder, run_flags, config)
        if equal := next((other for other in trials if _has_same_settings(trial, other)), None):
            note = (
                f"{run_folder.name} has the same settings as {equal.folder.name}, and is left out"
            )
            tell(f"note: {note}", file=sys.stderr)
        else:
            trials.append(trial)
    return trials


def _has_same_settings(one: Trial, other: Trial) -> bool:
    """Whether two runs differ only in their folder, such as with `--lr 0.1` and `--lr 0.10`."""
    runs = [replace(each.config.run, output_dir=None) for each in (one, other)]
    return replace(one.config, run=runs[0]) == replace(other.config, run=runs[1])


def _read_flags(config_class: Any, flags: Sequence[str]) -> tuple[list[str], list[list[Choice]]]:
    """Return the flags that all runs share, and the choices of each flag with several values."""
    by_flag = fields_by_flag(config_class)
    fixed: list[str] = []
    axes = []
    for group in split_at_flags(flags):
        flag, *values = group
        field = by_flag.get(flag.replace("_", "-"))
        if field is None or len(values) < 2 or field.holds_several:
            fixed += group
        else:
            axes.append([Choice(flag.lstrip("-"), value, [flag, value]) for value in values])
    return fixed, axes


def _read_values(config_class: Any, path: Path) -> tuple[list[str], list[list[Choice]]]:
    """Split the values of a file as `_read_flags` splits flags; each item of a list is a choice."""
    try:
        place = Path(os.path.realpath(path))
        content = read_yaml(place)
        text = read_file(place, max_bytes=MAX_BYTES).decode()
        refuse_misread_words(text, source=f"--values {path}")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            "SWEEP",
            f"--values {path} cannot be read as a mapping of names to lists of values: {error}",
        ) from None
    fields = config_fields(config_class)
    fixed: list[str] = []
    axes = []
    for key, value in flatten_config(content):
        field = fields.get(key.replace("-", "_"))
        if field is None:
            raise ConfigError(
                "SWEEP", f"--values {path}: {key} is not a value of this recipe, see its --help"
            )
        if isinstance(value, list) and not _is_one_value(field, value):
            where = f"{path}: {key}"
            axes.append([Choice(key, str(v), _as_flags(field, v, where)) for v in value])
        else:
            fixed += _as_flags(field, value, f"{path}: {key}")
    return fixed, axes


def _is_one_value(field: ConfigField, value: list[Any]) -> bool:
    """Whether a list is a single value of such a field, rather than a list of values."""
    return field.holds_several and not any(isinstance(item, list) for item in value)


def _as_flags(field: ConfigField, value: Any, where: str) -> list[str]:
    """Return a value of the file as arguments of a command."""
    words = words_of(field, value, where)
    if field.type is bool and isinstance(value, bool):
        return [(field.flags if value else field.negations)[0]]
    if not isinstance(value, list):
        return [f"{field.flags[0]}={words[0]}"]
    for word in words:
        if FLAG.match(word):
            raise ConfigError("SWEEP", f"{where}: {word} looks like a flag")
    return [field.flags[0], *words]
