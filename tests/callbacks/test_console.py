"""Stdout that takes no more ends no run."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.callbacks import console
from accel_trainer.cli.common.output import tell

RECIPE = """
import sys
from pathlib import Path
from accel_trainer import RecipeConfig, main
from tests.workload import make_config, train

def recipe(config):
    print("printed by the recipe itself, and not flushed")
    return train(make_config(Path(sys.argv[1])))

main(recipe, RecipeConfig, description="", argv=["--quiet"])
"""

PRINTS_LAST = """
from pathlib import Path
from accel_trainer import RecipeConfig, RunResult, TrainState, main

def recipe(config):
    print("not flushed")
    return RunResult("done", "", TrainState(), {}, None, Path())

main(recipe, RecipeConfig, description="", argv=["--quiet"])
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437", "utf-8", "utf-16"])
def test_no_letter_ends_all_output(
    encoding: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also half a letter, as names of files may contain, which no encoding has."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    for text in ("日本", "é", "\N{GRINNING FACE}", "file-\udc80", "plain"):
        console.say(text)
        tell(text)
    console.flush()
    assert caplog.messages == []
    shown = written.getvalue().decode(encoding).split("\n")
    assert shown.count("plain") == 2
    assert len(shown) == 11


def test_what_a_recipe_prints_last_changes_no_exit_code(tmp_path: Path) -> None:
    """In a real interpreter, which writes the text when it ends."""
    (tmp_path / "recipe.py").write_text(PRINTS_LAST)
    command, environment = (
        [sys.executable, tmp_path / "recipe.py"],
        {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("python_is_forked")
def test_a_run_whose_reader_is_gone_trains_to_its_end(tmp_path: Path) -> None:
    train_into(tmp_path, "", num_warnings=1)


@pytest.mark.slow
@pytest.mark.parametrize(("stdout", "num_warnings"), [("", 1), ("> /dev/full", 1), (">&-", 0)])
def test_a_run_whose_stdout_takes_no_more_trains_to_its_end(
    tmp_path: Path, stdout: str, num_warnings: int
) -> None:
    train_into(tmp_path, stdout, num_warnings=num_warnings)


def train_into(folder: Path, stdout: str, *, num_warnings: int) -> None:
    """Train with a pipe that nobody reads as stdout, or what bash puts in its place."""
    recipe, run = folder / "recipe.py", folder / "run"
    recipe.write_text(RECIPE)
    command = ["bash", "-c", f'"$0" "$1" "$2" {stdout}', sys.executable, recipe, run]
    reader, writer = os.pipe()
    os.close(reader)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot write to stdout") == num_warnings, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((run / "result.json").read_bytes())["state"] == "done"
