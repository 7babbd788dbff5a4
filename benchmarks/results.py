"""Writes results as JSON, one file per benchmark, with hardware and versions; and the tables of the
README."""

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

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).parent
"""The results that the documentation quotes, and their README."""
FOLDER = Path(os.environ.get("BENCHMARKS_FOLDER", ROOT / ".benchmarks"))
"""Where results and their README are written. Not over the committed ones, unless that is asked."""

Row = dict[str, Any]

_STEP = (
    "accel_trainer/training/step",
    "accel_trainer/training/strategy",
    "accel_trainer/training/tasks",
    "accel_trainer/training/trainer.py",
    "accel_trainer/core/rng.py",
)
# Files and folders that a result is about: it is stale once one of them has changed.
MODULES: Mapping[str, Sequence[str]] = {
    "overhead": _STEP,
    "checkpointing": ("accel_trainer/checkpoint",),
    "evaluation": ("accel_trainer/training/evaluation",),
    "gpu_speed": _STEP,
    "gpu_memory": _STEP,
    "gpu_earned": ("accel_trainer/checkpoint/staging.py",),
    "gpu_photos": ("accel_trainer/vision/data",),
    "gpu_records": (*_STEP, "accel_trainer/vision"),
}


def environment() -> dict[str, Any]:
    """Return the hardware, the versions and the load of the machine."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    packages = (
        *("accelerate", "torch", "numpy", "lightning", "pytorch-accelerated", "transformers"),
        *("datasets", "timm", "torchvision", "webdataset", "litdata"),
    )
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
        "commit": _commit(),
    }


# Of the code: what the benchmark before this one wrote makes no other commit of it.
_WRITTEN = (":!benchmarks/results", ":!*README.md", ":!docs/costs.md")
_CHANGES = ("status", "--porcelain", "-uno", ".", *_WRITTEN)


def _commit() -> str:
    """Return the commit of the code, with a + if files differ from it.

    `BENCHMARKS_COMMIT` names it for a copy of the files whose repository is missing or older.
    """
    if named := os.environ.get("BENCHMARKS_COMMIT"):
        return named
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git(*_CHANGES) else "")


def changed_since(result: Mapping[str, Any]) -> list[str]:
    """Return the files of its modules that have changed since a result was measured.

    There are none where there is no git, or no such commit.
    """
    commit = result["environment"]["commit"].rstrip("+")
    modules = result.get("modules")
    return _git("diff", "--name-only", commit, "--", *modules).splitlines() if modules else []


def _git(*arguments: str) -> str:
    """Return what git prints; nothing where there is no git, or no repository."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
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
    command: str | None = None,
    folder: Path | None = None,
    is_shown: bool = True,
) -> None:
    """Print a result if `is_shown`.

    If `is_kept`, write `<name>.json` to `folder`: None for `results`, and its README.

    `started` is the environment before the first measurement; `command` is what measures it, None:
    its own name.
    """
    result = {
        "title": title,
        "how": how,
        "environment": {**started, "load_average_after": round(os.getloadavg()[0], 1)},
        "modules": [*MODULES.get(name, ())],
        "goals": list(goals),
        "tables": {caption: list(rows) for caption, rows in tables.items()},
    }
    if command is not None:
        result["command"] = command
    if is_shown:
        print(section(name, result))
    if is_kept and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    elif is_kept:
        (FOLDER / "results").mkdir(parents=True, exist_ok=True)
        (FOLDER / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        write_readme(FOLDER)


def readme(folder: Path) -> str:
    """Return the text of `README.md`, generated from all results of a folder."""
    lines = [
        "# Benchmarks",
        "",
        "Generated by `python -m benchmarks --record`, or for one benchmark with its name; do not "
        "edit. Ratios compare measurements of the same interleaved run. Absolute numbers "
        "depend on the machine and its load.",
        "",
    ]
    for path in sorted((folder / "results").glob("*.json")):
        lines.append(section(path.stem, json.loads(path.read_text())))
    return "\n".join(lines)


def write_readme(folder: Path) -> None:
    """Generate `README.md` from all results of a folder."""
    (folder / "README.md").write_text(readme(folder))


def section(name: str, result: Mapping[str, Any]) -> str:
    """Return a result as it stands in the README."""
    where = result["environment"]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    lines = [
        f"## {result['title']}" + (f" ({where['gpu']})" if where["gpu"] else ""),
        "",
        f"`python -m {result.get('command', f'benchmarks.{name}')}`. {result['how']}",
        "",
        f"{where['gpu'] or where['cpu']}, {where['cores']} cores shared with other work (load "
        f"{where['load_average']} to {where['load_average_after']}); {versions}; commit "
        f"{where['commit']}.",
        "",
    ]
    for caption, rows in result["tables"].items():
        lines += [f"**{caption}**", "", *_table(rows), ""]
    return "\n".join(lines + [f"- {goal}" for goal in result["goals"]] + [""])


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["No row was measured."]
    columns = [column for column in rows[0] if column != "samples"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(cell(row.get(column)) for column in columns)} |")
    return lines


def cell(value: Any) -> str:
    """Return a value as shown in a table."""
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


def interleave(
    names: Sequence[str], measure: Callable[[str], Row], *, repeats: int
) -> dict[str, list[Row]]:
    """Measure all in `repeats` interleaved rounds, so that a busy minute affects all of them."""
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
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    row: Row = json.loads(run.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    write_readme(COMMITTED)
