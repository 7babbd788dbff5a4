"""`accel-trainer lr-find`: a real ramp, and what is made of a curve."""

from __future__ import annotations

import math
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from accel_trainer.cli.lr_find import analyze, draw
from tests.cli.conftest import run_command

ROOT = Path(__file__).parents[2]
RATES = [1e-5 * 10 ** (step / 20) for step in range(121)]  # to 10


def test_lr_find_suggests_the_steepest_fall_up_to_a_tenth_of_divergence() -> None:
    falls_at = [2.3 - 1.5 / (1 + (1e-2 / rate) ** 2) for rate in RATES]
    found = analyze(RATES, falls_at)
    assert found.divergence is None
    # the mean follows the loss late
    assert found.suggestion == found.steepest == pytest.approx(1.2e-2, rel=0.7)
    explodes = [loss + (rate / 0.3) ** 4 for loss, rate in zip(falls_at, RATES, strict=True)]
    found = analyze(RATES, explodes)
    assert found.divergence == pytest.approx(0.4, rel=0.5)
    assert found.suggestion == min(found.steepest, found.divergence / 10)
    early = analyze(
        RATES, [loss + (rate / 0.02) ** 4 for loss, rate in zip(falls_at, RATES, strict=True)]
    )
    assert early.suggestion == early.divergence / 10 < early.steepest


def test_lr_find_of_a_nan_loss_diverges_and_of_no_fall_suggests_nothing() -> None:
    found = analyze(RATES[:51], [3 - 0.02 * step for step in range(50)] + [math.nan])
    assert found.divergence == RATES[50]
    assert found.suggestion == RATES[50] / 10
    assert analyze(RATES, [2.0 + step for step in range(121)]).suggestion is None


def test_a_loss_that_is_nan_from_the_first_step_on_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = analyze(RATES[:1], [math.nan])
    draw(found, tmp_path / "lr-find.png")
    assert found.suggestion is None
    assert (tmp_path / "lr-find.png").exists()


@pytest.mark.usefixtures("python_is_forked")
def test_a_recipe_is_ramped_without_a_trace_but_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    get_temp_dir()  # of the server that forks, which stays
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    command = [
        "lr-find",
        ROOT / "recipes" / "minimal.py",
        "--runtime.num-threads",
        "1",
        "--seed",
        "3",
    ]
    code, out, _ = run_command(capsys, [*command, "--png", tmp_path / "curve.png", "--steps", "40"])
    assert code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    *_, suggestion, where = out.splitlines()
    assert 1e-4 < float(suggestion.removeprefix("suggestion: --lr ")) < 10
    assert where == f"the curve is in {tmp_path / 'curve.png'}"
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "flags", "said"),
    [
        ("raise SystemExit(0)", [], "ends when it is imported: call main below `if __name__ =="),
        (
            "from accel_trainer import RecipeConfig\nclass C(RecipeConfig):\n    x: 'Nope' = 3",
            [],
            "cannot be imported (NameError: name 'Nope' is not defined)",
        ),
        (None, ["--num-processes", "0"], "--num-processes: it is 0, and must be 1 or more"),
        (None, ["--steps", "99999999999"], "--steps: it is 99999999999, and must be 10 to 100000"),
        (None, ["--to", "inf"], "--from must be above 0 and below --to"),
        (None, ["--png", "."], "--png . cannot be replaced (not a regular file)"),
        (None, ["--max-steps=3"], "the range test sets --max-steps itself: leave it out"),
        (None, ["--optimizer.learning-rate", "3"], "sets --optimizer.learning-rate itself"),
        (None, ["--output-dir", "x"], "the range test sets --output-dir itself: leave it out"),
    ],
)
def test_what_cannot_be_tested_is_one_line_before_any_work(
    source: str | None,
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(source or "from accel_trainer import RecipeConfig")
    code, out, err = run_command(capsys, ["lr-find", recipe, *flags])
    assert (code in (64, 73), out, said in err, err.count("\n")) == (True, "", True, 1), err
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.py", "__pycache__"}


@pytest.mark.usefixtures("python_is_forked")
def test_a_recipe_that_cannot_run_and_a_wrong_range_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    recipe = ROOT / "recipes" / "minimal.py"
    code, _, err = run_command(capsys, ["lr-find", recipe, "--sed", "3"])
    assert (code, "did you mean --seed?" in err) == (64, True)
    code, _, err = run_command(capsys, ["lr-find", recipe, "--from", "1", "--to", "0.1"])
    assert (code, "--from must be above 0 and below --to" in err) == (64, True)
    code, _, err = run_command(capsys, ["lr-find", recipe, "--batch-size", "1000"])
    assert (code, "the run ended with exit code 64, see above" in err) == (73, True)


def test_ctrl_c_in_the_range_test_is_an_interruption_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import os, signal, time\n"
        "from accel_trainer import RecipeConfig\n"
        "if __name__ == '__main__':\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    code, _, err = run_command(capsys, ["lr-find", recipe, "--png", tmp_path / "curve.png"])
    assert (code, err) == (130, "accel_trainer: interrupted\n")
