"""The tests that need a GPU, and what a first user would meet: warnings, other losses than a
CPU's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from .. import results
from .page import Page, Setting
from .runs import SMALL, rows, train

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "left out"}
MAX_LOSS_DIFFERENCE = 1e-3
FIRST_STEPS = (*SMALL, "--max-steps", "20", "--lr", "0.01", "--trainer.log-every-n-steps", "1")


def run(page: Page, setting: Setting) -> None:
    tests = "tests/training/test_pretend_device.py" if setting.is_tiny else "tests"
    page.attempt("the tests that need a GPU", partial(_run_tests, page, tests))
    with tempfile.TemporaryDirectory() as folder:
        page.attempt("warnings", partial(list_warnings, page, setting, Path(folder)))
        page.attempt("first steps", partial(compare_first_steps, page, setting, Path(folder)))
        page.attempt(
            "start with and without a visible GPU",
            partial(_start_both_ways, page, setting, Path(folder)),
        )


def _run_tests(page: Page, tests: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "--continue-on-collection-errors",
            "--junitxml",
            str(report),
            tests,
        ]
        subprocess.run(command, cwd=results.ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = []
    for case in cases:
        child = next((child for child in case if child.tag in OUTCOMES), None)
        said = "" if child is None else child.get("message", "").strip()
        outcomes.append("passed" if child is None else OUTCOMES[child.tag])
        page.add(
            "Tests that need a GPU",
            {
                "test": case.get("name"),
                "outcome": outcomes[-1],
                "s": float(case.get("time", 0)),
                "why": said.splitlines()[-1][:200] if said else None,
            },
        )
    listed = ", ".join(
        f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "left out")
    )
    page.judge(
        f"the tests that need a GPU pass ({listed})",
        holds="passed" in outcomes and "failed" not in outcomes,
    )


def list_warnings(page: Page, setting: Setting, folder: Path) -> None:
    """Train 20 steps, and list what they warn of."""
    said = train(setting, folder / "warned", *FIRST_STEPS, environ={"PYTHONWARNINGS": "always"})
    found = sorted({line.strip()[:200] for line in said.splitlines() if "Warning: " in line})
    for line in found:
        page.add("Warnings of 20 steps", {"warning": line})
    page.judge(f"20 steps warn of nothing ({len(found)} warnings)", holds=not found)


def compare_first_steps(page: Page, setting: Setting, folder: Path) -> None:
    """Train 20 steps, and compare their losses with a CPU's."""
    train(setting, folder / "here", *FIRST_STEPS)
    train(setting, folder / "cpu", *FIRST_STEPS, environ={"ACCELERATE_USE_CPU": "true"})
    here, cpu = (rows(folder / name, "train/loss") for name in ("here", "cpu"))
    largest = max(abs(one - other) for one, other in zip(here, cpu, strict=True))
    page.add(
        "20 steps in float32",
        {"steps": len(here), "largest difference of the losses to a CPU's": largest},
    )
    page.judge(
        f"20 losses are within {MAX_LOSS_DIFFERENCE:g} of a CPU's",
        holds=largest <= MAX_LOSS_DIFFERENCE,
    )


def _start_both_ways(page: Page, setting: Setting, folder: Path) -> None:
    for name, environ in (("visible", {}), ("hidden", {"CUDA_VISIBLE_DEVICES": ""})):
        said = train(
            setting, folder / name, *SMALL, "--max-steps", "2", "--dry-run", environ=environ
        )
        page.add("--dry-run", {"GPU": name, "said": said.strip().splitlines()[-1][:200]})
