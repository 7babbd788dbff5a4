"""Refuses loaders of a user's own loop that cannot be continued in the middle of an epoch."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher
from torch.utils.data import DataLoader, IterableDataset

from ..core.errors import ConfigError

_FIX = "give a torch DataLoader over a map-style dataset, as accelerator.prepare returns it"


def torch_loader(loader: Any) -> Any:
    """Return the torch DataLoader that reads the samples of `loader`, perhaps accelerate's.

    Raises ConfigError if it cannot be continued.
    """
    base = loader.base_dataloader if isinstance(loader, DataLoaderAdapter) else loader
    if (reason := _reason_against(loader, base)) is not None:
        raise ConfigError("LOOP_LOADER", reason)
    return base


def _reason_against(loader: Any, base: Any) -> str | None:
    """Return why a loader cannot be continued, and the fix; None if it can."""
    if not isinstance(base, DataLoader):
        return f"the loader is a {type(loader).__name__}: {_FIX}"
    if isinstance(base.dataset, IterableDataset):
        return f"the dataset is a stream, without numbers: {_FIX}"
    if isinstance(loader, DataLoaderDispatcher):
        return (
            "with dispatch_batches the main process reads for all, which cannot be continued "
            "exactly: use DataLoaderConfiguration(dispatch_batches=False)"
        )
    if hasattr(base, "state_dict"):
        return (
            "a stateful loader keeps a place of its own: use a plain DataLoader "
            "(use_stateful_dataloader=False), whose place the run keeps"
        )
    if not base.in_order:
        return "with in_order=False the fastest worker decides the order: use in_order=True"
    try:
        len(base.batch_sampler)  # type: ignore[arg-type]  # not all have one
    except TypeError:
        return (
            "its batches cannot be counted, so it has no epochs: give the loader a batch_size, "
            "and its sampler a __len__"
        )
    return None
