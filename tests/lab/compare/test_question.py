"""Where the arms of a comparison part."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import ModuleType

import pytest

from accel_trainer import ConfigError
from accel_trainer.lab.compare.question import At, Question


def test_arms_part_at_the_end_of_an_epoch_within_the_run() -> None:
    steps = {
        ("75%", 80, 10): 60,
        ("75%", 100, 10): 80,  # 75 is as near to 70
        ("1%", 80, 10): 10,
        ("99%", 80, 10): 70,
        ("0%", 80, 10): 0,
        ("0", 80, 10): 0,
        ("33", 80, 10): 30,
        ("75%", 25, 10): 20,
        ("75%", 10, 10): 8,  # no epoch ends within the run
        ("75%", 1, 10): 0,
    }
    for (text, num_steps, per_epoch), step in steps.items():
        found = At.parse(text).step(num_steps=num_steps, steps_per_epoch=per_epoch)
        assert found == step, text


@pytest.mark.parametrize("text", ["100%", "-1", "-5%", "0.75", "most", "%", "nan%"])
def test_a_place_outside_of_the_run_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"it is {text}: "):
        At.parse(text)


def test_flags_of_b_with_an_open_quote_are_one_line() -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "minimal.py"
    with pytest.raises(ConfigError, match="No closing quotation"):
        Question.parse(recipe, [], "--lr '0.1", num_processes=1)


def test_a_step_after_the_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="--at 80 is beyond"):
        At.parse("80").step(num_steps=80, steps_per_epoch=10)


def test_packages_beside_a_recipe_do_not_decide_which_runs_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_bytes((Path(__file__).parents[3] / "recipes" / "minimal.py").read_bytes())
    question = Question.parse(recipe, [], "--lr 0.5", num_processes=1)
    before = question.files()
    for name in (".venv/lib/site-packages/a_package.py", "a_module.py"):
        module = ModuleType(Path(name).stem)
        module.__file__ = str(tmp_path / name)
        Path(module.__file__).parent.mkdir(parents=True, exist_ok=True)
        Path(module.__file__).write_text(f"# {name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert (question.files() == before) == ("site-packages" in name)
