"""The numbers of the page of costs match the committed results."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results, summary
from benchmarks.results import cell

from .pages import ROOT

PAGE = (ROOT / "docs" / "costs.md").read_text()


def result(name: str) -> Any:
    return json.loads((ROOT / "recipes" / "results" / f"{name}.json").read_text())


def row(text: str) -> str:
    """Return the one line of the page that has `text`."""
    (line,) = [line for line in PAGE.splitlines() if text in line]
    return line


def test_the_tables_of_costs_are_those_of_the_benchmarks() -> None:
    # Which rows are marked is known only with the history of the repository.
    page, *tables = (
        text.replace(summary.MARK, "")
        for text in (PAGE, summary.table(), summary.goals_table(), summary.gpu_table())
    )
    assert all(table in page for table in tables), "update it: python -m benchmarks.summary"


def test_the_readme_has_the_numbers_of_the_page_of_costs() -> None:
    cells = row("a step of ResNet-20, relative").split(" | ")
    ours, accelerate, lightning, trainer = (each.strip(" |") for each in cells[1:])
    shown = " | ".join([ours, accelerate, trainer, lightning])
    (line,) = re.findall(r"^\| a step of ResNet-20 .*", (ROOT / "README.md").read_text(), re.M)
    assert f" | {shown} | " in line
    assert (summary.MARK in cells[0]) == ("before later changes of the code" in line)


@pytest.mark.parametrize(("changed", "is_stale"), [("other.py", False), ("code/step.py", True)])
def test_a_row_is_marked_once_its_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, is_stale: bool
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        run = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, check=True
        )
        return run.stdout.decode().strip()

    (tmp_path / "code").mkdir()
    for name in ("other.py", "code/step.py"):
        (tmp_path / name).touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "measured")
    found = {"environment": {"commit": git("rev-parse", "HEAD")}, "modules": ["code"]}
    (tmp_path / changed).write_text("changed")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert bool(results.changed_since(found)) == is_stale
    assert not results.changed_since({**found, "environment": {"commit": "0000000+"}})


def test_the_results_are_those_of_the_runs() -> None:
    runs = result("cifar10_cpu")["runs"]
    accuracies = [100 * run["accuracy"] for run in runs]
    shown = f"{statistics.mean(accuracies):.1f}% +- {statistics.stdev(accuracies):.2f} without TTA"
    line = row("cifar10_cpu.yaml`, narrow")
    assert shown in line
    assert f"; {min(run['wall_s'] for run in runs):.0f} s for the seed" in line
    assert f"| {len(runs)} |" in line


def accuracy(*, epochs: int, batch: int, warmup: int, seed: int) -> float:
    """Return a test accuracy in percent of the runs with large batches."""
    wanted = {"epochs": epochs, "global_batch_size": batch, "warmup_epochs": warmup, "seed": seed}
    (run,) = [run for run in result("large_batches")["runs"] if wanted.items() <= run.items()]
    return 100 * float(run["accuracy"])


def test_the_page_of_batches_is_that_of_the_runs() -> None:
    page = (ROOT / "docs" / "batches.md").read_text()
    for batch, warmup, named in ((128, 1, "1 epoch"), (1024, 1, "1 epoch"), (1024, 0, "none")):
        runs = [(16, 0), (16, 1), (8, 0)]
        cells = [f"{accuracy(epochs=e, batch=batch, warmup=warmup, seed=s):.2f}%" for e, s in runs]
        assert f"| {' | '.join([str(batch), named, *cells])} |" in page
    losses = [
        accuracy(epochs=16, batch=128, warmup=1, seed=seed)
        - accuracy(epochs=16, batch=1024, warmup=1, seed=seed)
        for seed in (0, 1)
    ]
    assert f"{min(losses):.2f} to {max(losses):.2f} points less | {len(losses)} |" in PAGE


def test_the_accuracy_of_an_exact_reduction_is_that_of_the_runs() -> None:
    page = " ".join((ROOT / "docs" / "exactness.md").read_text().split())
    for name in ("cifar10_exact", "cifar10_cpu"):
        accuracies = [100 * run["accuracy"] for run in result(name)["runs"]]
        assert len(accuracies) == 3
        assert f"{statistics.mean(accuracies):.1f}% +- {statistics.stdev(accuracies):.2f}" in page


def test_no_number_with_a_unit_stands_in_the_prose_without_a_result() -> None:
    """Measurements are in tables, which are compared with the results."""
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text() + PAGE, flags=re.DOTALL)
    outside = "\n".join(line for line in prose.splitlines() if not line.startswith("|"))
    assert re.findall(r"\d[\d.,]* ?(?:%|ms|us|s|x|times|images/s|GB|MB)\b", outside) == []


def test_the_page_of_comparisons_is_that_of_the_benchmark() -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    path = ROOT / "benchmarks" / "results" / "comparisons.json"
    rows = json.loads(path.read_text())["tables"]["B against A"]
    shown = ("B", "verdict", "gain in points", "rho", "independent runs for the same precision")
    for row in rows:
        assert f"| {' | '.join(cell(row[name]) for name in shown)} |" in page


def test_the_example_of_a_comparison_is_what_the_benchmark_prints() -> None:
    printed = (ROOT / "benchmarks" / "results" / "compare_example.txt").read_text()
    (example,) = re.findall(
        r"```text\n(.*?)```", (ROOT / "docs" / "compare.md").read_text(), re.DOTALL
    )
    assert example in printed
