"""Recognises files whose content is read from a cache, without reading them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ...core.filesystem import stamp_of


def hash_of_stamps(paths: Iterable[str | Path]) -> str:
    """Return a hash of the paths of files and of what changes whenever a file does."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{os.path.abspath(path)}\0{stamp_of(os.stat(path))}\n".encode())
    return digest.hexdigest()


def cache_of(paths: Iterable[str | Path], cache_dir: Path | None) -> str:
    """Return the folder in which `datasets` may keep what it makes of these files.

    By itself it would recognise a file by path and time of modification. It lies below `cache_dir`;
    None: in the default cache of `datasets`.
    """
    from datasets import config

    parent = config.HF_DATASETS_CACHE if cache_dir is None else cache_dir
    return os.path.join(parent, hash_of_stamps(paths)[:16])
