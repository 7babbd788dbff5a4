"""`accel-trainer rerun` on runs that real processes made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accel_trainer.cli.common.processes import start_recipe
from accel_trainer.cli.recipe.start import Start
from accel_trainer.run.known_recipes import started_folder
from tests.cli.conftest import run_command
from tests.variants import slow

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("python_is_forked")


def start(recipe: Path, *flags: object, launcher: tuple[str, ...] = ()) -> None:
    environment = {**os.environ, **({"ACCELERATE_USE_CPU": "true"} if launcher else {})}
    command = [
        sys.executable,
        *launcher,
        str(recipe),
        "--runtime.num-threads",
        "1",
        *map(str, flags),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="one process"),
        pytest.param(
            (
                "-m",
                "accel_trainer.cli.launch",
                "--config_file",
                "accelerate_configs/multi_cpu.yaml",
            ),
            id="two processes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_on_digits_comes_out_the_same_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launcher: tuple[str, ...],
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("HOME", str(tmp_path))  # whose cache a rerun has
    first = tmp_path / "first"
    flags = [
        "--config",
        "recipes/configs/digits.yaml",
        "--epochs",
        "1",
        "--max-steps",
        "5",
        "--ema",
        "0.9",
    ]
    places = ["--output-dir", first, "--cache-dir", tmp_path / "cache"]
    start(Path("recipes/cifar.py"), *flags, *places, launcher=launcher)
    code, out, err = run_command(capsys, ["rerun", first])
    assert (code, err) == (0, f"note: running {ROOT / 'recipes' / 'cifar.py'}\n")
    assert (
        f"training first again in {tmp_path / 'first-rerun'}, with "
        f"{ROOT / 'recipes' / 'cifar.py'}\n" in out
    )
    assert "next: " not in out
    assert "\nequal: the same weights after step 5, SHA-256 of model.safetensors " in out
    assert ", ema.safetensors " in out
    before, after = (
        json.loads((folder / "environment.json").read_text())
        for folder in (first, tmp_path / "first-rerun")
    )
    assert before["hardware"] == after["hardware"]
    assert before["recipe_defaults"] == after["recipe_defaults"]


def test_a_rerun_that_a_signal_kills_ends_as_a_shell_tells_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    recipe = tmp_path / "mine.py"
    recipe.write_text((ROOT / "recipes" / "minimal.py").read_text())
    start(recipe, "--output-dir", tmp_path / "first", "--epochs", "1")
    recipe.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(capsys, ["rerun", "first", "--output-dir", "again"])
    assert (code, "nothing can be compared" in err) == (143, True)


def test_a_rerun_that_differs_says_so_after_what_is_not_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    recipe = tmp_path / "mine.py"
    first = tmp_path / "first"
    source = (ROOT / "recipes" / "minimal.py").read_text()
    recipe.write_text(source)
    start(recipe, "--output-dir", first, "--epochs", "1", "--trainer.log-every-n-steps", "1")
    recipe.write_text(source.replace("/ inputs.std(0)", "/ (inputs.std(0) + 0.01)"))
    path = first / "environment.json"
    recorded = json.loads(path.read_text())
    recorded["packages"]["torch"] = "1.0"
    path.write_text(json.dumps(recorded))
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(capsys, ["rerun", first, "--output-dir", tmp_path / "again"])
    assert code == 1
    assert f"note: the run was started in {ROOT}: relative paths of its config" in err
    assert "warning: differs from the run: packages.torch 1.0 -> " in err
    assert "warning: differs from the run: code.sha256 " in err
    (verdict,) = [line for line in out.splitlines() if line.startswith("DIFFERENT")]
    assert verdict.startswith("DIFFERENT: model.safetensors after step 4: SHA-256 ")
    assert "; the loss differs at or before step 1: " in verdict


PLAIN = """
import torch
from torch.utils.data import TensorDataset
from accel_trainer import RegressionTask, build_trainer, start_run

data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
with start_run(recipe="plain", epochs=1, batch_size=4) as run:
    parts = {"model": torch.nn.Linear(2, 1), "task": RegressionTask()}
    build_trainer(run, train_set=data, eval_sets=data, **parts).fit()
"""


@pytest.mark.parametrize("command", ["rerun", "at", "chaos", "plan"])
def test_a_program_that_reads_no_flags_trains_in_no_other_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "plain.py"
    program.write_text(PLAIN)
    subprocess.run([sys.executable, str(program)], check=True, capture_output=True)
    folders = [*tmp_path.glob("runs/*")]
    of_run: dict[str, list[object]] = {"rerun": [], "at": ["--step", 1, "--to", "there"]}
    words = [folders[0], *of_run[command]] if command in of_run else [program]
    code, _, err = run_command(capsys, [command, *words])
    assert code != 0
    if command != "rerun":  # which shows the program's own output
        assert "reads no flags" in err
    assert [*tmp_path.glob("runs/*")] == folders


def test_what_cannot_be_run_again_is_said_before_any_work(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.yaml", "status.json"):
        shutil.copy(runs / "fast" / name, tmp_path)
    code, _, err = run_command(capsys, ["rerun", tmp_path])
    assert (code, "has no checkpoint to compare with" in err) == (74, True)
    shutil.copytree(runs / "fast" / "checkpoints", tmp_path / "checkpoints")
    code, _, err = run_command(capsys, ["rerun", tmp_path])
    assert (code, "is missing: restore it" in err) == (73, True)
    assert not tmp_path.with_name(f"{tmp_path.name}-rerun").exists()


def say_what_started(run: Path, *, recipe: Path, arguments: list[str]) -> None:
    path = run / "environment.json"
    recorded = json.loads(path.read_text())
    recorded["code"]["recipe"], recorded["command"]["arguments"] = str(recipe), arguments
    path.write_text(json.dumps(recorded))


def list_start(run: Path) -> None:
    """Let this machine know the run, as a start with its recipe does."""
    recorded = json.loads((run / "environment.json").read_text())
    entry = started_folder() / f"{recorded['id']}.json"
    entry.parent.mkdir(0o700, parents=True, exist_ok=True)
    entry.touch(0o600)
    entry.write_text(json.dumps({"recipe": recorded["code"]["recipe"], "sha256": "0"}))


@pytest.mark.parametrize(
    "command", [("rerun",), ("replay", "--step", "3")], ids=lambda command: command[0]
)
@pytest.mark.parametrize(
    "place", ["in the folder", *slow(["in the folder by a link", "python's -c"])]
)
def test_a_rerun_uses_the_recipe_of_the_run_folder_only_if_it_is_named(
    command: tuple[str, ...],
    place: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, ran = shutil.copytree(runs / "fast", tmp_path / "run"), tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nraise SystemExit(5)\n"
    inside = run / "theirs.py"
    inside.write_text(code)
    outside = tmp_path / "link.py"
    outside.symlink_to(inside)
    recipe = {"in the folder": inside, "in the folder by a link": outside, "python's -c": inside}[
        place
    ]
    say_what_started(
        run, recipe=recipe, arguments=["-c", code] if place == "python's -c" else [str(recipe)]
    )
    name, *flags = command
    code_, _, err = run_command(capsys, [name, run, *flags])
    assert code_ == 64
    assert err.endswith(f": accel-trainer {' '.join([name, str(run), *flags])} --recipe {inside}\n")
    assert err.count("\n") == 1
    assert not ran.exists()
    code_, out, _ = run_command(capsys, [name, run, *flags, "--recipe", inside])
    assert code_ == (5 if name == "rerun" else 73), "the exit code of the recipe, or of the error"
    assert f"with {inside}\n" in out, "it says which recipe it runs"
    assert ran.exists()
    code_, _, err = run_command(capsys, [name, run, *flags, "--recipe", tmp_path / "none.py"])
    assert (code_, "none.py is not a file: give the recipe of" in err) == (64, True)


FORGED = {
    "a program of Python": ("code", {"recipe": tempfile.__file__}, 64, "tempfile.py is not run"),
    "no recipe": ("code", 5, 73, "is missing: restore it"),
    "a line in the recipe": ("code", {"recipe": "/tmp/a\nb.py"}, 73, "is missing"),
    "no hardware": ("hardware", 5, 73, "does not record how it was started"),
    "threads that are a flag": ("hardware", {"num_threads": "--help"}, 73, "invalid literal"),
    "a precision": ("mixed_precision", {"a": 1}, 73, "mixed_precision is {'a': 1}"),
    "variables": ("variables", 5, 73, "does not record how it was started"),
    "a folder with a zero byte": ("command", 5, 73, "does not record how it was started"),
    "processes": (
        "hardware",
        {"num_threads": 1, "num_processes": 10**6, "device": "cpu"},
        73,
        "run on 1000000 processes, and here at most",
    ),
}


@pytest.mark.parametrize(
    ("name", "forgery"), [*(("rerun", forgery) for forgery in FORGED), ("replay", "no recipe")]
)
def test_a_forged_start_is_one_line_and_starts_nothing(
    name: str,
    forgery: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, content, expected, said = FORGED[forgery]
    run = shutil.copytree(runs / "fast", tmp_path / "run")
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit(5)\n")
    monkeypatch.chdir(tmp_path)
    say_what_started(run, recipe=mine, arguments=["mine.py"])
    list_start(run)
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), group: content}))
    flags = ["--step", "3"] if name == "replay" else []
    code, _, err = run_command(capsys, [name, run, *flags])
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert (code, len(lines), said in lines[0]) == (expected, 1, True), err


def test_the_file_that_was_checked_is_the_file_that_runs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded folder does not decide what a recorded path means."""
    run = shutil.copytree(runs / "fast", tmp_path / "runs" / "theirs")
    ran = tmp_path / "ran"
    for folder, code in ((run, f"open({str(ran)!r}, 'w')"), (tmp_path, "raise SystemExit(5)")):
        (folder / "recipes").mkdir()
        (folder / "recipes" / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    say_what_started(run, recipe=Path("/proc/self/cwd/recipes/mine.py"), arguments=[])
    path = run / "environment.json"
    recorded = json.loads(path.read_text())
    recorded["command"]["directory"] = "/proc/self/cwd/runs/theirs"
    path.write_text(json.dumps(recorded))
    code, out, _ = run_command(capsys, ["rerun", run, "--recipe", "recipes/mine.py"])
    assert code == 5
    assert f"with {tmp_path / 'recipes' / 'mine.py'}\n" in out
    assert not ran.exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
def test_a_launcher_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    start = Start(recipe="no-such-recipe.py", num_processes=2)
    process = start_recipe(start, output=subprocess.DEVNULL)
    assert process.wait() != 0
    assert not (tmp_path / "ran").exists()
