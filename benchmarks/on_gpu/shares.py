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
from .page import FAILED, HELD, NOT_REACHED

# In this order. Of eight minutes, in seconds: what a part leaves is shared by those after it.
SHARES_S = {
    "smoke": 50,
    "speed": 130,
    "exact": 90,
    "bits": 80,
    "memory": 40,
    "photos": 40,
    "nccl": 20,
    "records": 30,
}
_MARGIN = 0.9  # of its share, after which a part begins no further check
_MAX_SHOWN = 24  # lines on what did not hold or was not reached: the summary stays on one screen


def run_in_shares(end_s: float, flags: Sequence[str], folder: Path) -> int:
    """Run the parts, each with its share of the time until `end_s` of `time.monotonic`, and print
    the summary.

    `flags` are those of `benchmarks.gpu` that all parts get. Return 1, after the first part, if it
    failed: nothing that follows is worth the time of a GPU then.
    """
    ended: dict[str, str] = {}
    to_come_s = sum(SHARES_S.values())
    for part, share_s in SHARES_S.items():
        limit_s = (end_s - time.monotonic()) * share_s / to_come_s
        to_come_s -= share_s
        if limit_s > 0:
            ended[part] = _run_part(part, flags, folder, limit_s=limit_s)
        if part == "smoke" and not _holds(folder, part):
            print(f"\nsmoke did not hold: stopping here, {end_s - time.monotonic():.0f} s saved")
            break
    print("\n".join(["", *_summary(ended, folder)]), flush=True)
    return int(not _holds(folder, "smoke"))


def _run_part(part: str, flags: Sequence[str], folder: Path, *, limit_s: float) -> str:
    """Run a part in a process of its own, killed with all that it started at its end."""
    _page_of(folder, part).unlink(missing_ok=True)  # of an earlier run
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


def _page_of(folder: Path, part: str) -> Path:
    return folder / f"gpu_{part}.json"


def _holds(folder: Path, part: str) -> bool:
    """Return whether something was found to hold, and nothing not to."""
    return bool(_findings(folder, part, HELD)) and not _findings(folder, part, FAILED)


def _findings(folder: Path, part: str, kind: str) -> list[str]:
    """Return what was found of a kind, without it."""
    try:
        found: list[str] = json.loads(_page_of(folder, part).read_text())["goals"]
    except FileNotFoundError:  # it ended before its first row
        found = [f"{FAILED}no result."]
    return [line.removeprefix(kind) for line in found if line.startswith(kind)]


def _summary(ended: dict[str, str], folder: Path) -> Iterator[str]:
    shown: list[str] = []
    for part in SHARES_S:
        if part not in ended:
            yield f"{part:8} not run"
            continue
        held, red, missed = (_findings(folder, part, kind) for kind in (HELD, FAILED, NOT_REACHED))
        counts = f"{len(held)} held, {len(red)} did not, {len(missed)} not reached"
        yield f"{part:8} {ended[part]}: {counts}"
        shown += [f"  {part}: {line}"[:160] for line in red]
        if missed:
            shown.append(f"  {part}: not reached: {' '.join(missed)}"[:160])
    yield from shown[:_MAX_SHOWN]
    if len(shown) > _MAX_SHOWN:
        yield f"  and {len(shown) - _MAX_SHOWN} more"
    yield f"results: {folder.resolve()}"
