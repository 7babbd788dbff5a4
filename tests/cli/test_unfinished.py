"""Commands that use weights, on a run that was killed or is still running, and on a checkpoint: the
best so far."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from accel_trainer.checkpoint.retention import best_name
from tests import processes
from tests.cli.conftest import run_command, train


@pytest.fixture
def unfinished(runs: Path, tmp_path: Path) -> Path:
    """A run as a kill leaves it: with checkpoints, without a result and without exported
    weights."""
    run = shutil.copytree(runs / "fast", tmp_path / "run")
    (run / "result.json").unlink()
    (run / "status.json").write_text(json.dumps({"state": "running", "exit_code": None}))
    (run / "export" / "model.safetensors").unlink()
    content = json.loads((run / "export" / "config.json").read_text())
    described = {
        name: value for name, value in content.items() if name not in ("weights", "sha256")
    }
    # as it is from the start of a run
    (run / "export" / "config.json").write_text(json.dumps(described))
    return run


def test_an_unfinished_run_is_used_by_its_best_checkpoint_so_far(
    unfinished: Path,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("jinja2")
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    best = best_name(unfinished / "checkpoints")
    said = f"has not ended: using the ema of the best checkpoint so far, {best}"
    commands = {
        "predict": ["predict", "{run}", tmp_path / "image.png"],
        "evaluate": ["evaluate", "{run}", "--json", "--cache-dir", runs.parent / "cache"],
    }
    for command in commands.values():
        found = {}
        for run in (unfinished, runs / "fast"):
            code, out, _ = run_command(
                capsys, [run if word == "{run}" else word for word in command]
            )
            assert code == 0
            found[run] = out if command[0] == "predict" else json.loads(out)["metrics"]
        assert found[unfinished] == found[runs / "fast"], "whose best has been exported"
        assert said in caplog.text
        caplog.clear()
    assert run_command(capsys, ["export", unfinished, "--to", tmp_path / "model"])[0] == 0
    assert said in caplog.text
    assert (
        f"averaged weights of the best checkpoint so far, {best}"
        in (tmp_path / "model" / "README.md").read_text()
    )
    same = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert same == (runs / "fast" / "export" / "model.safetensors").read_bytes()


def test_a_checkpoint_is_predicted_with(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    best = best_name(unfinished / "checkpoints")
    assert best is not None
    outs = [
        run_command(capsys, ["predict", place, tmp_path / "image.png"])
        for place in (unfinished, unfinished / "checkpoints" / best)
    ]
    assert outs[0][:2] == outs[1][:2]
    assert outs[0][0] == 0


def test_a_run_without_a_checkpoint_or_a_description_is_one_line(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    shutil.move(unfinished / "checkpoints", tmp_path / "gone")
    (unfinished / "checkpoints").mkdir()
    code, _, err = run_command(capsys, ["predict", unfinished, tmp_path / "image.png"])
    assert (code, "has saved no checkpoint yet: wait for its first" in err) == (74, True)
    (unfinished / "export" / "config.json").unlink()
    code, _, err = run_command(capsys, ["predict", unfinished, tmp_path / "image.png"])
    assert (code, "start its command again, which adds export/config.json" in err) == (74, True)


def test_a_run_that_is_killed_has_described_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    (tmp_path / "runs").mkdir()
    job = processes.start(train_long, tmp_path / "runs", folder=tmp_path / "logs")
    (process,) = job.processes
    while (
        not any((tmp_path / "runs" / "run" / "checkpoints").glob("step-*/COMMIT"))
        and process.is_alive()
    ):
        time.sleep(0.05)
    process.kill()
    process.join()
    code, out, err = run_command(
        capsys, ["predict", tmp_path / "runs" / "run", tmp_path / "image.png"]
    )
    assert (code, out.startswith(str(tmp_path / "image.png"))) == (0, True), err + job.output()


def train_long(runs: Path) -> None:
    train(runs, "run", "--epochs", "1000", "--checkpoint-every-n-steps", "3")
