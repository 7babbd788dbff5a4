"""Tries programs that are drawn from seeds: `python -m tests.programs --seed 0 --number 60`.

Each program runs whole, and killed and resumed, and must leave the same bytes. The log has a line
for each. `--seed N` alone tries one program; `--simplify` finds the fewest parts that still fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from .campaign import Outcome, simplest, tried
from .mistakes import MISTAKES
from .program import draw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--number", type=int, default=1)
    parser.add_argument("--simplify", action="store_true")
    parser.add_argument("--mistake", default="", choices=MISTAKES, help="to be noticed")
    parser.add_argument("--folder", type=Path, help="keeps what failed")
    parser.add_argument("--log", type=Path, help="a line is added for each program")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for seed in range(options.seed, options.seed + options.number):
            program = replace(draw(seed), mistake=options.mistake)
            start_s = time.monotonic()
            try_it = simplest if options.simplify else tried
            outcome = try_it(program, folder / f"seed-{seed}")
            counts.update(_counts(outcome))
            line = (
                f"--seed {seed}: {outcome}  ({time.monotonic() - start_s:.0f} s) {outcome.program}"
            )
            print(line, flush=True)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(line + "\n")
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    sys.exit(counts["wrong"] > 0)


def _counts(outcome: Outcome) -> dict[str, int]:
    state = "wrong" if outcome.wrong else "refused" if outcome.refused else "equal"
    return {
        "programs": 1,
        state: 1,
        "kills": outcome.num_kills,
        "preemptions": outcome.num_preemptions,
    }


if __name__ == "__main__":
    main()
