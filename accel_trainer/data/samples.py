"""Map-style datasets: any object with `len()` and `[index]`, or two columns of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ..core.errors import ConfigError


def check_dataset(dataset: Any, name: str) -> None:
    """Raise ConfigError unless `dataset` can be read by index."""
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if isinstance(dataset, type):
        fix = "give an instance of it"
    elif isinstance(dataset, DataLoader):
        fix = (
            "give its dataset, as loader.dataset, and a sampler's order as DatasetOptions(order=); "
            "--batch-size, --batch.order and --num-workers replace its settings"
        )
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        fix = f"give one of its parts, {', '.join(map(repr, dataset))}"
    elif isinstance(dataset, list | tuple) and any(isinstance(each, Dataset) for each in dataset):
        fix = "join them, as ConcatDataset does, or, to evaluate on each, give a dict of them"
    elif isinstance(dataset, list | tuple) and _are_columns(dataset):
        fix = "it holds the inputs and targets of all samples: give TensorDataset(X, Y), of tensors"
    elif isinstance(dataset, Iterator):
        fix = "its first reading uses it up, so give StreamReader a function that makes a new one"
    elif is_stream and hasattr(dataset, "__iter__"):
        fix = "it has no [index], so give a function that starts it to StreamReader"
    elif is_stream or isinstance(dataset, str) or not hasattr(dataset, "__len__"):
        fix = "give an object with len() and [index]"
        fix += ", or with run and monitors" * (name == "an evaluation set")
    elif (length := dataset.__len__()) < 0:
        fix = f"its len() is {length}, so return the number of its samples"
    else:
        return
    kind = dataset.__name__ if isinstance(dataset, type) else type(dataset).__name__
    raise ConfigError("DATASET", f"{name} is {kind}: {fix}")


def _are_columns(parts: Sequence[Any]) -> bool:
    """Whether these are the inputs and the targets of all samples, and not two samples."""
    return len(parts) == 2 and all(
        np.ndim(part) and len(part) == len(parts[0]) > 2 for part in parts
    )


def datasets_in(dataset: Any) -> list[Any]:
    """Return `dataset`, and the datasets and samplers in it, as in a `Subset` or `DataLoader`."""
    found = [dataset]
    known = {id(dataset)}
    for each in found:
        for name in ("dataset", "datasets", "sampler", "batch_sampler"):
            value = getattr(each, name, ())
            for part in value if isinstance(value, list | tuple) else [value]:
                if id(part) not in known:
                    known.add(id(part))
                    found.append(part)
    return found


def set_epoch(parts: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch(epoch)` of those that have it, as accelerate does."""
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


class Columns:
    """The `(input, target)` samples of a table with mappings as rows, such as a `datasets.Dataset`.

    A picture becomes float32 [C, H, W] in [0, 1] with 1 or 3 channels, and a list of numbers a
    tensor if it `reads_lists`; other values stay as they are.
    """

    def __init__(self, table: Any, columns: tuple[str, str], *, reads_lists: bool = False) -> None:
        if isinstance(columns, str) or len(columns) != 2:
            raise ConfigError(
                "DATASET",
                f'columns={columns!r}: pass two names, such as columns=("image", "label")',
            )
        self.dataset = table
        self._columns = columns
        self._reads_lists = reads_lists

    @property
    def labels(self) -> Any:
        """The targets if they are numbers, without a look at the rows. Raises any error if not."""
        name = self._columns[1]
        np.dtype(self.dataset.features[name].dtype)  # not of pictures, which would be decoded
        return self.dataset.with_format("numpy")[name][:]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        row = self.dataset[index]
        if unknown := [name for name in self._columns if name not in row]:
            raise KeyError(f"no column {unknown[0]}, only {', '.join(row)}")
        return tuple(self._read(row[name]) for name in self._columns)

    def _read(self, value: Any) -> Any:
        if self._reads_lists and isinstance(value, list):
            with suppress(RuntimeError, TypeError, ValueError):  # other than rows of numbers
                return torch.tensor(value)
        return _picture_to_tensor(value)


def _picture_to_tensor(value: Any) -> Any:
    if not hasattr(value, "getbands"):  # Only pictures of Pillow have it.
        return value
    if value.mode not in ("L", "RGB"):
        raise ValueError(
            f'a picture has mode {value.mode}: convert it to "RGB" or "L", such as in '
            "with_transform"
        )
    pixels = torch.from_numpy(np.array(value)).float() / 255
    return pixels[None] if value.mode == "L" else pixels.permute(2, 0, 1).contiguous()


def rows_of(dataset: Any, ids: Sequence[int]) -> list[Tensor] | None:
    """Return what `default_collate` would make of samples `ids`, if they are rows of two tensors.

    None if they are not, or cannot be read. No code of the user's runs.
    """
    with suppress(IndexError, TypeError, RuntimeError):
        while type(dataset) is Subset:
            ids = [dataset.indices[number] for number in ids]
            dataset = dataset.dataset
        tensors = dataset.tensors if type(dataset) is TensorDataset else ()
        if len(tensors) == 2 and all(map(_is_plain, tensors)):
            places = torch.tensor(ids)
            # [places] would take numbers of 8 bits for a mask.
            return [tensor.index_select(0, places) for tensor in tensors]
    return None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()
