"""What the commands show on terminals of any width, and in files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.cli.common import output
from tests import terminal
from tests.variants import slow

ROOT = Path(__file__).parents[2]


def door(*words: object) -> str:
    """Return Python that runs a command."""
    return (
        "import sys; from accel_trainer.cli.main import main; "
        f"sys.exit(main({[str(word) for word in words]}))"
    )


@pytest.fixture(scope="module")
def commands(runs: Path) -> list[str]:
    short = runs.parent / "short"  # a path that is longer than a line may stand out
    if not short.exists():
        shutil.copytree(runs, short)
    plan = ["plan", "recipes/cifar.py", "--config", "recipes/configs/digits.yaml", "--seconds", "0"]
    everything = [
        ["runs", short],
        ["inspect", short / "fast"],
        plan,
    ]
    return [door(*words) for words in [*everything, ["status", short / "fast"], ["doctor"]]]


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("columns", [40, *slow([60, 80, 120])])
def test_the_lines_of_commands_fit_the_terminal(commands: list[str], columns: int) -> None:
    for command in commands:
        text = terminal.run_python(command, columns=columns)
        assert text.strip()
        assert terminal.too_long(text, columns) == [], command


def test_a_table_that_does_not_fit_continues_each_row_indented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "terminal_columns", lambda: 20)
    lines = output.format_table(["name", "best"], [["a" * 12, "97.1%"], ["b", "2.0%"]]).split("\n")
    assert lines == ["name", "     best", "a" * 12, "    97.1%", "b", "     2.0%"]


@pytest.mark.usefixtures("python_is_forked")
def test_a_pipe_gets_unwrapped_lines_without_colour(runs: Path) -> None:
    environment = os.environ | {"COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", door("runs", runs)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 3
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_no_color_is_followed(flag: str) -> None:
    code = f"from recipes.cifar import *; main(train, Config, description='', argv=['{flag}'])"
    plain = terminal.run_python(code, columns=80, environment={"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[\d;]*3\d", plain)
