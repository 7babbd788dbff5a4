"""What a step costs beyond the model: each toolkit with the same model and data, in a separate
process."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Sequence

from . import results
from .loops import LOOPS

NEEDS = {
    "Fabric": "lightning",
    "Lightning": "lightning",
    "pytorch": "pytorch_accelerated",
    "HF": "transformers",
}


def is_installed(loop: str) -> bool:
    return all(
        importlib.util.find_spec(package) is not None
        for prefix, package in NEEDS.items()
        if loop.startswith(prefix)
    )


# A step of a real net takes 1000 times as long: peers that differ little are left out.
LONG_STEPS = ("raw", "ours, all on", "accelerate", "Lightning", "HF Trainer")


def measure(
    model: str, loops: Sequence[str], num_steps: int, repeats: int, *, device: str = "cpu"
) -> list[results.Row]:
    names = [name for name in loops if is_installed(name)]
    for name in (name for name in loops if name not in names):
        print(f"{name}: left out, its toolkit is not installed")
    measured = results.interleave(
        names,
        lambda name: results.in_process("loops", name, model, str(num_steps), device),
        repeats=repeats,
    )
    rows = []
    for name in names:
        steps = [row["step_us"] for row in measured[name]]
        # Ratios within a round: both sides saw the machine in the same minute.
        ratios = [
            mine["step_us"] / base["step_us"]
            for mine, base in zip(measured[name], measured["raw"], strict=True)
        ]
        rows.append(
            {
                "loop": name,
                "us/step": statistics.median(steps),
                "of raw": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "start to first step, CPU s": min(row["start_cpu_s"] for row in measured[name]),
                "RSS MB": statistics.median(row["rss_mb"] for row in measured[name]),
                "n": repeats,
                "samples": steps,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--loops", nargs="+", default=list(LOOPS), help="of the tiny model; raw and ours are needed"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--resnet-repeats", type=int, default=9)
    parser.add_argument("--resnet-steps", type=int, default=12)
    options = parser.parse_args()
    started = results.environment()
    tables = {
        "Linear(32, 10), batch 128": measure("tiny", options.loops, options.steps, options.repeats)
    }
    if options.resnet_repeats:
        tables["ResNet-20, batch 128"] = measure(
            "resnet20", LONG_STEPS, options.resnet_steps, options.resnet_repeats
        )
    rows = {row["loop"]: row for row in next(iter(tables.values()))}
    ours, plain, raw = (
        rows[name] for name in ("ours, all on", "ours, the others' optimizer", "raw")
    )
    results.write(
        "overhead",
        title="Overhead of the loop",
        how="One thread, SGD with momentum, the same prepared batches. A step is the thread's "
        "CPU time between two forwards: the lower decile of the last three quarters of a "
        "run, because other load and a lower clock rate can only add time. Columns are "
        "medians over processes started in interleaved rounds; the start-up is the minimum. "
        "`ours, all on`: cosine schedule, mean loss logged every 50 steps, checkpoints, a "
        "callback on every event, and the fused optimizer that `build_optimizer` creates. "
        "The others use torch's default optimizer.",
        tables=tables,
        goals=[
            f"At most 1.65 of raw with everything on: {ours['of raw']:.2f} "
            f"({ours['us/step'] - raw['us/step']:+.0f} us), {plain['of raw']:.2f} with the "
            "others' optimizer.",
            "Start within 1.10 of raw: "
            f"{ours['start to first step, CPU s'] / raw['start to first step, CPU s']:.2f}. "
            f"Memory within 15 MB: {ours['RSS MB'] - raw['RSS MB']:+.0f} MB.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
