"""Plans the runs of a sweep, from flags with several values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_origin

from ...core.errors import ConfigError
from ...run.config import RecipeConfig
from ...run.parser import config_fields, parse_config


@dataclass(frozen=True)
class Trial:
    """A run of the sweep. `choices` are the values of the swept flags, by their names."""

    choices: Mapping[str, str]
    folder: Path
    flags: Sequence[str]
    config: RecipeConfig


def plan_trials(config_class: type[RecipeConfig], flags: Sequence[str], *, folder: Path) -> list[Trial]:
    """Return one run per combination of the values in `flags`.

    Raises:
        ConfigError: a flag or a value is wrong, or there is nothing to sweep.
    """
    fields = {flag: field for field in config_fields(config_class).values() for flag in field.flags}
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for flag, *values in _groups(flags):
        field = fields.get(flag.replace("_", "-"))
        if field is None or len(values) < 2 or get_origin(field.type) is tuple:
            fixed += [flag, *values]
        else:
            swept[flag] = values
    if not swept:
        parse_config(config_class, fixed, description="")  # reports a misspelt flag first
        raise ConfigError("SWEEP", "nothing to sweep: give a flag several values, such as --seed 0 1 2")
    trials = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        choices = {flag.lstrip("-"): value for flag, value in chosen.items()}
        place = folder / re.sub(r"[^\w.+-]", "-", "_".join(f"{name}-{value}" for name, value in choices.items()))
        mine = [*fixed, *itertools.chain(*chosen.items()), "--output-dir", str(place)]
        trials.append(Trial(choices, place, mine, parse_config(config_class, mine, description="")))
    return trials


def _groups(flags: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in flags:
        if re.match(r"--?[a-zA-Z]", word) and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group
