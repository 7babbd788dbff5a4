"""Train every recipe for a few steps, here and at an earlier commit: is a tensor or row different?

    python -m tests.golden --base COMMIT

Prints a SHA-256 (its first 16 digits) for each tensor of the exports and the last checkpoints, by
name, and for each row of metrics without times and rates. The exit code is 1 if a line differs
between the two. Both are trained on this machine, so that the answer does not depend on its
processor.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
NUM_CLASSES = 10
CIFAR = "recipes/cifar.py --dataset CIFAR --max-steps 4 --config recipes/configs"
DIGITS = "recipes/cifar.py --config recipes/configs/digits.yaml"

CASES = {
    "digits": f"{DIGITS} --epochs 1",
    "digits-ema-clip": (
        f"{DIGITS} --epochs 1 --ema 0.99 --trainer.max-grad-norm 1"
        " --checkpoint-every-n-steps 3 --optimizer.name adamw"
    ),
    "digits-exact": (
        f"{DIGITS} --max-steps 6 --reduce exact --batch-size 16 --global-batch-size 64"
    ),
    "cifar10_94": f"{CIFAR}/cifar10_94.yaml --batch.global-batch-size 50",
    "cifar10_96": f"{CIFAR}/cifar10_96.yaml --batch.global-batch-size 50",
    "cifar10_cpu": f"{CIFAR}/cifar10_cpu.yaml",
    "cifar10_resnet20": f"{CIFAR}/cifar10_resnet20.yaml",
    "large_batches": f"{CIFAR}/large_batches.yaml --accumulate 2",
    "photos": (
        "recipes/images.py --dataset PHOTOS --image-size 48 --batch-size 16"
        " --val-fraction 0.2 --epochs 2 --model resnet18 --max-steps 4"
        " --lr 0.1 --schedule.warmup-epochs 0"  # not those that the rules of a commit choose
    ),
    "minimal": "recipes/minimal.py --epochs 1",
    "characters": "recipes/characters.py --max-steps 4",
    "segmentation": "recipes/segmentation.py --epochs 1",
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


def row_hashes(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        kept = {
            key: value
            for key, value in row.items()
            if not (key.startswith("perf/") or key.endswith("_s"))
        }
        content = hash_of(json.dumps(kept, sort_keys=True).encode())
        yield f"{row['event']} {row.get('optimizer_step')} {content}"


def describe(run: Path) -> Iterator[str]:
    """Yield a line for each tensor and each row of a run."""
    newest = max((run / "checkpoints").glob("step-*"))
    for path in (run / "export" / "model.safetensors", *sorted(newest.glob("*.safetensors"))):
        for line in tensor_hashes(path):
            yield f"{path.relative_to(run)} {line}"
    for line in row_hashes(run / "metrics.jsonl"):
        yield f"metrics.jsonl {line}"


def train_all(sources: Path, folder: Path, data: dict[str, str], only: str) -> list[str]:
    """Train every case with the code of `sources`; return the lines of all."""
    lines = []
    for name, command in CASES.items():
        if only not in name:
            continue
        run = folder / name
        arguments = [data.get(word, word) for word in command.split()]
        options = ["--output-dir", str(run), "--run.cache-dir", str(folder / "cache"), "--quiet"]
        options += ["--runtime.num-threads", "1"]
        environment = {**os.environ, "PYTHONPATH": str(sources)}
        subprocess.run(
            [sys.executable, *arguments, *options], cwd=sources, env=environment, check=True
        )
        lines += [f"{name} {line}" for line in describe(run)]
        print(f"{name}: {len(lines)} lines so far", file=sys.stderr, flush=True)
    return lines


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
            before = train_all(base, folder / "before", data, arguments.only)
            after = train_all(ROOT, folder / "after", data, arguments.only)
        finally:
            subprocess.run([*worktree, "remove", "--force", str(base)], check=True)
    print("\n".join(after))
    if changed := list(
        difflib.unified_diff(before, after, arguments.base, "here", lineterm="", n=0)
    ):
        print("\n".join(changed), file=sys.stderr)
        sys.exit(f"{len(changed)} lines of the comparison differ")
    print(f"equal: {len(after)} tensors and rows of {len(CASES)} recipes", file=sys.stderr)


if __name__ == "__main__":
    main()
