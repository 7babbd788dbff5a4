"""Runs whose folder is moved, replaced or deleted at a random moment.

    python -m tests.faults.folder_moves --log FILE

Nothing of others may change, and a folder that was moved continues to the same bits.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accel_trainer import BatchConfig
from accel_trainer.cli.recipe.main import main as run_main
from accel_trainer.core.errors import ExitCode
from accel_trainer.run.config import RecipeConfig
from tests import processes, workload
from tests.faults.campaign import Result, run_campaign

NUM_EPOCHS = 8
NAME = "export/model.safetensors"


def train(folder: Path, reduce: str, seed: int) -> None:
    """A command that trains in `folder`."""

    def run(config: RecipeConfig) -> object:
        batch = BatchConfig(
            per_device_batch_size=8, global_batch_size=16, eval_batch_size=10, reduce=reduce
        )
        config = workload.make_config(
            folder, batch=batch, seed=seed, run=replace(config.run, output_dir=folder)
        )
        config = replace(config, trainer=replace(config.trainer, num_epochs=NUM_EPOCHS))
        return workload.train(config)

    run_main(run, RecipeConfig, description="a run", argv=[])


def move(folder: Path, others: Path) -> Path | None:
    folder.rename(folder.with_name("moved"))
    return None


def delete(folder: Path, others: Path) -> Path | None:
    while folder.exists():  # the run may write meanwhile
        shutil.rmtree(folder, ignore_errors=True)
    return None


def replace_by_others(folder: Path, others: Path) -> Path | None:
    prepared = Path(shutil.copytree(others, folder.with_name("prepared")))
    folder.rename(folder.with_name("moved"))
    prepared.rename(folder)
    return folder


def delete_and_replace(folder: Path, others: Path) -> Path | None:
    prepared = Path(shutil.copytree(others, folder.with_name("prepared")))
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    prepared.rename(folder)
    return folder


def replace_checkpoints(folder: Path, others: Path) -> Path | None:
    prepared = Path(shutil.copytree(others / "checkpoints", folder.with_name("prepared")))
    (folder / "checkpoints").rename(folder.with_name("moved-checkpoints"))
    prepared.rename(folder / "checkpoints")
    return folder / "checkpoints"


def replace_by_link(folder: Path, others: Path) -> Path | None:
    prepared = Path(shutil.copytree(others, folder.with_name("prepared")))
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(prepared)
    return prepared


ACTS = (move, delete, replace_by_others, delete_and_replace, replace_checkpoints, replace_by_link)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def prepare(scratch: Path) -> Callable[[int], Result]:
    others = scratch / "others"
    processes.start(
        train, others, "float", 99, num_processes=1, folder=scratch / "logs-others"
    ).wait()
    theirs = {folder: content(folder) for folder in (others, others / "checkpoints")}
    whole: dict[tuple[int, str], bytes] = {}

    def undisturbed(num_processes: int, reduce: str) -> bytes:
        key = num_processes, reduce
        if key not in whole:
            folder = scratch / f"whole-{num_processes}-{reduce}"
            processes.start(
                train, folder, reduce, 3, num_processes=num_processes, folder=scratch / "logs-whole"
            ).wait()
            whole[key] = (folder / NAME).read_bytes()
        return whole[key]

    def trial(number: int) -> Result:
        draw = random.Random(number)
        act = ACTS[number % len(ACTS)]
        num_processes = draw.choice((1, 2))
        reduce = draw.choice(("float", "exact"))
        after = draw.randrange(0, 30)
        place = scratch / f"trial-{number}"
        folder = place / "run"
        job = processes.start(
            train, folder, reduce, 3, num_processes=num_processes, folder=place / "logs"
        )
        while (
            not list((folder / "checkpoints").glob(f"step-{after:010d}-*"))
            and job.processes[0].is_alive()
        ):
            if after == 0 and (folder / "checkpoints").exists():
                break
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        taken = act(folder, others)
        codes = job.wait()
        expected = theirs[others / "checkpoints" if act is replace_checkpoints else others]
        result: Result = {
            "number": number,
            "act": act.__name__,
            "processes": num_processes,
            "reduce": reduce,
            "after": after,
            "codes": codes,
            "line": next((line for line in job.output().splitlines() if "error[" in line), "")[
                :110
            ],
            "untouched": content(taken) == expected if taken else not folder.exists(),
            "tracebacks": sum("Traceback" in job.output(rank) for rank in range(num_processes)),
        }
        if (place / "moved").exists():
            again = processes.start(
                train,
                place / "moved",
                reduce,
                3,
                num_processes=num_processes,
                folder=place / "logs-again",
            )
            again.wait()
            result["same"] = (place / "moved" / NAME).read_bytes() == undisturbed(
                num_processes, reduce
            )
        shutil.rmtree(place)
        return result

    return trial


def main() -> int:
    """Run the trials; 1 if something of others changed or a moved run ended with other bits."""
    results = run_campaign(prepare, number=48)
    for result in results:
        print(*(f"{name}={value}" for name, value in result.items()))
    codes = Counter(code for result in results for code in result["codes"])
    bad = [
        result["number"]
        for result in results
        if not result["untouched"]
        or result["tracebacks"]
        or result.get("same") is False
        or not set(result["codes"]) <= {ExitCode.CHECKPOINT, ExitCode.DONE}
    ]
    print(f"{len(results)} trials, exit codes {dict(codes)}, something wrong in {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
