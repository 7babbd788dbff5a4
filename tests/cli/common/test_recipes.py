from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_trainer.cli.common.recipes import find_config_class

RECIPE = """
from dataclasses import dataclass
from accel_trainer import RecipeConfig
from module_of_a_project import WIDTH

@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    width: int = WIDTH
"""


def test_a_recipe_may_import_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "module_of_a_project.py").write_text("WIDTH = 7")
    (tmp_path / "train.py").write_text(RECIPE)
    assert find_config_class(tmp_path / "train.py")().width == 7  # type: ignore[attr-defined]
