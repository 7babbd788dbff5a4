from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_trainer.cli.new import TEMPLATES
from tests.cli.conftest import run_command
from tests.variants import slow_but

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("template", slow_but(["minimal"], TEMPLATES))
def test_the_test_of_a_new_project_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    pytest.importorskip("sklearn")
    project = tmp_path / "mine"
    code, out, _ = run_command(capsys, ["new", project, "--template", template])
    assert code == 0
    assert out.startswith(f"created {project}: cd {project} && python train.py")
    subprocess.run([sys.executable, "-m", "pytest", "-q", project], check=True, cwd=ROOT)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_has_presets_a_config_and_a_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    project = tmp_path / "mine"
    run_command(capsys, ["new", project, "--template", template])
    presets = {path.name: path.read_bytes() for path in (ROOT / "accelerate_configs").iterdir()}
    assert {
        path.name: path.read_bytes() for path in (project / "accelerate_configs").iterdir()
    } == presets
    readme = (project / "README.md").read_text()
    assert readme.startswith("# mine\n")
    assert "python train.py" in readme
    assert yaml.safe_load((project / "config.yaml").read_text())["batch"] == {
        "global_batch_size": 64
    }
    for path in ("train.py", "README.md", "config.yaml"):
        assert "recipes/" not in (project / path).read_text(), path


def test_the_files_of_a_new_project_have_the_modes_of_the_umask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o022)
    try:
        run_command(capsys, ["new", tmp_path / "mine", "--template", "minimal"])
    finally:
        os.umask(before)
    paths = [tmp_path / "mine", *(tmp_path / "mine").rglob("*")]
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths} == {
        (True, 0o755),
        (False, 0o644),
    }


def test_a_folder_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = run_command(capsys, ["new", tmp_path])
    assert (code, err) == (
        64,
        f"accel_trainer: error[NEW_EXISTS]: {tmp_path} exists: choose a folder that does not\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dangling", "dangling exists: choose a folder that does not"),
        ("circle", "circle exists"),
        ("a\nb", r"'a\nb' has a control character: leave it out"),
        ("nowhere/x", "nowhere does not exist: create it first"),
        ("/proc/x", "/proc/x cannot be written (No such file or directory): choose a different"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "circle").symlink_to("circle")
    code, out, err = run_command(capsys, ["new", name])
    assert (code in (64, 73), out, said in err, err.count("\n")) == (True, "", True, 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_new_project_says_to_run_works_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a space is quoted, and the command with a config names the data, too."""
    project = tmp_path / "my photos"
    _, out, _ = run_command(capsys, ["new", project, "--template", "images"])
    assert f"cd '{project}' && python train.py" in out
    lines = (project / "README.md").read_text().splitlines()
    starts = ("accel-trainer plan", "python train.py", "accel-trainer launch")
    commands = [line for line in lines if line.startswith(starts)]
    assert len(commands) == len(starts)
    assert all("--dataset photos --val-fraction 0.1" in line for line in commands)
