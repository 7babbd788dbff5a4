"""Compares files that two runs of any program left, without running code that is in them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from accel_trainer.commands import filesystem, first_difference

_PICKLE = "data.pkl"  # in a file of torch.save: all but the numbers of its tensors


def files_matching(patterns: Sequence[str], out: Path) -> dict[str, Path]:
    """Return the files of patterns with `{out}`, by their paths in the folder `out`, sorted."""
    found = {
        str(path.relative_to(out)): path
        for pattern in patterns
        for path in map(Path, glob(pattern.replace("{out}", str(out)), recursive=True))
        if path.is_file() and path.is_relative_to(out)
    }
    return dict(sorted(found.items()))


def differences(one: Mapping[str, Path], other: Mapping[str, Path]) -> list[str]:
    """Return a line for each file that is not the same in both, with the first part that differs.

    They are in the order in which they were last written, so the first ones tell where it began.
    The parts are the tensors of safetensors files, the values of JSON files, and what `torch.save`
    and `numpy.savez` put into an archive.
    """
    lines = []
    paths = {**other, **one}
    for name in sorted(paths, key=lambda name: (paths[name].stat().st_mtime_ns, name)):
        if name not in other:
            lines.append(f"{name}: only in the first run")
        elif name not in one:
            lines.append(f"{name}: not in the first run")
        elif filesystem.sha256_of(one[name]) != filesystem.sha256_of(other[name]):
            parts = [_parts(path) for path in (one[name], other[name])]
            difference = first_difference(*parts)
            if difference is not None:
                lines.append(f"{name}: {difference}")
    return lines


def _parts(path: Path) -> dict[str, Any]:
    """Return what is compared of a file; all its bytes if it is of no known format."""
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if path.suffix == ".json":
            return {"value": json.loads(path.read_bytes())}
        if zipfile.is_zipfile(path):
            return _members(path)
    except (SafetensorError, ValueError, zipfile.BadZipFile):
        pass  # cut off, perhaps: then its bytes differ
    return {"its bytes": filesystem.sha256_of(path)}


def _members(path: Path) -> dict[str, Any]:
    """Return the checksum and the size of each member of an archive, tensors first.

    Values such as the arguments of the program may differ without harm, and hide the tensors.
    """
    with zipfile.ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: "/data/" not in entry.filename)
        return {
            _described(entry.filename.split("/", 1)[-1]): f"{entry.CRC} {entry.file_size}"
            for entry in entries
        }


def _described(member: str) -> str:
    if member == _PICKLE:
        return "the values beside its tensors"
    return f"tensor {member[5:]}" if member.startswith("data/") else member
