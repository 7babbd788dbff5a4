"""What callbacks log themselves: numbers and pictures, kept until the next row."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import filesystem
from ..core.errors import ConfigError
from ..core.filesystem import writes_to
from ..core.shards import is_shard
from ..fault_tolerance.activity import Activity

# The engine writes the groups that come first. A name is also the name of a file.
_NAME = re.compile(
    r"(?!(train|optim|perf|digest|test|eval[^/]*)/)(?!(.*/)?\.+(/|$))[\w.-]{1,20}(/[\w.-]{1,40}){1,3}",
    re.ASCII,
)


@dataclass
class Log:
    """Collects what is logged for the next `train` row of the history.

    Only the main process's values count: on the others, arguments are checked and dropped. Nothing
    here is collective. A name without a group gets the group `log/`.

    Every method that takes a name raises ConfigError if the name is of a group that the engine
    writes (`train`, `optim`, `perf`, `digest`, `test`, `eval...`), or has other characters than
    ASCII letters, digits and `_.-`, or a part of dots alone. `pending` holds the values of each
    name: for a mean, the count, the float64 sum and the numbers that are not in the sum yet.
    """

    folder: Path
    activity: Activity
    is_main_process: bool
    pending: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str, value: float | Tensor) -> None:
        """Log a number or a tensor [] on any device: the row has the mean since the last row.

        No host sync: the tensor is copied, and read for the row. Raises ConfigError if the value
        is not one number, or is a shard, or the name is that of a picture.
        """
        is_number = not np.ndim(value) and hasattr(value, "__float__")
        name = _row_name(name, value, is_number, "log one number, or a tensor []")
        if self.is_main_process:
            kept = self.pending.setdefault(name, [0, 0.0])
            if not isinstance(kept, list):
                raise ConfigError("LOG", f"{name} is also a picture: rename one")
            with torch.no_grad():
                kept.append(value + 0)  # the owner of a tensor may change it before the row

    def picture(self, name: str, png: bytes) -> None:
        """Write a PNG into `pictures/` of the run, with the step in its name; the row has its path.

        `vision.to_png` makes the bytes from a tensor. The last picture before a row counts.

        Raises:
            ConfigError: as for any name, or `png` is not the bytes of a PNG.
            OutputError: the file cannot be written.
        """
        is_png = isinstance(png, bytes) and png.startswith(b"\x89PNG\r\n\x1a\n")
        name = _row_name(
            name,
            png,
            is_png,
            "give the bytes of a PNG, such as accel_trainer.vision.to_png(picture)",
        )
        if self.is_main_process:
            file = f"{name.replace('/', '=')}-step-{self.activity.state.optimizer_step:010d}.png"
            path = f"pictures/{file}"
            with writes_to(self.folder):
                filesystem.make_directory(self.folder / "pictures")
                filesystem.write_file_atomic(self.folder / path, png)
            self.pending[name] = {"picture": path}

    def read(self) -> dict[str, Any]:
        """Return the values for a row, and start again. **Host sync** if a tensor was logged."""
        settled = self.settle()
        self.pending = {}
        return {
            name: value[1] / value[0] if isinstance(value, list) else value
            for name, value in settled.items()
        }

    def settle(self) -> dict[str, Any]:
        """Return `pending` as plain values, and keep these. **Host sync** for each tensor."""
        self.pending = {name: _settle(value) for name, value in self.pending.items()}
        return self.pending


def _row_name(name: str, value: object, fits: bool, fix: str) -> str:
    """Return the name with its group, which is `log` if it has none.

    Raises ConfigError if nothing can be logged under the name, the value does not fit the call, or
    it is a shard: the main process would wait for the others to read it.
    """
    row_name = name if "/" in str(name) else f"log/{name}"
    if not _NAME.fullmatch(row_name):
        raise ConfigError(
            "LOG",
            f"nothing can be logged as {name!r}: give letters, digits and _.- as name or "
            "group/name; train, optim, perf, digest, test, eval are taken",
        )
    if is_shard(value):
        fits, fix = False, "it is a shard, so call full_tensor() on all processes, and log that"
    if not fits:
        raise ConfigError("LOG", f"{row_name} is of type {type(value).__name__}: {fix}")
    return row_name


def _settle(value: Any) -> Any:
    """Return what is kept of a name as plain values."""
    if isinstance(value, list):
        count, total, *numbers = value
        # One after another: the sum does not depend on when a checkpoint was saved.
        for number in numbers:
            total += float(number)
        return [count + len(numbers), total]
    return value
