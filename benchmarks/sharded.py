"""Sharded checkpoints of two processes: pause, memory and loading, ours and accelerate's
SHARDED_STATE_DICT."""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from accel_trainer import RuntimeConfig, launch
from accel_trainer.checkpoint.config import CheckpointConfig
from accel_trainer.checkpoint.manager import Checkpointer
from accel_trainer.checkpoint.state_dict import training_state
from accel_trainer.core.train_state import TrainState
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.distributed.collectives import join_peers, run_on_main, shutdown
from accel_trainer.distributed.placement import place_model
from accel_trainer.run.resume import Source, load_for_all
from accel_trainer.vision.models.zoo import ModelConfig, build_model

from . import results
from .checkpointing import milliseconds

NAMES = ("accel_trainer", "accelerate save_state")
NUM_PROCESSES = 2
FSDP = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "1000000",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


class Savers:
    """One process's part of a ResNet-18 after a step of AdamW, and two ways to save and load it."""

    def __init__(self, accelerator: Accelerator, folder: Path, name: str) -> None:
        self.accelerator, self.folder, self.name, self.step = accelerator, folder, name, 0
        # Sharding wants parameters that are contiguous.
        config = RuntimeConfig(num_threads=1, channels_last=False)
        model = build_model(ModelConfig(name="resnet18"), num_classes=10, in_channels=3)
        model = place_model(model, accelerator, config)
        plain = torch.optim.AdamW(model.parameters())
        prepared, optimizer = accelerator.prepare(model, plain)
        prepared(torch.randn(8, 3, 32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.state = training_state(model, {"": plain}, None, None)
        peers = join_peers(accelerator, timeout_s=600)
        metadata = {"settings": {}, "data_fingerprint": ""}
        self.checkpointer = Checkpointer(
            folder / "checkpoints", config=CheckpointConfig(), header=metadata, peers=peers
        )
        run_on_main(lambda: self.checkpointer.prepare(self.state.state_dict()), accelerator)
        self.shard_bytes = sum(tensor.to_local().nbytes for tensor in prepared.parameters()) * 3

    def save(self) -> tuple[float, float]:
        """Return the seconds for which training pauses, and those until the checkpoint is
        written."""
        self.step += 1
        self.accelerator.wait_for_everyone()
        start_s = time.perf_counter()
        if self.name == "accel_trainer":
            self.checkpointer.save(
                TrainState(optimizer_step=self.step, step_in_epoch=self.step),
                self.state.state_dict(),
            )
        else:
            self.accelerator.save_state(str(self.folder / "accelerate"))
        stall_s = time.perf_counter() - start_s
        self.checkpointer.wait(must_succeed=True)
        return stall_s, time.perf_counter() - start_s

    def load(self) -> float:
        """Return the seconds to load into the live model and optimizer."""
        self.accelerator.wait_for_everyone()
        start_s = time.perf_counter()
        if self.name == "accel_trainer":
            loaded = load_for_all(Source(str(self.folder)), self.accelerator, timeout_s=600)
            self.state.load_state_dict(loaded.pieces)
        else:
            self.accelerator.load_state(str(self.folder / "accelerate"))
        return time.perf_counter() - start_s

    def peak_growth(self, action: Callable[[], object]) -> int:
        """Return by how many bytes the resident memory of this process grows while it saves or
        loads."""
        # give back what was freed: it would be taken again, unnoticed
        ctypes.CDLL(None).malloc_trim(0)
        before = int(psutil.Process().memory_info().rss)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
        action()
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before


def measure(name: str, folder: str, repeats: int) -> results.Row:
    """Return what one toolkit takes, the worst of the processes. Runs in every process."""
    os.environ.update(FSDP)
    warnings.simplefilter("ignore")  # of torch, that a checkpoint is overwritten
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    savers = Savers(accelerator, Path(folder), name)
    save_bytes = savers.peak_growth(savers.save)
    load_bytes = savers.peak_growth(savers.load)
    rows = [[*savers.save(), savers.load()] for _ in range(repeats)]
    worst = accelerator.reduce(torch.tensor(rows, dtype=torch.float64), "max").T.tolist()
    sizes = torch.tensor([save_bytes, load_bytes, savers.shard_bytes])
    save_bytes, load_bytes, shard_bytes = accelerator.reduce(sizes, "max").tolist()
    savers.checkpointer.close()
    shutdown(accelerator)
    stall_s, save_s, load_s = worst
    return {
        "stall_s": stall_s,
        "save_s": save_s,
        "load_s": load_s,
        "shard_bytes": shard_bytes,
        "save_bytes": save_bytes,
        "load_bytes": load_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    started = results.environment()
    measured: dict[str, list[results.Row]] = {name: [] for name in NAMES}
    for _ in range(options.rounds):  # in turn
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                measured[name].append(
                    launch(measure, name, folder, options.repeats, num_processes=NUM_PROCESSES)
                )
                shutil.rmtree(folder, ignore_errors=True)
                Path(folder).mkdir()
    tables = {}
    for caption, key in (
        ("How long training pauses", "stall_s"),
        (
            "Until the checkpoint is on the disk (ours is hashed and synced, the other is not)",
            "save_s",
        ),
        ("Load into a live model and optimizer (ours verified by hash)", "load_s"),
    ):
        samples = {
            name: [value for row in rows for value in row[key]] for name, rows in measured.items()
        }
        base = statistics.median(samples[NAMES[1]])
        tables[caption] = [
            {
                "what": name,
                **milliseconds(samples[name]),
                "of accelerate": statistics.median(samples[name]) / base,
            }
            for name in NAMES
        ]
    shard_bytes = measured[NAMES[0]][0]["shard_bytes"]
    growth = {
        name: {
            key: max(row[key] for row in rows) / shard_bytes for key in ("save_bytes", "load_bytes")
        }
        for name, rows in measured.items()
    }
    tables["Memory of a process at its first save and load, in shards of one process"] = [
        {"what": name, "save": growth[name]["save_bytes"], "load": growth[name]["load_bytes"]}
        for name in NAMES
    ]
    stall, load = (
        tables[caption][0]["of accelerate"] for caption in (list(tables)[0], list(tables)[2])
    )
    results.write(
        "sharded",
        title="Sharded checkpoints",
        how=f"A ResNet-18 with AdamW on {NUM_PROCESSES} processes, {shard_bytes / 1e6:.0f} MB on "
        "each, saved and loaded by each of two toolkits in processes of their own, in turn.",
        tables=tables,
        goals=[
            "Training pauses at most 0.10 times as long as with accelerate's save_state: "
            f"{stall:.2f}.",
            "A verified load takes at most 2 times as long as accelerate's, which verifies "
            f"nothing: {load:.2f}.",
            "A save takes at most 1.2 times the memory of a shard: "
            f"{growth[NAMES[0]]['save_bytes']:.2f}.",
        ],
        started=started,
    )


if __name__ == "__main__":
    main()
