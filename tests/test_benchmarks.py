import importlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import gpu, loops, results
from benchmarks.__main__ import NAMES, ON_IMAGES, OURS, SHORTEST
from benchmarks.input_pipeline import write_noise
from benchmarks.on_gpu import copies as copied
from benchmarks.on_gpu.page import Page
from benchmarks.on_gpu.shares import SHARES_S, run_in_shares

from . import processes

ROOT = Path(__file__).parents[1]
LONG = (
    "startup",
    "plan",
    "features",
    "digests",
    "input_pipeline",
    "photos",
    "checkpointing",
    "sharded",
    "cpu_cifar",
    "fine_tuning",
    "imbalance",
    "defaults",
    "padded_lm",
    "scaling",
    "traffic",
    "gpu",
)


def test_the_tables_are_those_of_the_committed_results() -> None:
    assert (results.COMMITTED / "README.md").read_text() == results.readme(results.COMMITTED), (
        "update it: python -m benchmarks.results"
    )


@pytest.mark.skipif("BENCHMARKS_FOLDER" in os.environ, reason="is set")
def test_measuring_changes_no_committed_result_unless_it_is_recorded() -> None:
    assert results.FOLDER.parent == ROOT
    assert f"{results.FOLDER.name}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_each_benchmark_is_tried() -> None:
    assert set(SHORTEST) == set(NAMES)


@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.filterwarnings("default")  # of packages that are compared with
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NAMES]
)
def test_a_benchmark_runs_with_tiny_sizes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SHORTEST[name]
    if name in (*ON_IMAGES, "gpu"):
        options = [*options, "--cache-dir", str(tmp_path / "cache")]
    if name in ON_IMAGES:
        write_noise(tmp_path, num_train=2600)
        options = [*options, "--dataset", str(tmp_path)]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *options])
    importlib.import_module(f"benchmarks.{name}").main()
    is_measured = name not in (*ON_IMAGES, "gpu")  # cut short
    assert (tmp_path / "results" / f"{name}.json").exists() == is_measured
    if is_measured:
        assert results.readme(tmp_path) == (tmp_path / "README.md").read_text()


def take_steps(loop: str) -> None:
    model = loops.make_model("tiny").to("pretend")
    loops.LOOPS[loop](model, DataLoader(loops.Batches((32,), 8, "pretend"), batch_size=None), 8)
    assert loops.step_us(model, 8) > 0


@pytest.mark.parametrize("loop", ["raw", "raw, schedule + mean loss", "accelerate", *OURS])
def test_a_loop_takes_its_steps_on_an_accelerator(tmp_path: Path, loop: str) -> None:
    processes.run_on("pretend", take_steps, loop, folder=tmp_path)


def test_a_check_on_a_gpu_that_fails_costs_only_itself_and_rows_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page("exact", "On a GPU", tmp_path, results.environment(), time.monotonic() + 60)

    def fail() -> None:
        page.add("a table", {"step": 1})
        raise ValueError("no such kernel")

    page.attempt("a check", fail)
    page.attempt("another", partial(page.judge, "it runs", holds=True))
    page.deadline_s = time.monotonic() - 1
    page.attempt("the last", fail)
    written = json.loads((tmp_path / "gpu_exact.json").read_text())
    assert written["goals"] == [
        "**Did not hold**: a check (ValueError: no such kernel).",
        "Held: it runs.",
        "Not reached: the last.",
    ]
    assert written["tables"] == {"a table": [{"step": 1}]}
    assert "no such kernel" in capsys.readouterr().err
    assert results.section("gpu_exact", written).count("| 1 |") == 1


def test_a_check_on_a_gpu_that_is_cut_off_is_listed_as_not_reached(tmp_path: Path) -> None:
    page = Page("exact", "On a GPU", tmp_path, results.environment(), time.monotonic() + 60)
    goals = []

    def look() -> None:
        goals.extend(json.loads((tmp_path / "gpu_exact.json").read_text())["goals"])

    page.attempt_together({"one that ends": look})
    assert goals == ["Not reached: one that ends."]
    assert page.findings == []


def test_a_gpu_that_shows_nothing_in_its_share_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu_smoke.json").write_text('{"goals": ["Held: of an earlier run."]}')
    assert run_in_shares(time.monotonic() + 1, ["--tiny"], tmp_path) == 1
    summary = capfd.readouterr().out.splitlines()[-len(SHARES_S) - 2 :]
    assert "cut off: 0 held, 1 did not" in summary[0]
    not_run = [[part, "not", "run"] for part in [*SHARES_S][1:]]
    assert [line.split() for line in summary[1:-2]] == not_run
    assert summary[-2:] == ["  smoke: no result.", f"results: {tmp_path}"]


def test_the_share_of_copies_under_compute_is_read_from_a_trace() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    copy = "Memcpy HtoD (Pinned -> Device)"
    kernels = [
        event("kernel", "gemm", 0, 4),
        event("kernel", "relu", 2, 4),
        event("kernel", "gemm", 8, 10),
    ]
    copies = [
        event("gpu_memcpy", copy, 1, 9),
        event("gpu_memcpy", copy, 30, 1),
        event("gpu_memcpy", "DtoH", 50, 9),
    ]
    assert copied.under_compute([*copies, *kernels, {"name": "process_name"}]) == (2, 0.7)


def test_a_table_without_a_row_is_no_error() -> None:
    result = {
        "title": "t",
        "how": "",
        "environment": results.environment() | {"load_average_after": 0},
        "goals": [],
    }
    assert "No row was measured." in results.section("gpu", {**result, "tables": {"empty": []}})


def test_nothing_is_measured_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    assert capsys.readouterr().out.startswith("no GPU: nothing is measured")
    assert list(tmp_path.iterdir()) == []
