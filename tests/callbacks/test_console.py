"""Stdout that takes no more ends no run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.variants import slow

ROOT = Path(__file__).parents[2]
RECIPE = """
import sys
from pathlib import Path
from accel_trainer import RecipeConfig, main
from tests.workload import make_config, train

def recipe(config):
    print("printed by the recipe itself, and not flushed")
    return train(make_config(Path(sys.argv[1])))

main(recipe, RecipeConfig, description="", argv=[])
"""


@pytest.mark.parametrize("stdout", ["| head -n 1 > /dev/null", *slow(["> /dev/full", ">&-"])])
def test_a_run_whose_stdout_takes_no_more_trains_to_its_end(tmp_path: Path, stdout: str) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    command = [
        "bash",
        "-c",
        f'"$0" "$1" "$2" {stdout}; exit ${{PIPESTATUS[0]}}',
        sys.executable,
        recipe,
        tmp_path / "run",
    ]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot write to stdout") == (0 if stdout == ">&-" else 1), done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_bytes())["state"] == "done"
