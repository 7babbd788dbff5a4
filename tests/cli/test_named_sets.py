"""The commands on a run with named evaluation sets and a test set."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import read_history
from accel_trainer.cli.runs.metric_groups import (
    evaluation_groups,
    group_of_weights,
    metric_in_words,
    preferred_groups,
    weights_of_metric,
)
from tests.cli.conftest import run_command

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests" / "cli" / "recipe_with_sets.py"

pytest.importorskip("sklearn")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_that_forks: Path) -> Path:
    """A run with an average of its weights, which evaluates within its only epoch."""
    folder = tmp_path_factory.mktemp("sets")
    flags = ["--dataset", "digits", "--model", "resnet8", "--model.width", "4"]
    flags += ["--model.norm", "group", "--augment.crop-padding", "1", "--batch-size", "128"]
    flags += ["--epochs", "1", "--ema", "0.5", "--evaluate-every", "4steps"]
    flags += ["--runtime.num-threads", "1", "--cache-dir", str(folder / "cache")]
    command = [str(one_that_forks), str(RECIPE), *flags, "--output-dir", str(folder / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def result_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text())["metrics"])


def test_groups_are_known_by_the_names_of_their_sets() -> None:
    names = ["eval_val/loss", "eval_ema_val/loss", "eval_hard/loss", "eval_ema_hard/loss"]
    metrics = ["optimizer_step", "train/loss", *names, "test/loss"]
    groups = [name.partition("/")[0] for name in names]
    assert evaluation_groups(metrics) == groups
    assert preferred_groups(metrics) == [groups[1], groups[3], groups[0], groups[2]]
    assert [weights_of_metric(name) for name in names] == ["model", "ema", "model", "ema"]
    assert group_of_weights("ema of the best checkpoint", metrics) == "eval_ema_val"
    assert group_of_weights("model", metrics) == "eval_val"
    assert group_of_weights("ema", ["eval/loss"]) is None
    said = [metric_in_words(name) for name in (*names, "test/loss", "eval/loss", "eval_ema/loss")]
    assert said == [
        *("val loss", "averaged val loss", "hard loss", "averaged hard loss"),
        *("test loss", "loss", "averaged loss"),
    ]


def text_of(page: str) -> str:
    """Return what a person reads of a page."""
    without = re.sub(r"<(script|style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without)).split())


def test_the_report_shows_each_set_and_the_test_set_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    code, _, err = run_command(capsys, ["report", run, "--to", page])
    assert (code, err) == (0, "")
    text = text_of(page.read_text())
    numbers = result_of(run)
    assert f"test accuracy {numbers['test/accuracy']:.2%}" in text
    assert f"test loss {numbers['test/loss']:.4g}" in text
    assert "averaged val accuracy" in text
    (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text())
    shown = json.loads(html.unescape(data))
    charts = [chart["names"] for chart in shown["charts"]]
    groups = ["eval_val", "eval_ema_val", "eval_hard", "eval_ema_hard"]
    assert charts[0] == ["train/loss", *(f"{group}/loss" for group in groups)]
    assert charts[1] == [f"{group}/accuracy" for group in groups]
    assert not any("test/" in name for names in charts for name in names)
    labels = {name: kind["label"] for name, kind in shown["kinds"].items()}
    assert labels == {
        "train": "training",
        "eval_val": "val",
        "eval_ema_val": "averaged val",
        "eval_hard": "hard",
        "eval_ema_hard": "averaged hard",
    }
    assert len({kind["color"] for kind in shown["kinds"].values()}) == len(labels)
    # The classes and the mistakes are those of the averaged weights on the first set.
    assert (tmp_path / "report" / "run-confusion.png").exists()
    assert json.loads((run / "mistakes.json").read_text())["weights"] == "eval_ema_val"


def test_runs_status_and_inspect_read_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(capsys, ["runs", run])
    assert (code, err) == (0, "")
    best = max(row["eval_ema_val/accuracy"] for row in read_history(run) if row["event"] == "eval")
    assert "eval_ema_val/accuracy" in out
    assert f"{best:.2%}" in out
    code, out, err = run_command(capsys, ["status", run])
    assert (code, err) == (0, "")
    assert "state: done" in out
    code, out, err = run_command(capsys, ["inspect", run])
    assert (code, err) == (0, "")
    assert re.search(r"num_samples: \[\d+, \d+, 90, 150\]\n", out)


def test_evaluate_gets_the_numbers_of_the_first_set(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ("--cache-dir", run.parent / "cache")
    code, out, err = run_command(capsys, ["evaluate", run, "--json", *cache])
    assert (code, err) == (0, "")
    found = json.loads(out)["metrics"]
    best = json.loads((run / "result.json").read_text())["best"]
    (row,) = (
        row
        for row in read_history(run)
        if row["event"] == "eval" and best["name"].startswith(f"step-{row['optimizer_step']:010d}-")
    )
    assert found["accuracy"] == row["eval_ema_val/accuracy"]


def test_an_export_reports_the_first_set_and_the_test_set(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub")
    code, _, err = run_command(capsys, ["export", run, "--to", tmp_path / "model"])
    assert (code, err) == (0, "")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| test accuracy | {result_of(run)['test/accuracy']:.2%} |" in card
    best = json.loads((run / "result.json").read_text())["best"]["value"]
    assert f"| accuracy | {best:.2%} |" in card


@pytest.mark.usefixtures("python_is_forked")
def test_rerun_repeats_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(capsys, ["rerun", run, "--recipe", RECIPE])
    assert (code, err) == (0, f"note: running {RECIPE}\n")
    assert "equal: the same weights after step 12" in out
