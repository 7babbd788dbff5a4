"""Folders that are written again as a whole: a list in each says which of its files are our own.

What somebody has added or changed since is never overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .filesystem import files_in, read_file, sha256_of

SUMS = "SHA256SUMS"
"""The name of the list, which `sha256sum -c` can check."""
_MAX_BYTES = 2**26


def sums_of(folder: Path) -> bytes:
    """Return the list of all files in a folder."""
    return format_sums({name: sha256_of(folder / name) for name in sorted(files_in(folder))})


def format_sums(sums: Mapping[str, str]) -> bytes:
    """Return the list that has these hashes by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()


def read_sums(folder: Path) -> dict[str, str] | None:
    """Return the hashes of the list by name; None without a list. Raises OSError."""
    try:
        content = read_file(folder / SUMS, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return None
    parts = [line.partition("  ") for line in content.decode(errors="replace").splitlines()]
    return {name: digest for digest, _, name in parts}


def unchanged_in(folder: Path) -> set[str]:
    """Return the names of the files that are as the list has them, and the list itself."""
    found = set()
    with suppress(OSError):
        for name, digest in (read_sums(folder) or {}).items():
            with suppress(OSError):  # it is gone, or a link
                if sha256_of(folder / name) == digest:
                    found.add(name)
        found.add(SUMS)
    return found
