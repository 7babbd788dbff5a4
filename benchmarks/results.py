"""Results as JSON, one file per benchmark, with all that is needed to judge a number; and the tables made of them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent

Row = dict[str, Any]


def environment() -> dict[str, Any]:
    """Return hardware, versions and how busy the machine is: a number belongs to all of them."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    packages = ("accelerate", "torch", "numpy", "lightning", "pytorch-accelerated", "transformers")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 1),
        "versions": versions,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git(*_CHANGES) else ""),
    }


# Of the code: what the benchmark before this one wrote makes no other commit of it.
_CHANGES = ("status", "--porcelain", "-uno", ".", ":!benchmarks/results", ":!*README.md")


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip()


def write(
    name: str,
    *,
    title: str,
    how: str,
    tables: Mapping[str, Sequence[Row]],
    goals: Sequence[str] = (),
    started: Mapping[str, Any],
    is_kept: bool = True,
) -> None:
    """Print a result, and unless it is not to be kept write `results/<name>.json` and renew the README.

    `started` is the environment before the first measurement.
    """
    result = {
        "title": title,
        "how": how,
        "environment": {**started, "load_average_after": round(os.getloadavg()[0], 1)},
        "goals": list(goals),
        "tables": {caption: list(rows) for caption, rows in tables.items()},
    }
    print(_section(name, result))
    if is_kept:
        (FOLDER / "results").mkdir(exist_ok=True)
        (FOLDER / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        write_readme()


def readme() -> str:
    """Return the text of `README.md`, made of all results."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`, or one at a time by `python -m benchmarks NAME`; not edited by hand. Ratios compare "
        "within one interleaved run: absolute numbers belong to the machine and its load.",
        "",
    ]
    for path in sorted((FOLDER / "results").glob("*.json")):
        lines.append(_section(path.stem, json.loads(path.read_text())))
    return "\n".join(lines)


def write_readme() -> None:
    """Make `README.md` of all results."""
    (FOLDER / "README.md").write_text(readme())


def _section(name: str, result: Mapping[str, Any]) -> str:
    where = result["environment"]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    lines = [
        f"## {result['title']}",
        "",
        f"`python -m benchmarks.{name}`. {result['how']}",
        "",
        f"{where['gpu'] or where['cpu']}, {where['cores']} cores shared with other work (load "
        f"{where['load_average']} to {where['load_average_after']}); {versions}; commit {where['commit']}.",
        "",
    ]
    for caption, rows in result["tables"].items():
        lines += [f"**{caption}**", "", *_table(rows), ""]
    return "\n".join(lines + [f"- {goal}" for goal in result["goals"]] + [""])


def _table(rows: Sequence[Row]) -> list[str]:
    columns = [column for column in rows[0] if column != "samples"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(cell(row.get(column)) for column in columns)} |")
    return lines


def cell(value: Any) -> str:
    """Return a value as it stands in a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def spread(samples: Sequence[float]) -> Row:
    """Return n, median, and the smallest and largest of a measurement."""
    return {
        "n": len(samples),
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
    }


def interleave(names: Sequence[str], measure: Callable[[str], Row], *, repeats: int) -> dict[str, list[Row]]:
    """Measure all in turn, `repeats` times over, so that a busy minute of the machine touches all alike."""
    measured: dict[str, list[Row]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            measured[name].append(measure(name))
            print(".", end="", flush=True)
    print()
    return measured


def in_process(module: str, *arguments: str) -> Row:
    """Run `python -m benchmarks.<module> <arguments>` and return the JSON of its last line."""
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    row: Row = json.loads(run.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    write_readme()
