"""Plans the runs of a sweep, from flags with several values."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...run.config import RecipeConfig
from ...run.keywords import with_values
from ..common.output import tell
from ..flags.fields import fields_by_flag
from ..flags.parser import parse_config, split_at_flags


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
    config_class: type[RecipeConfig], flags: Sequence[str], *, folder: Path
) -> list[Trial]:
    """Return one run per combination of the values in `flags`.

    Raises:
        ConfigError: a flag or a value is wrong, or there is nothing to sweep.
    """
    fixed, axes = _read_flags(config_class, flags)
    if not axes:
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
    first, second = (with_values(each.config, {"run.output_dir": None}) for each in (one, other))
    return first == second


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
