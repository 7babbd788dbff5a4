"""Runs a ninth of the tests that `make test` leaves out: a different ninth each day.

`python -m tests.daily`. A test that fails is tried at `--base`, too: a commit, by default the last
one that is twelve hours old. What fails there as well was not broken by what is new: it is printed,
and does not fail this command. `--part 2/9` chooses a part; words after `--` are for pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .selection import part_of_today, plain_name

ROOT = Path(__file__).parents[1]
MOST = 20  # that are tried at the base: beyond that something is broken
NOTHING_SELECTED = 5  # pytest's exit code


def failures(part: str, jobs: int, words: Sequence[str]) -> list[str]:
    """Run a part; return the names of the tests that fail. Ends with pytest if that cannot run."""
    command = ["-q", "-n", str(jobs), "--dist", "loadgroup", "-m", "slow"]
    with tempfile.TemporaryDirectory() as cache:
        code = pytest(ROOT, *command, "--part", part, "-o", f"cache_dir={cache}", *words)
        if code in (0, NOTHING_SELECTED):
            return []
        failed = Path(cache, "v", "cache", "lastfailed")
        if code != 1 or not failed.exists():
            sys.exit(code)
        return sorted({plain_name(name) for name in json.loads(failed.read_text())})


def pytest(folder: Path, *words: str) -> int:
    """Run pytest on the code of a folder; return its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
    ).returncode


def at_base(base: str, names: Sequence[str]) -> list[str]:
    """Return those that fail at a commit as well. A test that it does not have does not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "base")
        worktree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*worktree, "add", "--quiet", "--detach", str(folder), base], check=True)
        try:
            quiet = ("-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "--tb=no")
            return [name for name in names if pytest(folder, *quiet, name) == 1]
        finally:
            subprocess.run([*worktree, "remove", "--force", str(folder)], check=True)


def earlier_commit() -> str:
    """Return the last commit that is twelve hours old; nothing if there is none."""
    command = ["git", "-C", str(ROOT), "rev-list", "-1", "--before=12 hours ago", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default=part_of_today())
    parser.add_argument("--base", help="a commit; without one that is old enough, none is tried")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("words", nargs="*", help="for pytest")
    options = parser.parse_args()
    print(f"part {options.part} of the tests that `make test` leaves out", flush=True)
    failed = failures(options.part, options.jobs, options.words)
    base = options.base or earlier_commit()
    old = at_base(base, failed) if base and 0 < len(failed) <= MOST else []
    for name in old:
        print(f"fails at {base[:12]} as well: {name}")
    new = [name for name in failed if name not in old]
    for name in new:
        print(f"fails here: {name}")
    sys.exit(1 if new else 0)


if __name__ == "__main__":
    main()
