"""The tables of docs/costs.md: a few of the results, including bad ones.

`python -m benchmarks.summary` updates them, and marks the rows whose code has changed since. With
`--check` it counts these rows, and fails if the page does not mark them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from .results import COMMITTED, ROOT, cell, changed_since

_PAGE = ROOT / "docs" / "costs.md"
MARK = " \\*"
_STEP = ("ours, all on", "accelerate", "Lightning", "HF Trainer")
_SAVE = ("accel_trainer", "accelerate save_state")

# Label of the row; result, table and column to take it from; rows there for the columns of the
# page; unit.
_ROWS: Sequence[tuple[str, str, str, str, Sequence[str | int], str]] = (
    (
        "a step of a tiny network, relative to a hand-written loop",
        "overhead",
        "Linear(32, 10), batch 128",
        "of raw",
        _STEP,
        "",
    ),
    (
        "a step of ResNet-20, relative to a hand-written loop",
        "overhead",
        "ResNet-20, batch 128",
        "of raw",
        _STEP,
        "",
    ),
    (
        "training pauses for a checkpoint of 89 MB",
        "checkpointing",
        "How long training pauses",
        "median ms",
        _SAVE,
        " ms",
    ),
    (
        "until it is on disk (ours is hashed and synced)",
        "checkpointing",
        "Until the checkpoint is on the disk (ours is hashed and synced, the others are not)",
        "median ms",
        _SAVE,
        " ms",
    ),
    (
        "loading it (ours is verified against its hashes)",
        "checkpointing",
        "Load into a live model and optimizer (ours verified by hash)",
        "median ms",
        _SAVE,
        " ms",
    ),
    (
        "one evaluation batch of a tiny network",
        "evaluation",
        "One process on a CPU",
        "us/batch",
        ("ours", "gather_for_metrics per batch"),
        " us",
    ),
)


# The same for what was measured on a GPU, with the loops of a row.
_ON_GPU: Sequence[tuple[str, str, str, str, Sequence[str | int], str]] = (
    (
        "a step of a single linear layer, relative to a hand-written loop",
        "gpu_speed",
        "A step of tiny, batch 128, float32",
        "of raw",
        _STEP,
        "",
    ),
    (
        "a step of ResNet-18 in float32, relative to a hand-written loop",
        "gpu_speed",
        "A step of resnet18, batch 128, float32",
        "of raw",
        _STEP[:1],
        "",
    ),
    (
        "the same in microseconds",
        "gpu_speed",
        "A step of resnet18, batch 128, float32",
        "us/step",
        _STEP[:1],
        " us",
    ),
    (
        "peak memory of that ResNet-18",
        "gpu_memory",
        "Peak of resnet18, batch 128",
        "MiB",
        _STEP[:1],
        " MiB",
    ),
    (
        "the same, of a hand-written loop",
        "gpu_memory",
        "Peak of resnet18, batch 128",
        "MiB",
        ("raw",),
        " MiB",
    ),
    (
        "training pauses to copy ResNet-50 and its momentum",
        "gpu_earned",
        "A copy of the state of ResNet-50 and its momentum",
        "training pauses ms",
        ("pinned",),
        " ms",
    ),
    (
        "the same, if the host's memory were not pinned",
        "gpu_earned",
        "A copy of the state of ResNet-50 and its momentum",
        "training pauses ms",
        ("pageable",),
        " ms",
    ),
    (
        "photos per second into a ResNet-50, bf16, not compiled, 16 workers",
        "gpu_photos",
        "resnet50, bf16, 224 pixels, batch 256",
        "photos/s",
        (16,),
        "",
    ),
    (
        "of that time, waiting for photos",
        "gpu_photos",
        "resnet50, bf16, 224 pixels, batch 256",
        "waiting for data %",
        (16,),
        "%",
    ),
    (
        "`recipes/configs/cifar10_94.yaml`, not compiled, training",
        "gpu_records",
        "Whole trainings on the images of --dataset",
        "training s",
        (0,),
        " s",
    ),
    (
        "the same, from start to end",
        "gpu_records",
        "Whole trainings on the images of --dataset",
        "start to end s",
        (0,),
        " s",
    ),
    (
        "its accuracy on CIFAR-10 as JPEG of quality 75 (goal: 93.7%; original images not tried)",
        "gpu_records",
        "Whole trainings on the images of --dataset",
        "accuracy %",
        (0,),
        "%",
    ),
)


def table() -> str:
    """Return the table of what was measured on a CPU as Markdown."""
    lines = [
        "| median | accel_trainer | accelerate | Lightning | HF Trainer |",
        "|---|---|---|---|---|",
    ]
    for label, result, caption, column, names, unit in _ROWS:
        rows = _read(result)["tables"][caption]
        numbers = [cell(_row(rows, name)[column]) + unit for name in names]
        lines.append(
            f"| {' | '.join([named(label, result), *numbers, *['-'] * (4 - len(numbers))])} |"
        )
    return "\n".join(lines)


def goals_table() -> str:
    """Return the goals of what was measured on a CPU as Markdown, with what was reached."""
    results = dict.fromkeys(result for _, result, *_ in _ROWS)
    goals = [goal for result in results for goal in _read(result)["goals"] if ": " in goal]
    return "\n".join(["| goal: reached |", "|---|", *(f"| {goal} |" for goal in goals)])


def gpu_table() -> str:
    """Return the table of what was measured on a GPU as Markdown."""
    lines = [
        "| on a GPU | measured on | accel_trainer | accelerate | Lightning | HF Trainer |",
        "|---|---|---|---|---|---|",
    ]
    for label, result, caption, column, names, unit in _ON_GPU:
        page = _read(result)
        rows = page["tables"][caption]
        numbers = [cell(_row(rows, name)[column]) + unit for name in names]
        gpu = page["environment"]["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
        cells = [named(label, result), gpu, *numbers, *["-"] * (4 - len(numbers))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(result: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((COMMITTED / "results" / f"{result}.json").read_text())
    return found


def _row(rows: Sequence[dict[str, Any]], name: str | int) -> dict[str, Any]:
    columns = ("loop", "what", "evaluation", "memory", "workers", "seed")
    return next(row for row in rows if name in [row.get(column) for column in columns])


def named(label: str, result: str) -> str:
    """Return the label of a row, marked if the code has changed since it was measured."""
    return label + MARK * bool(changed_since(_read(result)))


def write() -> None:
    """Replace the tables in the page."""
    text = _PAGE.read_text()
    made_for = {"median": table(), "goal: reached": goals_table(), "on a GPU": gpu_table()}
    for first, made in made_for.items():
        start = text.index(f"| {first} |")
        text = text[:start] + made + text[text.index("\n\n", start) :]
    _PAGE.write_text(text)


def check() -> None:
    """List the rows whose code has changed since, and fail if the page does not mark them."""
    text = _PAGE.read_text()
    labels = [named(label, result) for label, result, *_ in (*_ROWS, *_ON_GPU)]
    stale = [label for label in labels if label.endswith(MARK)]
    if stale:
        print(f"docs/costs.md: measured before later changes of the code: {len(stale)} rows")
    if missing := [label for label in stale if f"| {label} |" not in text]:
        sys.exit(f"docs/costs.md does not say so: python -m benchmarks.summary ({missing[0]})")


if __name__ == "__main__":
    check() if "--check" in sys.argv else write()
