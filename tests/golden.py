"""Train every recipe for a few steps, here and at an earlier commit: is anything different?

    python -m tests.golden --base COMMIT

Prints a SHA-256 (its first 16 digits) for each tensor of the exports and the last checkpoints, by
name, the numbers of each row of metrics without times and rates, and what the commands that train a
part of a run again print as JSON. The exit code is 1 if a value of the base is missing here or
differs; values that only this version has are counted. Both are trained on this machine, so that
the answer does not depend on its processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
NUM_CLASSES = 10
CIFAR = "recipes/cifar.py --dataset CIFAR --max-steps 4 --config recipes/configs"
DIGITS = "recipes/cifar.py --config recipes/configs/digits.yaml"

SETS = f"{ROOT}/tests/golden_recipe.py --max-steps 8 --on-nonfinite skip --ema 0.9"
BOTH_PROCESSES = "--batch-size 16 --global-batch-size 64 --max-steps 6"
EVERY_STEP = "--trainer.log-every-n-steps 1"


@dataclass(frozen=True)
class Case:
    """A command that trains; `launcher` starts it in two processes, `is_killed` once on its way."""

    command: str
    launcher: str = ""
    is_killed: bool = False


TORCHRUN = "torch.distributed.run --standalone --nproc_per_node 2"
SHARDED = "accelerate.commands.launch --config_file accelerate_configs/fsdp_sharded.yaml"

CASES = {
    "digits": Case(f"{DIGITS} --epochs 1"),
    "digits-ema-clip": Case(
        f"{DIGITS} --epochs 1 --ema 0.99 --trainer.max-grad-norm 1"
        " --checkpoint-every-n-steps 3 --optimizer.name adamw"
    ),
    "digits-exact": Case(f"{DIGITS} {BOTH_PROCESSES} --reduce exact"),
    "digits-two": Case(f"{DIGITS} {BOTH_PROCESSES}", TORCHRUN),
    "digits-exact-two": Case(f"{DIGITS} {BOTH_PROCESSES} --reduce exact", TORCHRUN),
    "digits-shards": Case(f"{DIGITS} {BOTH_PROCESSES} --ema 0.9", SHARDED),
    "digits-killed": Case(
        f"{DIGITS} --max-steps 12 --checkpoint-every-n-steps 2 --ema 0.99", is_killed=True
    ),
    "digits-killed-two": Case(
        f"{DIGITS} {BOTH_PROCESSES} --checkpoint-every-n-steps 2 --reduce exact",
        TORCHRUN,
        is_killed=True,
    ),
    "sets-skipped": Case(SETS),
    "sets-skipped-killed": Case(f"{SETS} --checkpoint-every-n-steps 2", is_killed=True),
    "cifar10_94": Case(f"{CIFAR}/cifar10_94.yaml --batch.global-batch-size 50"),
    "cifar10_96": Case(f"{CIFAR}/cifar10_96.yaml --batch.global-batch-size 50"),
    "cifar10_cpu": Case(f"{CIFAR}/cifar10_cpu.yaml"),
    "cifar10_resnet20": Case(f"{CIFAR}/cifar10_resnet20.yaml"),
    "large_batches": Case(f"{CIFAR}/large_batches.yaml --accumulate 2"),
    "photos": Case(
        "recipes/images.py --dataset PHOTOS --image-size 48 --batch-size 16"
        " --val-fraction 0.2 --epochs 2 --model resnet18 --max-steps 4"
        " --lr 0.1 --schedule.warmup-epochs 0"  # not those that the rules of a commit choose
    ),
    "minimal": Case(f"recipes/minimal.py --epochs 2 --checkpoint-every-n-steps 4 {EVERY_STEP}"),
    "minimal-lr": Case(
        f"recipes/minimal.py --epochs 2 --checkpoint-every-n-steps 4 {EVERY_STEP} --lr 0.2"
    ),
    "characters": Case("recipes/characters.py --max-steps 4"),
    "segmentation": Case("recipes/segmentation.py --epochs 1"),
}

# Asked once all cases are trained.
QUESTIONS = {
    "why": "why RUNS/minimal RUNS/minimal-lr",
    "why-itself": "why RUNS/minimal",
    "at": "at RUNS/minimal --step 6 --to RUNS/minimal-at",
    "bisect": "bisect RUNS/minimal --where train/loss<0.5",
}


def write_data(folder: Path) -> dict[str, str]:
    """Write small pictures as binary CIFAR and as photos; return what replaces words in `CASES`."""
    draw = np.random.default_rng(0)
    cifar = folder / "cifar"
    cifar.mkdir()
    for name, number in (("data_batch_1", 500), ("test_batch", 100)):
        labels = np.arange(number, dtype=np.uint8) % NUM_CLASSES
        pixels = draw.integers(0, 256, (number, 3 * 32 * 32), dtype=np.uint8)
        records = np.concatenate([labels[:, None], pixels], axis=1)
        (cifar / f"{name}.bin").write_bytes(records.tobytes())
    (cifar / "batches.meta.txt").write_text("".join(f"class{k}\n" for k in range(NUM_CLASSES)))
    photos = folder / "photos"
    for label in ("bird", "cat", "dog"):
        (photos / label).mkdir(parents=True)
        for index in range(30):
            height, width = draw.integers(40, 120, 2)
            pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(photos / label / f"{index:02}.jpg")
    return {"CIFAR": str(cifar), "PHOTOS": str(photos)}


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def tensor_hashes(path: Path) -> Iterator[str]:
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            data = pickle.dumps((str(tensor.dtype), tuple(tensor.shape), tensor.flatten().tolist()))
            yield f"{name} {hash_of(data)}"


def numbers_of(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value of a JSON tree, without times and rates."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not (key.startswith("perf/") or key.endswith("_s")):
                yield from numbers_of(inner, f"{name} {key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from numbers_of(inner, f"{name} [{number}]")
    else:
        yield name, json.dumps(value)


def describe(run: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each tensor and each number in a row of a run."""
    newest = max((run / "checkpoints").glob("step-*"))
    for path in (run / "export" / "model.safetensors", *sorted(newest.glob("*.safetensors"))):
        for line in tensor_hashes(path):
            name, _, content = line.rpartition(" ")
            yield f"{path.relative_to(run)} {name}", content
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        yield from numbers_of(json.loads(line), f"metrics.jsonl {number}")


def start(arguments: str, sources: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the code of `sources`, on the CPU."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        [sys.executable, *arguments.split()],
        cwd=sources,
        env=environment | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def train(name: str, case: Case, sources: Path, folder: Path, data: Mapping[str, str]) -> Path:
    """Train a case, again if it is killed on its way; return the run's folder."""
    run = folder / name
    command = " ".join(data.get(word, word) for word in case.command.split())
    command += f" --output-dir {run} --run.cache-dir {folder / 'cache'} --quiet"
    command += " --runtime.num-threads 1"
    if case.launcher:
        command = f"-m {case.launcher} {command}"
    variables = {}
    if case.is_killed:
        variables["ACCEL_TRAINER_CALLBACKS"] = str(ROOT / "tests" / "golden_kill.py")
        variables["GOLDEN_KILLED"] = str(folder / f"{name}.killed")
        if not start(command, sources, **variables).returncode:
            sys.exit(f"{name} was not killed: {command}")
    if start(command, sources, **variables).returncode:
        sys.exit(f"{name} failed: {command}")
    return run


def ask(question: str, sources: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each number of the JSON that a command prints."""
    command = f"accel_trainer {question.replace('RUNS', str(folder))} --json"
    answer = start(f"-m {command} --recipe {sources}/recipes/minimal.py", sources)
    if not answer.stdout.startswith("{"):
        sys.exit(f"{command} failed")
    text = answer.stdout.replace(str(folder), "RUNS").replace(str(sources), "SOURCES")
    return numbers_of(json.loads(text), "json")


def answer_all(sources: Path, folder: Path, data: Mapping[str, str], only: str) -> dict[str, str]:
    """Train every case and ask every question with the code of `sources`; return all values."""
    values: dict[str, str] = {}
    for name, case in CASES.items():
        if only in name:
            run = train(name, case, sources, folder, data)
            values |= {f"{name} {key}": value for key, value in describe(run)}
            print(f"{name}: {len(values)} values so far", file=sys.stderr, flush=True)
    for name, question in QUESTIONS.items():
        if only in question:
            values |= {f"{name} {key}": value for key, value in ask(question, sources, folder)}
            print(f"{name}: {len(values)} values so far", file=sys.stderr, flush=True)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--only", default="", help="a part of the name of the cases to train")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        base = folder / "base"
        worktree = ("git", "-C", str(ROOT), "worktree")
        subprocess.run(
            [*worktree, "add", "--quiet", "--detach", str(base), arguments.base], check=True
        )
        try:
            before = answer_all(base, folder / "before", data, arguments.only)
            after = answer_all(ROOT, folder / "after", data, arguments.only)
        finally:
            subprocess.run([*worktree, "remove", "--force", str(base)], check=True)
    print("\n".join(f"{name} {value}" for name, value in after.items()))
    different = [
        f"{name}: {value} -> {after.get(name, 'missing')}"
        for name, value in before.items()
        if after.get(name) != value
    ]
    if different:
        print("\n".join(different), file=sys.stderr)
        sys.exit(f"{len(different)} of {len(before)} values differ")
    new = f", and {len(after) - len(before)} that only this version has" * (
        len(after) > len(before)
    )
    print(f"equal: {len(before)} values of {len(CASES)} runs{new}", file=sys.stderr)


if __name__ == "__main__":
    main()
