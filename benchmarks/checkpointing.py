"""How long training pauses for a checkpoint, and how long until it is on disk: ours, accelerate's
and torch's."""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.checkpoint.state_dict import training_state
from accel_trainer.core.train_state import TrainState
from accel_trainer.vision.models.zoo import ModelConfig, build_model

from . import results

NAMES = ("accel_trainer", "accelerate save_state", "torch.save")


class Savers:
    """A ResNet-18 after a step of SGD with momentum, and three ways to save and load it."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = build_model(ModelConfig(name="resnet18"), num_classes=10, in_channels=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(8, 3, 32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.state = training_state(model, {"": optimizer}, None, None)
        self.prepared = self.accelerator.prepare(model, optimizer)
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.step = 0
        self.checkpointer = Checkpointer(
            folder / "ours",
            config=CheckpointConfig(),
            header={"settings": {}, "data_fingerprint": ""},
        )
        self.checkpointer.prepare(self.state.state_dict())

    @property
    def num_bytes(self) -> int:
        tensors = [*self.model.state_dict().values()]
        tensors += [
            value["momentum_buffer"] for value in self.optimizer.state_dict()["state"].values()
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def save(self, name: str) -> results.Row:
        """Save with one toolkit; return how long training pauses and how long the save takes."""
        self.step += 1
        position = TrainState(
            optimizer_step=self.step, epoch=0, step_in_epoch=self.step, samples_seen=0
        )
        start_s = time.perf_counter()
        if name == "accel_trainer":
            self.checkpointer.save(position, self.state.state_dict())
        elif name == "torch.save":
            torch.save(
                [self.model.state_dict(), self.optimizer.state_dict()], self.folder / "torch.pt"
            )
        else:
            self.accelerator.save_state(str(self.folder / "accelerate"))
        stall_s = time.perf_counter() - start_s
        if name == "accel_trainer":
            self.checkpointer.wait(must_succeed=True)
        return {
            "stall_s": stall_s,
            "save_s": time.perf_counter() - start_s,
            "load_s": self.load(name),
        }

    def load(self, name: str) -> float:
        start_s = time.perf_counter()
        if name == "accel_trainer":
            loaded = load_checkpoint(self.checkpointer.directory)
            assert loaded is not None
            self.state.load_state_dict(loaded.pieces)
        elif name == "torch.save":
            weights, state = torch.load(self.folder / "torch.pt", weights_only=True)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)
        else:
            self.accelerator.load_state(str(self.folder / "accelerate"))
        return time.perf_counter() - start_s


def stall_parts(savers: Savers, repeats: int) -> list[results.Row]:
    """Return where the stall goes: to the copy, and how far that is from the memory's bandwidth."""
    tensor = torch.ones(savers.num_bytes // 4)
    buffer = torch.empty_like(tensor)
    parts: dict[str, Callable[[], Any]] = {
        "references to the state": savers.state.state_dict,
        "one copy of as many bytes": lambda: buffer.copy_(tensor),
    }
    measured: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, act in parts.items():
            start_s = time.perf_counter()
            act()
            measured[name].append(time.perf_counter() - start_s)
    return [{"part": name, **milliseconds(samples)} for name, samples in measured.items()]


def milliseconds(samples: list[float]) -> results.Row:
    quartiles = [1e3 * value for value in statistics.quantiles(samples, n=4)]
    return {
        "median ms": quartiles[1],
        "quartiles ms": f"{quartiles[0]:.1f} to {quartiles[2]:.1f}",
        "n": len(samples),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    started = results.environment()
    folder = Path(tempfile.mkdtemp())
    savers = Savers(folder)
    for name in NAMES:  # warm: buffers, files, imports
        savers.save(name)
    measured = results.interleave(list(NAMES), savers.save, repeats=options.repeats)
    tables = {}
    for caption, key in (
        ("How long training pauses", "stall_s"),
        (
            "Until the checkpoint is on the disk (ours is hashed and synced, the others are not)",
            "save_s",
        ),
        ("Load into a live model and optimizer (ours verified by hash)", "load_s"),
    ):
        samples = {name: [row[key] for row in rows] for name, rows in measured.items()}
        base = statistics.median(samples["accelerate save_state"])
        tables[caption] = [
            {
                "what": name,
                **milliseconds(samples[name]),
                "of accelerate": statistics.median(samples[name]) / base,
            }
            for name in NAMES
        ]
    tables["What the pause consists of"] = stall_parts(savers, options.repeats)
    savers.checkpointer.close()
    shutil.rmtree(folder)
    stall = tables["How long training pauses"][0]["of accelerate"]
    results.write(
        "checkpointing",
        title="Checkpoints",
        how=f"A ResNet-18 with momentum, {savers.num_bytes / 1e6:.0f} MB, saved and loaded by "
        "each of three toolkits in turn.",
        tables=tables,
        goals=[
            "Training pauses at most 0.10 times as long as with accelerate's save_state: "
            f"{stall:.2f}."
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
