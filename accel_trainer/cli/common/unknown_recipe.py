"""The refusal to run the recipe of a run that may be a stranger's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ConfigError


class UnknownRecipeError(ConfigError):
    """As far as is known, this user has not started a run with the recipe that it names."""

    def __init__(self, fact: str, recipes: Sequence[Path]) -> None:
        self._fact = fact
        self._flags = [word for each in dict.fromkeys(recipes) for word in ("--recipe", str(each))]
        super().__init__("RECIPE", self._advise(self._flags))

    def with_command(self, argv: Sequence[str]) -> ConfigError:
        """Return the error with the whole command that runs the recipe, to be copied."""
        return ConfigError("RECIPE", self._advise(["accel-trainer", *argv, *self._flags]))

    def _advise(self, words: Sequence[str]) -> str:
        return f"{self._fact}: read it, and if you trust it: {shlex.join(words)}"
