"""Runs the numeric tests as on other CPUs, with limited instruction sets of torch, oneDNN and MKL.

`make isa-test` prints a table of the levels; `--sample` runs few tests at the lowest level, and
with two threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# What compares numbers that a model, an optimizer or an augmentation computed.
NUMERIC = (
    "tests/training",
    "tests/optim",
    "tests/vision",
    "tests/data",
    "tests/checkpoint/test_state_dict.py",
    "tests/distributed/test_fsdp.py",
    "tests/distributed/test_sync_batch_norm.py",
    "tests/distributed/test_elastic.py",
    "tests/checks/test_out_of_memory.py",
    "tests/training/step/test_nonfinite_report.py",
    "tests/test_own_recipes.py",
    "tests/test_recipes.py",
    "tests/core/test_pairwise.py",
    "tests/distributed/test_fsdp_models.py",
    "tests/distributed/test_collectives.py",
    "tests/checkpoint/test_manager.py",
    "tests/checkpoint/test_sharded.py",
    "tests/checkpoint/test_unsaved_state.py",
    "tests/callbacks/test_metric_logger.py",
    "tests/run/test_own_optimizer.py",
    "tests/run/test_session.py",
    "tests/cli/recipe/test_dry_run.py",
    "tests/cli/test_evaluate.py",
    "tests/cli/test_lr_find.py",
    "tests/cli/test_export.py",
    "tests/cli/test_export_own.py",
    "tests/cli/test_card_code.py",
    "tests/cli/test_rerun.py",
    "tests/test_pretend.py",
)
FEW = (
    "tests/vision/test_photo_recipe.py",
    "tests/optim/test_muon.py",
    "tests/training/strategy/test_exact.py",
)
LOWEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
}
TWO_THREADS = {"TEST_THREADS": "2"}
# For each setting the flag of /proc/cpuinfo without which it would ask for what the CPU lacks.
LIMITS: Mapping[str, Mapping[str, str]] = {
    "ATEN_CPU_CAPABILITY": {"default": "", "avx2": "avx2", "avx512": "avx512f"},
    "ONEDNN_MAX_CPU_ISA": {
        "SSE41": "sse4_1",
        "AVX2": "avx2",
        "AVX512_CORE": "avx512bw",
        "AVX512_CORE_AMX": "amx_tile",
    },
    "MKL_ENABLE_INSTRUCTIONS": {"SSE4_2": "sse4_2", "AVX2": "avx2", "AVX512": "avx512f"},
}


@dataclass(frozen=True)
class Outcome:
    """What the tests said at one level."""

    passed: int
    failed: Sequence[str]
    skipped: int
    seconds: float


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this CPU, none if the system does not list them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    listed = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(listed.partition(":")[2].split())


def levels(flags: frozenset[str]) -> dict[str, dict[str, str]]:
    """Return the environment of each level that a CPU with `flags` has."""
    found: dict[str, dict[str, str]] = {"as it is": {}, "2 threads": TWO_THREADS}
    for variable, values in LIMITS.items():
        for value, needed in values.items():
            if not needed or needed in flags:
                found[f"{variable}={value}"] = {variable: value}
    if "sse4_2" in flags:
        found["the lowest of all"] = LOWEST
        found["the lowest of all, 2 threads"] = LOWEST | TWO_THREADS
    return found


def run(level: Mapping[str, str], tests: Sequence[str], *, jobs: int) -> Outcome:
    """Run `tests` at a level."""
    # A reduced precision of float32 is a choice of the user, not a property of a CPU.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {*LIMITS, "DNNL_DEFAULT_FPMATH_MODE"}
    }
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            "--whole-runs",
            "-n",
            str(jobs),
            "--dist",
            "worksteal",
        ]
        subprocess.run(
            [*command, "--junitxml", str(report), *tests],
            cwd=ROOT,
            env=environment | level,
            check=False,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = [{child.tag for child in case} & {"failure", "error", "skipped"} for case in cases]
    return Outcome(
        passed=sum(not kind for kind in kinds),
        failed=[
            str(case.get("name"))
            for case, kind in zip(cases, kinds, strict=True)
            if kind - {"skipped"}
        ],
        skipped=sum(kind == {"skipped"} for kind in kinds),
        seconds=time.monotonic() - start_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample", action="store_true", help="only few tests, at the lowest level with two threads"
    )
    parser.add_argument("--level", help="only levels whose name contains this")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("tests", nargs="*", help="instead of the numeric tests")
    options = parser.parse_args()
    chosen = levels(cpu_flags())
    if options.sample:
        chosen = dict([list(chosen.items())[-1]])
    tests = options.tests or (FEW if options.sample else NUMERIC)
    rows = ["| level | passed | failed | skipped | s |", "|---|---|---|---|---|"]
    has_failed = False
    for name, level in chosen.items():
        if options.level is not None and options.level not in name:
            continue
        print(f"--- {name}", flush=True)
        outcome = run(level, tests, jobs=options.jobs)
        failed = ", ".join(outcome.failed) or "0"
        rows.append(
            f"| {name} | {outcome.passed} | {failed} | {outcome.skipped} | {outcome.seconds:.0f} |"
        )
        has_failed |= bool(outcome.failed) or not outcome.passed
    print("\n".join(rows))
    raise SystemExit(int(has_failed))


if __name__ == "__main__":
    main()
