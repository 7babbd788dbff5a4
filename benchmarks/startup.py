"""CPU time and memory of an import, and up to the end of the first step."""

from __future__ import annotations

import argparse
import subprocess
import sys

from . import results

IMPORTS = {
    "torch": "import torch",
    "torch + accelerate": "import torch, accelerate",
    "accel_trainer": "from accel_trainer import Trainer",
}
FIRST_STEPS = {"raw torch": "raw", "raw accelerate": "accelerate", "ours, all on": "ours, all on"}


def start(statement: str) -> results.Row:
    """Import in a new process; return its CPU seconds since the start of Python, and its memory."""
    measure = "import time, resource; print(time.process_time(), resource.getrusage(0).ru_maxrss)"
    probe = f"{statement}; {measure}"
    run = subprocess.run(
        [sys.executable, "-c", probe], cwd=results.ROOT, capture_output=True, text=True, check=True
    )
    cpu_s, kilobytes = map(float, run.stdout.split())
    return {"cpu_s": cpu_s, "rss_mb": kilobytes / 1024}


def first_step(loop: str) -> results.Row:
    row = results.in_process("loops", loop, "tiny", "8", "cpu")
    return {"cpu_s": row["start_cpu_s"], "rss_mb": row["rss_mb"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    started = results.environment()
    tables = {}
    for caption, base, cases, measure in (
        ("Import", "torch + accelerate", IMPORTS, start),
        ("Start of Python to the end of the first step", "raw torch", FIRST_STEPS, first_step),
    ):
        measured = results.interleave(
            list(cases),
            lambda name, cases=cases, measure=measure: measure(cases[name]),  # type: ignore[misc]  # defaults in a lambda
            repeats=options.repeats,
        )
        smallest = {name: min(row["cpu_s"] for row in rows) for name, rows in measured.items()}
        memory = {name: min(row["rss_mb"] for row in rows) for name, rows in measured.items()}
        tables[caption] = [
            {
                "what": name,
                "CPU s": smallest[name],
                f"of {base}": smallest[name] / smallest[base],
                "RSS MB": memory[name],
                f"MB more than {base}": memory[name] - memory[base],
                "n": options.repeats,
                "samples": [row["cpu_s"] for row in measured[name]],
            }
            for name in cases
        ]
    ours = tables["Start of Python to the end of the first step"][-1]
    results.write(
        "startup",
        title="Start-up",
        how="Each in a new process, in interleaved rounds; the minimum, because other load can "
        "only add time.",
        tables=tables,
        goals=[
            f"First step within 1.10 of raw torch: {ours['of raw torch']:.2f}.",
            f"Memory within 15 MB of raw torch: {ours['MB more than raw torch']:+.0f} MB.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
