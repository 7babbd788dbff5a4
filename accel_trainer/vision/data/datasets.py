"""Loads image datasets by name or folder."""

from __future__ import annotations

from pathlib import Path

from ...core.run_dir import expand_home
from ..sources.find import find_source
from .bad_images import BadImageConfig
from .cache import open_or_build
from .images import ImageDataset


def load_images(name_or_path: str, *, cache_dir: Path, bad_images: BadImageConfig | None = None) -> ImageDataset:
    """Load a dataset by name (`cifar10`, `cifar100`, `digits`) or from a folder.

    The first call decodes it into a cache below `cache_dir`; later calls map the cache after verifying its hashes. Any
    number of processes may call this at the same time: one decodes, the others wait.

    Raises:
        ConfigError: an unknown name.
        DataError: missing, damaged or inconsistent data, more than `bad_images` allows (default: none).
        OutputError: the cache cannot be written.
    """
    cache_dir, bad_images = expand_home(cache_dir), bad_images or BadImageConfig()
    return open_or_build(find_source(name_or_path), cache_dir=cache_dir, bad_images=bad_images)
