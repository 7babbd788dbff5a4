"""`evaluation.safetensors`: details of a run's last evaluation, such as a confusion matrix.

These lists, dicts and tensors are not stored in checkpoints: training does not need them, and they
grow with the number of classes.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint.serialization import (
    decode,
    encode,
    pack_tensors,
    unpack_metadata,
    unpack_tensors,
)
from ..core import filesystem
from ..core.errors import CheckpointError
from ..core.guards import check_not_moved
from ..core.logger import logger
from ..core.registry import Pieces
from ..core.types import Results
from ..training.plain_values import is_detail

EVALUATION_FILE = "evaluation.safetensors"
_MAX_BYTES = 2**32
_MAX_LISTED_NUMBERS = 4_096


def as_tensor_if_long(value: Any) -> Any:
    """Return a list of more than 4,096 numbers as a tensor, with NaN for None; else the value.

    Numbers in a list of lists are counted together.
    """
    if not isinstance(value, list):
        return value
    try:
        array = np.array([math.nan if each is None else each for each in value])
    except ValueError:  # lists of different lengths
        return value
    is_long = array.size > _MAX_LISTED_NUMBERS and array.dtype.kind in "if"
    return torch.from_numpy(array) if is_long else value


def write_details(folder: Path, results: Results, *, optimizer_step: int) -> None:
    """Replace the file by the details of `results`, which were measured after `optimizer_step`.

    A failure to write is a warning, since training does not depend on the details.
    """
    details = {
        name: as_tensor_if_long(value) for name, value in results.items() if is_detail(value)
    }
    if not details:
        return
    path = folder / EVALUATION_FILE
    check_not_moved(path)  # another folder there ends the run
    try:
        encoded = encode({"optimizer_step": optimizer_step, "results": details}, name="evaluation")
        assert encoded.skeleton is not None
        chunks = pack_tensors(encoded.tensors, {"skeleton": encoded.skeleton.decode()})
        filesystem.replace_file(path, chunks)
    except (OSError, ValueError, CheckpointError) as error:
        logger.warning("cannot write %s: %s", path, error)


def read_details(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the step of the last evaluation, and its details.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
    """
    data = filesystem.read_file(folder / EVALUATION_FILE, max_bytes=_MAX_BYTES)
    try:
        tensors = unpack_tensors(data)  # first: it checks that the data is sound
        stored = decode(unpack_metadata(data)["skeleton"].encode(), tensors)
        return int(stored["optimizer_step"]), dict(stored["results"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{EVALUATION_FILE} is damaged ({type(error).__name__}: {error})"
        ) from None


def add_details(pieces: Pieces, folder: Path) -> None:
    """Add the details in `folder` to a checkpoint's `pieces` if both are of one evaluation."""
    loop = pieces.get("trainer", {})
    with suppress(OSError, ValueError):
        step, details = read_details(folder)
        if step == loop.get("evaluated_step"):
            loop["metrics"] = {**details, **loop["metrics"]}
