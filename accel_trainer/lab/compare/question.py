"""What is compared: a recipe with some flags, and the same with more of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_trainer import ConfigError, RecipeConfig, parse_config
from accel_trainer.commands import config_values, filesystem, find_config_class

# What a seed shares between the arms: an arm with other samples in its steps is no pair.
_SAME_IN_BOTH = (
    "seed",
    "dataset",
    "batch.global_batch_size",
    "batch.order",
    "batch.drop_last",
    "trainer.monitor",
    "trainer.monitor_mode",
)
_INITIAL = ("run.init_from", "run.init_skip")
_ACTS_AT_THE_START = (*_INITIAL, "model.pretrained")
"""Settings of the initial weights: a branch has those of its checkpoint."""
_DECIDES_NOTHING = ("run.", "checkpoint.", "trainer.max_time_s", "cache_dir")


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: the flags of its runs, and the config that they ask for."""

    flags: Sequence[str]
    config: RecipeConfig

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the result, by dotted name; the seed is no part of an arm."""
        return {
            name: value
            for name, value in config_values(self.config).items()
            if name in _INITIAL or not name.startswith((*_DECIDES_NOTHING, "seed"))
        }

    @property
    def key(self) -> str:
        """A hash of the settings."""
        return key_of(self.settings)


@dataclass(frozen=True)
class At:
    """Where the arms part: after a fraction of the run, or after a step."""

    text: str
    number: float

    @classmethod
    def parse(cls, text: str) -> At:
        """Return what `75%` or `6000` means. Raises argparse's error for other texts."""
        is_fraction = text.endswith("%")
        try:
            number = float(text[:-1]) / 100 if is_fraction else float(int(text))
        except ValueError:
            number = -1
        if not 0 <= number < (1 if is_fraction else math.inf):
            fix = "give a part of the run such as 75%, a step, or 0 for whole runs"
            raise argparse.ArgumentTypeError(f"it is {text}: {fix}")
        return cls(text, number)

    def step(self, *, num_steps: int, steps_per_epoch: int) -> int:
        """Return the end of the nearest epoch within the run; 0: the arms share nothing.

        Within a run of one epoch, it is the step itself.

        Raises ConfigError if the run ends before.
        """
        wanted = self.number * num_steps if self.text.endswith("%") else self.number
        if wanted >= num_steps:
            fact = f"--at {self.text} is beyond the last step of the run, {num_steps}"
            raise ConfigError("COMPARE", f"{fact}: give an earlier one")
        if wanted == 0:
            return 0
        last = (num_steps - 1) // steps_per_epoch
        if last == 0:
            return min(max(1, round(wanted)), num_steps - 1)
        return min(max(1, round(wanted / steps_per_epoch)), last) * steps_per_epoch


@dataclass(frozen=True)
class Question:
    """Two arms of a recipe."""

    recipe: Path
    num_processes: int
    a: Arm
    b: Arm
    b_flags: str

    @classmethod
    def parse(
        cls, recipe: Path, flags: Sequence[str], b_flags: str, *, num_processes: int
    ) -> Question:
        """Return the question that a command line asks.

        Raises ConfigError for flags that cannot be compared.
        """
        config_class = find_config_class(recipe)

        def arm(more: Sequence[str]) -> Arm:
            config = parse_config(config_class, [*flags, *more], description="")
            return Arm([*flags, *more], config)

        a = arm([])
        run = a.config.run
        if run.resume != "auto" or run.dry_run:
            flag = "--dry-run" if run.dry_run else f"--resume {run.resume}"
            raise ConfigError("COMPARE", f"compare starts the runs itself: leave out {flag}")
        found = cls(recipe, num_processes, a, arm(_words_of(b_flags)), b_flags)
        found._check()
        return found

    def _check(self) -> None:
        before, after = (config_values(arm.config) for arm in (self.a, self.b))
        for name in _SAME_IN_BOTH:
            if before.get(name) != after.get(name):
                fact = f"--b changes {name}, which must be the same in both arms of a pair"
                raise ConfigError("COMPARE", f"{fact}: give it to both, before --b")
        if not self.changed:
            fact = f"--b {shlex.quote(self.b_flags)} changes no setting that affects the training"
            raise ConfigError("COMPARE", f"{fact}: give the flags that make B different")

    @property
    def seed(self) -> int:
        """The seed of the first pair."""
        return self.a.config.seed

    @property
    def changed(self) -> list[str]:
        """The settings in which the flags of the arms differ."""
        before, after = self.a.settings, self.b.settings
        return [name for name in before | after if before.get(name) != after.get(name)]

    @property
    def acts_at_the_start(self) -> list[str]:
        """Those of them that decide the initial weights, and nothing later."""
        return [name for name in self.changed if name in _ACTS_AT_THE_START]

    @property
    def may_change(self) -> list[str]:
        """The settings that an arm may change when it branches off."""
        return [name for name in self.a.settings if name not in (*_SAME_IN_BOTH, *_INITIAL)]

    def files(self) -> list[str]:
        """Return hashes of the files that decide the runs.

        They are the recipe, the modules in its folder that it has imported, and initial weights.
        Not the packages of an environment there: which of them are imported varies.
        """
        modules = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        beside = {Path(file) for file in modules if file and "-packages" not in file}
        paths = [path for path in beside if path.is_relative_to(self.recipe.parent)]
        weights = self.a.config.run.init_from
        if weights is not None and weights.is_file():
            paths.append(weights)
        return sorted(filesystem.sha256_of(path) for path in {self.recipe, *paths})


def _words_of(b_flags: str) -> list[str]:
    try:
        return shlex.split(b_flags)
    except ValueError as error:
        fact = f"--b {b_flags!r} cannot be split into words ({error})"
        raise ConfigError("COMPARE", f"{fact}: correct its quotes") from None


def key_of(value: Any) -> str:
    """Return a short hash of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
