"""What the parser of a command takes from the command's docstring."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.cli.common.parser import CommandParser
from accel_trainer.core.errors import ConfigError

OF_A_RECIPE = """`accel-trainer lr-find RECIPE.py [its flags]`: run a range test.

It takes a minute.

example: accel-trainer lr-find recipes/cifar.py
"""


def test_a_docstring_is_usage_description_and_example() -> None:
    shown = CommandParser(OF_A_RECIPE).format_help()
    assert shown.startswith("usage: accel-trainer lr-find RECIPE.py [-h]\n")
    assert "It takes a minute." in shown
    assert shown.endswith("\n\nexample: accel-trainer lr-find recipes/cifar.py\n")
    assert shown.count("example:") == 1


@pytest.mark.parametrize("name", ["--step", "--steps"])
def test_flags_of_a_recipe_are_taken_for_no_abbreviations(name: str) -> None:
    parser = CommandParser(OF_A_RECIPE)
    parser.add_number("--steps-of-the-test", "of the test")
    options, recipe, flags = parser.require_recipe(["train.py", name, "3"])
    assert (options.steps_of_the_test, recipe, flags) == (None, Path("train.py"), [name, "3"])


def test_a_missing_recipe_is_one_line_with_the_example() -> None:
    with pytest.raises(
        ConfigError, match="recipe comes first; example: accel-trainer lr-f"
    ) as told:
        CommandParser(OF_A_RECIPE).require_recipe(["--lr", "1"])
    assert told.value.code == "LR_FIND"
