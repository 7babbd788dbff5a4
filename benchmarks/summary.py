"""The table of docs/costs.md: a few of the results, including bad ones.

`python -m benchmarks.summary` updates it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .results import COMMITTED, ROOT, cell

_STEP = ("ours, all on", "accelerate", "Lightning", "HF Trainer")
_SAVE = ("accel_trainer", "accelerate save_state")

# Label of the row; result, table and column to take it from; rows there for the columns of the
# page; unit.
_ROWS: Sequence[tuple[str, str, str, str, Sequence[str], str]] = (
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


def table() -> str:
    """Return the table as Markdown."""
    lines = [
        "| median | accel_trainer | accelerate | Lightning | HF Trainer |",
        "|---|---|---|---|---|",
    ]
    for label, result, caption, column, names, unit in _ROWS:
        rows = json.loads((COMMITTED / "results" / f"{result}.json").read_text())["tables"][caption]
        numbers = [cell(_row(rows, name)[column]) + unit for name in names]
        lines.append(f"| {' | '.join([label, *numbers, *['-'] * (4 - len(numbers))])} |")
    return "\n".join(lines)


def _row(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(
        row for row in rows if name in (row.get("loop"), row.get("what"), row.get("evaluation"))
    )


def write() -> None:
    """Replace the table in the page."""
    path = ROOT / "docs" / "costs.md"
    text = re.sub(
        r"^\| median .*?\n(?=\n)", lambda _: table() + "\n", path.read_text(), flags=re.M | re.S
    )
    path.write_text(text)


if __name__ == "__main__":
    write()
