"""Train on an endless stream: tar files, read again and again, each time in a new order.

python recipes/stream.py --steps 300
"""

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from accel_trainer import (
    ClassificationTask,
    RecipeConfig,
    RunResult,
    StreamReader,
    TrainerConfig,
    build_trainer,
    main,
    start_run,
)

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_TRAIN = 1500
SHARD_SIZE = 250
BUFFER_SIZE = 100

Sample = tuple[Tensor, int]


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of every recipe; the length is in steps."""

    trainer: TrainerConfig = TrainerConfig(num_steps=300, evaluate_every="100steps")


def make_shard(inputs: np.ndarray, labels: np.ndarray) -> bytes:
    """Return a tar file with two members for each sample, as webdataset has: `7.npy`, `7.cls`."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number, (array, label) in enumerate(zip(inputs, labels, strict=True)):
            file = io.BytesIO()
            np.save(file, array)
            parts = {"npy": file.getvalue(), "cls": str(label).encode()}
            for kind, content in parts.items():
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return shard.getvalue()


def read_shard(shard: bytes) -> Iterator[Sample]:
    """Yield the samples of a tar file; of one on a disk, without unpacking it."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        files = filter(None, map(tar.extractfile, tar))
        for array, label in zip(files, files, strict=True):
            yield torch.from_numpy(np.load(io.BytesIO(array.read()))), int(label.read())


def read_forever(shards: list[bytes], seed: int) -> Iterator[Sample]:
    """Yield samples in an order that only the seed decides, so that a resume reads the same."""
    generator = torch.Generator().manual_seed(seed)
    buffer: list[Sample] = []
    for _ in count():
        for index in torch.randperm(len(shards), generator=generator).tolist():
            for sample in read_shard(shards[index]):
                buffer.append(sample)
                if len(buffer) > BUFFER_SIZE:
                    drawn = int(torch.randint(len(buffer), (), generator=generator))
                    yield buffer.pop(drawn)


def train(config: Config) -> RunResult:
    """Train a small network on handwritten digits, which come with scikit-learn."""
    inputs, labels = load_digits(return_X_y=True)
    inputs = (inputs / 16).astype(np.float32)
    parts = [slice(start, start + SHARD_SIZE) for start in range(0, NUM_TRAIN, SHARD_SIZE)]
    shards = [make_shard(inputs[part], labels[part]) for part in parts]  # yours
    held_out = TensorDataset(*(torch.from_numpy(each[NUM_TRAIN:]) for each in (inputs, labels)))
    with start_run(config, recipe="stream") as run:
        return build_trainer(
            run,
            model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            task=ClassificationTask(),
            train_set=StreamReader(lambda epoch: read_forever(shards, config.seed)),
            eval_sets=held_out,
        ).fit()


if __name__ == "__main__":
    main(train, Config)
