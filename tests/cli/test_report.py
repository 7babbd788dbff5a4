"""`accel-trainer report` on real runs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from matplotlib.axes import Axes
from PIL import Image

from accel_trainer.callbacks.evaluation_file import EVALUATION_FILE
from accel_trainer.cli.main import main as door
from accel_trainer.cli.report.charts import (
    draw_class_accuracy,
    draw_confusion,
    draw_curves,
    top_of,
)
from accel_trainer.cli.report.facts import facts_of
from accel_trainer.cli.report.figures import draw_chart
from accel_trainer.cli.report.page_data import page_data
from accel_trainer.cli.report.pictures import read_samples
from accel_trainer.cli.report.report import render
from accel_trainer.cli.runs.confusion import Confusion, read_confusion
from accel_trainer.cli.runs.run_reader import RunReader, read_run
from accel_trainer.cli.share.evaluate import load_model
from accel_trainer.vision import load_images
from accel_trainer.vision.rules import RULED
from tests.browser import browser, needs_chromium
from tests.cli.conftest import run_command

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """Counts the elements of a page, gathers its headings and every address it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self._is_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self._is_heading = tag in ("h1", "h2", "h3")
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]

    def handle_data(self, data: str) -> None:
        if self._is_heading and data.strip():
            self.headings.append(data.strip())


def with_rows(run: RunReader, rows: Sequence[Mapping[str, Any]], **changes: Any) -> RunReader:
    """Return a run that has read these rows."""
    metrics: Any = SimpleNamespace(read=lambda: rows, logged=run.logged)
    return replace(run, metrics=metrics, **changes)


def with_few_charts(run: RunReader) -> RunReader:
    """The run as if it had logged only a loss: most of the time of a report goes into its
    charts."""
    rows = [
        {name: row[name] for name in ("event", "optimizer_step", "epoch", "train/loss")}
        for row in run.rows
        if "train/loss" in row
    ]
    return with_rows(run, rows, result={**run.result, "metrics": {}})


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The report of a run: where its page is, and what the command printed."""
    path = tmp_path_factory.mktemp("report") / "page.html"
    words = ["report", runs / "fast", "--to", path]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert door([str(word) for word in words]) == 0
    return path, printed.getvalue()


@pytest.fixture(scope="module")
def page(report: tuple[Path, str]) -> str:
    """Its page."""
    return report[0].read_text()


@pytest.fixture(scope="module")
def page_of_both(
    runs: Path, one_that_forks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The page of a folder of two runs, opened with a browser that writes into `opened` what it is
    given."""
    folder = tmp_path_factory.mktemp("both")
    browser = folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {folder}/opened\n')
    browser.chmod(0o755)
    words = ["report", str(runs), "--open", "--to", str(folder / "page.html")]
    code = f"import sys; from accel_trainer.cli.main import main; sys.exit(main({words}))"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "BROWSER": f"{browser} %s"}
    subprocess.run(
        [one_that_forks, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    return folder / "page.html"


def test_a_report_is_one_file_that_loads_nothing(page: str) -> None:
    parsed = Page(page)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert parsed.addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in parsed.addresses)
    assert "link" not in parsed.counts


def test_only_the_pages_own_script_may_run_and_nothing_may_be_loaded(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)">', page)
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["img-src"] == "data:"
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|innerHTML|eval\(|https?:", script)
    assert json.loads(data)["runs"][0]["name"] == "fast"


def test_the_script_gets_every_logged_number(runs: Path) -> None:
    run = read_run(runs / "fast")
    data = page_data([run])
    assert [chart["names"] for chart in data["charts"]][:2] == [
        ["train/loss", "eval/loss", "eval_ema/loss"],
        ["eval/accuracy", "eval_ema/accuracy"],
    ]
    (shown,) = data["runs"]
    place, values = shown["series"]["train/loss"]
    logged = [(row["optimizer_step"], row["train/loss"]) for row in run.rows if "train/loss" in row]
    assert shown["steps"][place] == [step for step, _ in logged]
    assert values == pytest.approx([value for _, value in logged], rel=1e-5)
    assert shown["steps_per_epoch"] == 23
    steps, seconds = shown["clock"]
    assert steps[0] == seconds[0] == 0
    assert seconds == sorted(seconds)
    assert seconds[-1] < run.result["wall_s"]


def test_numbers_that_json_does_not_have_are_gaps(runs: Path) -> None:
    run = with_few_charts(read_run(runs / "fast"))
    rows = [row | {"train/loss": math.nan} for row in run.rows]
    text, _ = render([with_rows(run, rows)])
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert set(json.loads(data)["runs"][0]["series"]["train/loss"][1]) == {None}


@needs_chromium
def test_a_browser_runs_the_script_and_asks_the_network_for_nothing(
    page_of_both: Path, tmp_path: Path
) -> None:
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", page_of_both.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    drawn = Page(done.stdout)
    assert done.stdout.count('class="live"') == 8, "one for each chart over the steps"
    assert drawn.counts["button"] == 1 + 3 + 2 + 8, (
        "show all, three kinds of lines, two runs, a log for each chart"
    )
    assert "CONSOLE" not in done.stderr, "no error and no refusal by the policy"


def test_a_folder_of_runs_is_reported_as_a_whole_and_opened_if_asked(page_of_both: Path) -> None:
    assert "<h1>2 runs</h1>" in page_of_both.read_text()
    assert (page_of_both.parent / "opened").read_text() == f"{page_of_both.as_uri()}\n"


def test_a_page_without_a_suffix_would_be_in_the_place_of_its_charts(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "page", ""):
        code, _, err = run_command(capsys, ["report", runs, "--to", path])
        assert code == 64
        assert "has no suffix" in err
    assert not (tmp_path / "page").exists()


def test_a_report_shows_curves_classes_pictures_and_settings(page: str) -> None:
    parsed = Page(page)
    headings = [re.sub(r"error [\d.]+%", "error", heading) for heading in parsed.headings]
    assert headings == [
        "fast",
        "Curves",
        "Loss",
        "Accuracy",
        "Top-5 accuracy",
        "Gradient norm",
        "Learning rate",
        "Samples per second",
        "Time waiting for data",
        "Peak memory (GiB)",
        "Classes",
        "Confusion",
        "Accuracy by class",
        "Predictions",
        "Most confident mistakes",
        "Settings",
        "Settings that differ from the defaults",
        "Environment",
    ]
    assert parsed.counts["svg"] == 10
    assert parsed.counts["img"] == 32, "its predictions and mistakes"


def test_the_ticks_of_a_small_fraction_differ(runs: Path, tmp_path: Path) -> None:
    run = attempted(runs, tmp_path, [0])
    rows = [
        {"optimizer_step": step, "perf/data_wait_fraction": step / 10_000} for step in range(1, 100)
    ]
    (data_wait,) = draw_curves([with_rows(run, rows)], quantities=["perf/data_wait_fraction"])
    ticks = re.findall(r">([\d.]+%)<", data_wait.svg)
    assert len(ticks) == len(set(ticks)) > 3, ticks


def test_the_colours_of_charts_are_those_of_the_page(page: str) -> None:
    used, defined = (
        set(re.findall(pattern, page)) for pattern in (r"var\(--([\w-]+)\)", r"--([\w-]+): #")
    )
    assert used <= defined
    assert {"series-1", "series-2", "ink", "muted", "line"} <= used
    assert not re.search(r"#0[a1-6]0[a1-6][01][0-9a-f]\b", page), "no placeholder is left"
    assert "prefers-color-scheme: dark" in page


def test_each_chart_lies_beside_the_page_as_a_picture(runs: Path, report: tuple[Path, str]) -> None:
    path, printed = report
    charts = path.with_suffix("")
    assert printed.splitlines() == [f"{path}", f"{charts}/  10 charts"]
    for picture in charts.iterdir():
        with Image.open(picture) as image:
            assert image.size[0] == 920, picture.name
            assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255), (
                "light, also without a page"
            )
    (again,) = draw_curves([read_run(runs / "fast")], quantities=["loss"])
    assert (charts / "loss.png").read_bytes() == again.png, "the same run, the same bytes"


def test_a_chart_that_an_earlier_report_had_is_removed_and_nothing_else(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    charts = tmp_path / "page"
    assert run_command(capsys, ["report", runs / "fast", "--to", path])[0] == 0
    written = {*charts.iterdir()}
    shutil.copy(charts / "loss.png", charts / "gone.png")
    others = [charts / "mine.png", charts / "notes.txt"]
    for other in others:
        other.write_text("mine")
    assert run_command(capsys, ["report", runs / "fast", "--to", path])[0] == 0
    assert {*charts.iterdir()} == written | {*others}


def test_a_picture_of_somebody_else_among_the_charts_is_not_replaced(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    command = ["report", runs / "fast", "--to", path]
    assert run_command(capsys, command)[0] == 0
    assert run_command(capsys, command)[0] == 0, "its own are"
    (tmp_path / "page/loss.png").write_text("mine")
    code, _, err = run_command(capsys, command)
    assert (code, "loss.png would overwrite a file" in err) == (73, True)
    assert (tmp_path / "page/loss.png").read_text() == "mine"


def test_the_worst_mistakes_of_all_test_images_need_nothing_but_the_run(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "slow", tmp_path / "run")
    mistakes = read_samples(read_run(tmp_path / "run"), "mistakes")
    images = load_images("digits", cache_dir=runs.parent / "cache")
    checkpoint = sorted((runs / "slow" / "checkpoints").glob("step-*"))[-1]
    model = load_model(checkpoint, weights="ema").model.eval()
    mean, std = (float(values[0]) for values in vars(images.normalization).values())
    with torch.inference_mode():
        confidences, predictions = model((images.test.images / 255 - mean) / std).softmax(1).max(1)
    wrong = confidences[predictions != images.test.labels].sort(descending=True).values
    assert len(mistakes) == 16 < len(wrong)
    shown = read_samples(read_run(tmp_path / "run"), "predictions")
    is_right = [each["label"] == each["truth"] for each in shown]
    assert len(shown) == 16
    assert any(is_right)
    assert [each["label"] for each in shown] == [
        str(int(predictions[number * len(predictions) // 16])) for number in range(16)
    ], "right or wrong, from all of the set"
    assert [mistake["confidence"] for mistake in mistakes] == [
        f"{value:.0%}" for value in wrong[:16].tolist()
    ]
    assert mistakes[0]["confidence"] != mistakes[-1]["confidence"]
    assert all(mistake["label"] != mistake["truth"] for mistake in mistakes)
    page, _ = render([with_few_charts(read_run(tmp_path / "run"))])
    assert Page(page).counts["img"] == 32
    assert page.count(", correct<") == sum(is_right)


def test_a_report_on_photos_shows_mistakes_by_name(photo_run: Path) -> None:
    stored = json.loads((photo_run / "mistakes.json").read_text())["mistakes"]
    assert stored
    for mistake in stored:
        assert f"photos/{mistake['label']}/" in mistake["name"]
        data = base64.b64decode(mistake["picture"].partition(",")[2])
        assert Image.open(io.BytesIO(data)).size == (24, 24)
    run = read_run(photo_run)
    text, _ = render([with_few_charts(run)])
    captions = "".join(re.findall("<figcaption>.*?</figcaption>", text, re.DOTALL))
    assert f"<span>{stored[0]['label']}/" in captions
    assert str(photo_run.parent) not in captions, "a folder of this machine"
    assert Page(text).counts["img"] == min(16, len(stored)) + len(read_samples(run, "predictions"))


def test_a_report_says_which_settings_a_rule_chose(photo_run: Path, runs: Path) -> None:
    text, _ = render([with_few_charts(read_run(photo_run))])
    rows = re.findall(r'row">([\w.]+)</th><td>.*?by rule, unless given', text)
    assert {"optimizer.learning_rate", "schedule.warmup_epochs"} <= {*rows} <= RULED
    assert "by rule" not in render([with_few_charts(read_run(runs / "fast"))])[0], "it has no rules"


def test_a_stored_picture_that_is_not_an_image_is_kept_out_of_the_page(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "slow", tmp_path / "run")
    path = tmp_path / "run" / "mistakes.json"
    stored = json.loads(path.read_text())
    stored["mistakes"][0]["picture"] = "https://example.org/seen.png"
    stored["mistakes"][1]["name"] = '"><script>alert(1)</script>'
    path.write_text(json.dumps(stored))
    page, _ = render([with_few_charts(read_run(tmp_path / "run"))])
    assert "example.org" not in page
    assert Page(page).counts["script"] == 2, "the page's own"


def test_a_report_of_a_thousand_classes_shows_the_hardest_and_the_easiest(
    runs: Path, tmp_path: Path
) -> None:
    run = read_run(runs / "fast")
    counts = [[0] * 1000 for _ in range(1000)]
    for label in range(1000):
        counts[label][label], counts[label][0] = label, counts[label][0] + 1000 - label
    accuracies = [label / 1000 for label in range(1000)]
    metrics = {"eval/confusion_matrix": counts, "eval/per_class_accuracy": accuracies}
    page, files = render([with_rows(run, [], result={**run.result, "metrics": metrics})])
    assert "fast-confusion.png" in files
    assert "The hardest and the easiest classes" in page
    assert "Most confused: true → predicted" in page
    assert ">999</text>" in page.replace("\n", "")
    assert len(page) < 1_500_000


def test_a_report_of_many_classes_shows_the_most_confused_pairs() -> None:
    counts = [[0] * 25 for _ in range(25)]
    for label in range(25):
        counts[label][label], counts[label][(label + 1) % 25] = 40, label
    confusion = read_confusion({"confusion_matrix": counts, "per_class_accuracy": [0.5] * 25})
    assert confusion is not None
    svg = draw_confusion("confusion", confusion, [f"class-{number:02}" for number in range(25)]).svg
    pairs = re.findall(r">(class-\d\d → class-\d\d)<", svg)
    assert pairs[:2] == ["class-24 → class-00", "class-23 → class-24"]
    assert len(pairs) == 20
    assert re.findall(r">(\d+ of \d+)<", svg)[0] == "24 of 64"


def test_a_report_has_the_hardest_class_on_top_and_leaves_out_the_middle() -> None:
    names = [f"class-{number:02}" for number in range(26)]
    accuracies = [(7 * number % 25) / 25 for number in range(25)] + [math.nan]
    pairs = torch.tensor([[number, 0, 1] for number in range(25)])
    confusion = Confusion(pairs, torch.tensor(accuracies, dtype=torch.float64))
    svg = draw_class_accuracy("classes", confusion, names).svg
    assert "0.0% of 1" in svg
    places = dict(
        (name, float(y))
        for y, name in re.findall(r'<text [^>]* y="([\d.]+)"[^>]*>(class-\d\d)</text>', svg)
    )
    in_order = sorted(range(25), key=lambda number: accuracies[number])
    shown = [names[number] for number in [*in_order[:10], *in_order[-10:]]]
    assert sorted(places, key=lambda name: places[name]) == shown


def test_restarts_are_marked_and_the_times_of_all_attempts_added(
    runs: Path, tmp_path: Path, page: str
) -> None:
    run = attempted(runs, tmp_path, [0, 10, 10, 30])
    assert run.restarts == [10, 10, 30]
    assert run.num_killed == 1
    assert run.phase_s == {"start": 3.0, "training": 30.0}
    text, _ = render([with_few_charts(run)])
    assert "Interrupted, and resumed after step 10, 10, 30 (dotted); 1 of its 4" in text
    assert "Interrupted" not in page


def test_only_some_of_very_many_restarts_are_listed_and_drawn(runs: Path, tmp_path: Path) -> None:
    run = attempted(runs, tmp_path, [0, *range(1, 1001)])
    text, _ = render([with_few_charts(run)])
    assert "resumed after step 1, 2, 3, 4," in text
    assert " 20 and 980 more (dotted)" in text
    ((data),) = page_data([run])["runs"]
    assert len(data["restarts"]) < 500


def attempted(runs: Path, tmp_path: Path, steps: list[int]) -> RunReader:
    """A run that started at each of `steps`; the second attempt was killed."""
    shutil.copytree(runs / "fast", tmp_path / "run")
    rows: list[dict[str, object]] = []
    for number, step in enumerate(steps):
        rows.append({"event": "start", "optimizer_step": step})
        if number != 1:
            rows.append({"event": "end", "phase_s": {"start": 1.0, "training": 10.0}})
    (tmp_path / "run" / "attempts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return read_run(tmp_path / "run")


def test_a_report_shows_settings_that_differ_from_the_recipes_defaults(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "fast", tmp_path / "run")
    run = read_run(tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    defaults = {
        "trainer": {**run.config["trainer"], "num_epochs": 77},
        "model": run.config["model"],
    }
    path.write_text(json.dumps({**run.environment, "recipe_defaults": defaults}))
    text, _ = render([with_few_charts(read_run(tmp_path / "run"))])
    changed = text.partition("Settings that differ")[2].partition("<details>")[0]
    assert "not 77" in changed
    assert "model.name" not in changed, "this recipe has it as its default"
    assert "recipe_defaults" not in text, "not a fact of the environment"


def test_several_runs_share_their_charts_and_the_table_names_what_differs(
    page_of_both: Path,
) -> None:
    text, files = page_of_both.read_text(), list(page_of_both.with_suffix("").iterdir())
    assert Page(text).counts["svg"] == len(files) == 8 + 2 * 2
    header = re.search(r"<thead>.*?</thead>", text, re.DOTALL)
    assert header is not None
    assert "optimizer.learning_rate" in header[0]
    assert "augment" not in header[0]


def test_runs_of_one_name_have_charts_of_their_own(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "slow", tmp_path / "fast")
    # no curves
    _, files = render([with_rows(read_run(folder / "fast"), []) for folder in (runs, tmp_path)])
    assert {
        "fast-confusion.png",
        "fast-confusion-2.png",
        "fast-classes.png",
        "fast-classes-2.png",
    } <= files.keys()
    assert files["fast-confusion.png"] != files["fast-confusion-2.png"]


def test_a_report_shows_what_the_run_has(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "fast", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")  # no curves
    path = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["run"]["cache_dir"] = str(tmp_path / "elsewhere")
    config["augment"]["crop_mode"] = "of another version"
    path.write_text(yaml.safe_dump(config))
    code, out, _ = run_command(capsys, ["report", "run"])
    assert code == 0
    assert Page(Path(out.splitlines()[0]).read_text()).counts["img"] == 32, (
        "only its predictions and mistakes"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "report.html", "run"]


@pytest.mark.parametrize(
    ("speed", "waited", "share"),
    [
        (100.0, [0.2, 0.9, 0.9, 0.8], "70%"),
        (100.0, [0.2, 0.2, 0.3, 0.3], None),
        (1e6, [0.8] * 4, None),  # less than workers take to send a batch
    ],
)
def test_a_report_tells_of_a_long_wait_for_samples(
    runs: Path, speed: float, waited: list[float], share: str | None
) -> None:
    run = read_run(runs / "fast")
    rows = [
        {
            "event": "train",
            "optimizer_step": step,
            "epoch": 1,
            "perf/samples_per_s": speed,
            "perf/data_wait_fraction": fraction,
        }
        for step, fraction in enumerate(waited, start=1)
    ]
    for result in ({}, {**run.result, "metrics": {}}):
        facts = {each["name"]: each for each in facts_of(with_rows(run, rows, result=result))}
        assert facts.get("waiting for samples", {}).get("value") == share


def test_a_run_without_images_or_an_end_has_a_report_of_what_there_is(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "fast", tmp_path / "run")
    for name in ("result.json", "environment.json", "mistakes.json"):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run" / "export")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) | {"dataset": "/gone"}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    page = Page(render([read_run(tmp_path / "run")])[0])
    assert page.counts["svg"] == 8 + 2, "the curves, and the classes of the last evaluation"
    assert "img" not in page.counts
    assert "Most confident mistakes" not in page.headings


def test_names_from_a_run_are_text_and_not_markup(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)</script>"
    shutil.copytree(runs / "fast", tmp_path / "run")
    (tmp_path / "<script>alert(1)<").mkdir()
    shutil.move(tmp_path / "run", folder)
    text, _ = render([with_few_charts(read_run(folder)), with_few_charts(read_run(runs / "slow"))])
    assert Page(text).counts["script"] == 2, "the page's own"
    assert "<script>alert" not in text


# --- what callbacks have logged ---

DOT = base64.b64decode(
    b"iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def run_that_logged(runs: Path, folder: Path, **values: object) -> Path:
    """A copy of a run with few charts, whose last row has logged `values`."""
    shutil.copytree(runs / "slow", folder)
    for name in ("mistakes.json", EVALUATION_FILE, "result.json"):  # no charts of classes
        (folder / name).unlink()
    row = {"event": "train", "optimizer_step": 3, "epoch": 1, "train/loss": 1.0, **values}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "log=dot-step-0000000003.png").write_bytes(DOT)
    return folder


def test_own_numbers_and_pictures_are_in_the_report(runs: Path, tmp_path: Path) -> None:
    values = {
        "log/noise": 0.5,
        "log/dot": {"picture": "pictures/log=dot-step-0000000003.png"},
    }
    run = read_run(run_that_logged(runs, tmp_path / "run", **values))
    text, charts = render([run])
    page = Page(text)
    assert "log/noise" in page.headings
    assert "Logged pictures" in page.headings
    assert page.addresses.count(f"data:image/png;base64,{base64.b64encode(DOT).decode()}") == 1
    assert "noise.png" in charts


def test_an_own_loss_does_not_share_the_title_of_the_loss(runs: Path, tmp_path: Path) -> None:
    run = read_run(run_that_logged(runs, tmp_path / "run", **{"log/loss": 0.5}))
    assert {"Loss", "log/loss"} <= set(Page(render([run])[0]).headings)


NO_PICTURE: list[object] = [
    *(None, 7, [], {}, "pictures/secret.png", {"picture": 7}, {"picture": None}),
    *(
        {"picture": path}
        for path in (
            "../secret.png",
            "pictures/../../secret.png",
            "secret.png",
            "pictures/link.png",
            "pictures/missing.png",
            "pictures/text.png",
            "pictures/huge.png",
            "pictures/folder.png",
            "pictures/\x00.png",
        )
    ),
    {"counts": [1, 3], "low": 0.0, "high": 2.0, "nonfinite": 0},  # as older runs have
]


def test_a_logged_value_that_is_no_picture_is_left_out(runs: Path, tmp_path: Path) -> None:
    values = {f"log/x{index}": value for index, value in enumerate(NO_PICTURE)}
    folder = run_that_logged(runs, tmp_path / "run", **values)
    (tmp_path / "secret.png").write_bytes(DOT)
    (folder / "secret.png").write_bytes(DOT)
    (folder / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "pictures" / "text.png").write_text("<svg onload='alert(1)'>")
    (folder / "pictures" / "folder.png").mkdir()
    with open(folder / "pictures" / "huge.png", "wb") as file:
        file.write(DOT)
        file.truncate(2**30)
    page, _ = render([read_run(folder)])
    _, _, logged = page.partition("Logged")
    assert [name for name in values if name in logged] == []
    assert not logged


def test_pictures_are_not_read_through_a_linked_folder(runs: Path, tmp_path: Path) -> None:
    values = {"log/dot": {"picture": "pictures/log=dot-step-0000000003.png"}}
    folder = run_that_logged(runs, tmp_path / "run", **values)
    shutil.move(folder / "pictures", tmp_path / "elsewhere")
    (folder / "pictures").symlink_to(tmp_path / "elsewhere")
    assert "Logged" not in render([read_run(folder)])[0]


def test_the_names_of_logged_values_are_text_and_not_markup(runs: Path, tmp_path: Path) -> None:
    name = '"><script>alert(1)</script>'
    values = {
        f"log/{name}a": {"picture": "pictures/log=dot-step-0000000003.png"},
        f"log/{name}c": 1.0,
    }
    text, _ = render([read_run(run_that_logged(runs, tmp_path / "run", **values))])
    assert Page(text).counts["script"] == 2, "the page's own"
    assert Page(text).counts["img"] == 1


def test_a_run_without_an_evaluation_has_gaps_in_the_table_of_runs(
    runs: Path, tmp_path: Path
) -> None:
    both = [with_few_charts(read_run(runs / name)) for name in ("fast", "slow")]
    evaluated = with_rows(both[1], [*both[1].rows, *read_run(runs / "slow").evaluations()])
    text, _ = render([both[0], evaluated])
    table = text[text.index("<table>") : text.index("</table>")]
    heads = re.findall(r"<th>(.*?)</th>", table)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert [len(row) for row in rows] == [len(heads), len(heads)]
    place = heads.index("averaged accuracy")
    assert rows[0][place] == "–"
    assert rows[1][place].endswith("%")
    assert [row[heads.index("steps")] for row in rows] == ["46", "46"]


def with_losses(run: RunReader, losses: Sequence[float]) -> RunReader:
    rows = [
        {"event": "train", "optimizer_step": step, "epoch": 1, "train/loss": loss}
        for step, loss in enumerate(losses, start=1)
    ]
    return with_rows(run, rows, result={})


def test_one_run_that_diverged_does_not_flatten_the_others(runs: Path) -> None:
    run = read_run(runs / "fast")
    usual = with_losses(run, [2 / step for step in range(1, 200)])
    diverged = with_losses(run, [2.0**step for step in range(1, 40)] + [math.inf])
    spike = with_losses(run, [1.0] * 100 + [1000.0] + [0.5] * 100)
    top = top_of("loss", ["train/loss"], [usual, usual, diverged])
    assert top is not None
    assert 2 < top < 2.2
    assert top_of("loss", ["train/loss"], [usual, usual]) is None, "nothing to cut off"
    assert top_of("loss", ["train/loss"], [spike]) == pytest.approx(1.025)
    assert top_of("loss", ["train/loss"], [diverged]) is None, "all of it is high"
    assert top_of("optim/learning_rate", ["train/loss"], [usual, usual, diverged]) is None
    assert "higher values are cut off" in draw_curves([usual, usual, diverged])[0].svg
    assert "are cut off" not in draw_curves([usual, usual])[0].svg


def test_precision_and_recall_of_each_class_are_in_the_report(runs: Path) -> None:
    run = with_few_charts(read_run(runs / "fast"))
    counts = [[8, 2], [0, 0]]
    metrics = {"eval/per_class_accuracy": [0.8, None], "eval/confusion_matrix": counts}
    text, _ = render([replace(run, folder=runs / "none", result={"metrics": metrics})])
    assert "<td>0</td><td>10</td><td>100.0%</td><td>80.0%</td>" in text
    assert "<td>1</td><td>0</td>" not in text, "no samples"


def equal_runs(runs: Path) -> list[RunReader]:
    run = with_few_charts(read_run(runs / "fast"))
    others = [replace(run, folder=runs / name) for name in ("again", "other")]
    rows = [row | {"train/loss": row["train/loss"] + 1} for row in run.rows]
    return [run, others[0], with_rows(others[1], rows)]


def test_equal_runs_are_named_and_a_curve_under_another_is_seen(runs: Path) -> None:
    text, _ = render(equal_runs(runs))
    assert "The curves of fast, again are equal and lie on each other" in text
    assert text.count("are equal") == 1
    drawn = re.findall(r'<path [^>]*style="([^"]*stroke: var\(--series-\d\)[^"]*)"', text)
    dashed = [style for style in drawn if "dasharray" in style and "linejoin" not in style]
    assert {re.findall(r"series-\d", style)[0] for style in dashed} == {"series-2"}


@needs_chromium
def test_the_table_of_runs_is_sorted_and_filtered(page_of_both: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        page.open(page_of_both.as_uri())
        names = "[...document.querySelectorAll('#top td:first-child')].map((td) => td.textContent)"
        filtered = "document.getElementById('filter')"
        click = "[...document.querySelectorAll('#top th')].at(-1).click()"
        assert page.value(names) == ["fast", "slow"]
        page.value(click)
        assert page.value(names) == ["slow", "fast"], "by the learning rate, upwards"
        page.value(click)
        assert page.value(names) == ["fast", "slow"]
        page.value(f"{filtered}.value = ' SLOW 0.01'")
        page.value(f"{filtered}.dispatchEvent(new Event('input'))")
        assert page.value(f"{names.replace('td:first', 'tr:not([hidden]) td:first')}") == ["slow"]


@needs_chromium
def test_a_browser_dashes_a_curve_that_lies_on_another(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(equal_runs(runs))[0])
    with browser(tmp_path / "profile") as page:
        page.open((tmp_path / "page.html").as_uri())
        dashes = "[0, 1, 2].map((n) => document.querySelector(`path[data-run='${n}']`).style)"
        assert page.value(f"{dashes}.map((style) => style.strokeDasharray !== '')") == [
            False,
            True,
            False,
        ]


def test_a_run_and_its_report_need_no_utf8(runs: Path, tmp_path: Path) -> None:
    """In a real interpreter, in the locale C: the name of a folder, and our own templates."""
    run = shutil.copytree(runs / "fast", tmp_path / "日本")
    code = "import sys; from accel_trainer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    variables = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0"}
    variables |= {"PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run), "--to", str(page)],
        env=variables,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "日本" in page.read_text(encoding="utf-8")


def test_a_name_in_any_script_is_text_in_a_chart_and_no_warning() -> None:
    for name in ("café", "猫", "кошка", "بطة", "แมว", "🐈"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chart = draw_chart(
                "names", title="", size=(3, 2), draw=partial(Axes.set_title, label=name)
            )
        assert name in chart.svg
