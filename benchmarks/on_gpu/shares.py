"""All that matters on a GPU in a given number of minutes: each part is a process with a share of
the time, which it cannot exceed; a summary of one screen comes last."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import results

# In this order. Of eight minutes, in seconds: what is left over goes to the last part.
SHARES_S = {
    "smoke": 60,
    "speed": 120,
    "exact": 90,
    "records": 60,
    "photos": 60,
    "nccl": 20,
    "memory": 40,
    "bits": 30,
}
_OF_S = sum(SHARES_S.values())
_MARGIN = 0.9  # of its share, after which a part begins no further check
_MAX_SHOWN = 24  # findings that did not hold: the summary stays on one screen


def run_in_shares(minutes: float, flags: Sequence[str], folder: Path) -> int:
    """Run the parts, each with its share of `minutes`, and print the summary.

    `flags` are those of `benchmarks.gpu` that all parts get. Return 1, after the first part, if it
    failed: nothing that follows is worth the time of a GPU then.
    """
    end_s = time.monotonic() + 60 * minutes
    ended: dict[str, str] = {}
    for part, share_s in SHARES_S.items():
        is_last = part == list(SHARES_S)[-1]
        left_s = end_s - time.monotonic()
        limit_s = left_s if is_last else min(left_s, share_s * 60 * minutes / _OF_S)
        if limit_s > 0:
            ended[part] = _run_part(part, flags, folder, limit_s=limit_s)
        if part == "smoke" and _red(folder, part):
            print(f"\nsmoke did not hold: stopping here, {end_s - time.monotonic():.0f} s saved")
            break
    print("\n".join(["", *_summary(ended, folder)]), flush=True)
    return int(bool(_red(folder, "smoke")))


def _run_part(part: str, flags: Sequence[str], folder: Path, *, limit_s: float) -> str:
    """Run a part in a process of its own, killed with all that it started at its end."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--to", str(folder)]
    words += ["--time-s", f"{_MARGIN * limit_s:.0f}", *flags]
    start_s = time.monotonic()
    process = subprocess.Popen(words, cwd=results.ROOT, start_new_session=True)
    try:
        how = f"exit {process.wait(timeout=limit_s)}"
    except subprocess.TimeoutExpired:
        how = "cut off"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return f"{time.monotonic() - start_s:.0f} of {limit_s:.0f} s, {how}"


def _findings(folder: Path, part: str) -> list[str]:
    try:
        found: list[str] = json.loads((folder / f"gpu_{part}.json").read_text())["goals"]
    except FileNotFoundError:
        return []
    return found


def _red(folder: Path, part: str) -> list[str]:
    """Return what did not hold; a part without a finding did not get that far."""
    found = _findings(folder, part)
    return [line for line in found if "Did not hold" in line] if found else ["no result"]


def _summary(ended: dict[str, str], folder: Path) -> Iterator[str]:
    shown: list[str] = []
    for part in SHARES_S:
        if part not in ended:
            yield f"{part:8} not run"
            continue
        found = _findings(folder, part)
        held = sum(line.startswith("Held") for line in found)
        not_tried = sum(line.startswith("Not tried") for line in found)
        red = _red(folder, part)
        yield f"{part:8} {ended[part]}: {held} held, {len(red)} did not, {not_tried} not tried"
        shown += [f"  {part}: {line.removeprefix('**Did not hold**: ')}"[:160] for line in red]
    yield from shown[:_MAX_SHOWN]
    if len(shown) > _MAX_SHOWN:
        yield f"  and {len(shown) - _MAX_SHOWN} more"
    yield f"results: {folder.resolve()}"
