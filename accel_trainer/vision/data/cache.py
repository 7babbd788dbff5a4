"""Loads small images: decodes a dataset once into files, and maps these into memory.

The files hold uint8 pixels; their hashes are verified whenever they are opened.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ...core import filesystem, platform
from ...core.errors import DataError, OutputError
from ...core.filesystem import AppendFile
from ...core.json_files import parse_json
from ...core.logger import logger
from ...core.run_dir import expand_home, free_bytes
from ..sources.find import find_image_source
from ..sources.raw import ImageSource, RawImages, RawSplit, checked_class_names
from .bad_images import BadImage, BadImageConfig
from .images import ImageDataset, ImageSplit, MappedFile, Normalization
from .photo_decode import Pixels

_FORMAT = 2  # it changes whenever the same files decode to different pixels
_MANIFEST = "images.json"
_MAX_MANIFEST_BYTES = 1 << 24
# Keys of the manifest.
_LEFT_OUT = "left_out"
_SHA256 = "sha256"
# Endings of the files of a split.
_IMAGES = "_images.u8"
_LABELS = "_labels.i64"
_JOURNAL = "_chunks.jsonl"
_KINDS = (_IMAGES, _LABELS, _JOURNAL)
_CHUNK_IMAGES = 256
_MIN_STD = 1 / 255  # avoids a division by zero for an all-black channel

Shape = Sequence[int]
"""H, W, C of one image."""
Manifest = dict[str, Any]
"""What a cache holds, with the hashes of its files, as JSON values."""
Row = dict[str, Any]
"""A chunk's line in the journal: `start` and `stop` of its samples, `left_out`, and the `sha256`
of its pixels."""


def load_images(
    name_or_path: str, *, cache_dir: Path, bad_images: BadImageConfig | None = None
) -> ImageDataset:
    """Load a dataset by name (`cifar10`, `cifar100`, `digits`) or from a folder.

    The first call decodes it into a cache below `cache_dir`; later calls map the cache after
    verifying its hashes. Any number of processes may call this at the same time: one decodes, the
    others wait. The cache records which images were left out, so `bad_images` applies even if
    another run built it.

    Raises:
        ConfigError: an unknown name.
        DataError: the data is missing, damaged or inconsistent, or more images cannot be used than
            `bad_images` allows (default: none).
        OutputError: the cache cannot be written.
    """
    cache_dir = expand_home(cache_dir)
    bad_images = bad_images or BadImageConfig()
    source = find_image_source(name_or_path)
    folder = cache_folder(source, cache_dir)
    try:
        dataset = _open(folder) or _build_once(folder, source, bad_images)
    except OSError as error:
        fact = f"cannot write the image cache {folder} ({error.strerror or error})"
        raise OutputError(
            "CACHE_NOT_WRITABLE", f"{fact}: free some space, or choose a different cache folder"
        ) from error
    for split in (dataset.train, dataset.test):
        bad_images.check(split.left_out, num_images=len(split) + len(split.left_out))
    return replace(dataset, notes=source.notes, facts=source.facts)


def _build_once(folder: Path, source: ImageSource, bad_images: BadImageConfig) -> ImageDataset:
    """Build the cache unless another process builds it at the same time, and open it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _writer_lock(folder.parent) as is_sole_writer:
        dataset = _open(folder)
        if dataset is None:
            if os.path.lexists(folder):
                _refuse_other_files(folder)
                logger.warning(
                    "the image cache %s is damaged or from an older version, and is rebuilt",
                    folder,
                )
                filesystem.remove_own([folder], _own_files)
            logger.info("decoding %s into %s, once", source.name, folder)
            try:
                _build(folder, source.read(), bad_images, is_sole_writer=is_sole_writer)
            except OSError:
                # On a file system without locks, another process may have written it meanwhile.
                if _open(folder) is None:
                    raise
            dataset = _open(folder)
    if dataset is None:
        raise OutputError(
            "CACHE_DAMAGED", f"{folder} differs from what was just written: check the disk"
        )
    return dataset


def _refuse_other_files(folder: Path) -> None:
    """Raise OutputError if a cache to be rebuilt is no folder, or has files of something else."""
    other = folder
    if folder.is_dir() and not folder.is_symlink():
        found = [path for path in folder.iterdir() if path.name not in _own_files(folder)]
        if not found:
            return
        other = min(found)
    raise OutputError(
        "CACHE_FOLDER",
        f"{other} does not belong to an image cache, which would overwrite it: "
        "move it away, or choose a different cache folder",
    )


def _own_files(folder: Path) -> set[str]:
    """Return the names of the files of a cache."""
    return {_MANIFEST, *(name + kind for name in ("train", "test") for kind in _KINDS)}


def cache_folder(source: ImageSource, cache_dir: Path) -> Path:
    """Return the folder for the decoded images of `source`."""
    digest = hashlib.sha256(f"{_FORMAT}:{source.key}".encode()).hexdigest()
    return cache_dir / f"{source.name}-{digest[:16]}"


@contextmanager
def _writer_lock(cache_dir: Path) -> Iterator[bool]:
    """Wait until no other process writes, and yield true.

    Where files cannot be locked, yield false: several processes may write.
    """
    descriptor = _open_lock(cache_dir / ".lock")
    try:
        try:
            platform.wait_for_lock(descriptor)
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): several processes may decode at once",
                cache_dir,
                error,
            )
            yield False
        else:
            filesystem.sweep(cache_dir)
            yield True
    finally:
        os.close(descriptor)  # this also unlocks


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | platform.SAFELY, 0o644)
    except PermissionError:  # another user's, which can be locked all the same
        return os.open(path, os.O_RDONLY | platform.SAFELY)


def _build(
    folder: Path, raw: RawImages, bad_images: BadImageConfig, *, is_sole_writer: bool
) -> None:
    """Write the cache under another name and rename it.

    If a sole writer is killed, the next one continues its work.
    """
    class_names = checked_class_names(raw)
    _, first = next(bad_images.usable(raw.train, []))
    shape = first.shape
    if is_sole_writer:
        partial = folder.with_name(f"{folder.name}.partial")
    else:
        partial = filesystem.temporary_path(folder, "tmp")
    filesystem.make_directory(partial)
    filesystem.sweep(partial)
    try:
        num_images = len(raw.train.labels) + len(raw.test.labels)
        _check_free_space(partial, int(np.prod(shape)) * num_images)
        left_out: dict[str, list[BadImage]] = {"train": [], "test": []}
        train = _write_split(partial, "train", raw.train, shape, bad_images, left_out["train"])
        test = _write_split(partial, "test", raw.test, shape, bad_images, left_out["test"])
        manifest: Manifest = {
            "shape": shape,
            "class_names": class_names,
            "train": train,
            "test": test,
        }
        if any(left_out.values()):
            manifest[_LEFT_OUT] = left_out
        manifest[_SHA256] = _sha256(manifest)
        filesystem.write_file_atomic(partial / _MANIFEST, _encoded(manifest))
        filesystem.rename(partial, folder)
    except (OSError, DataError, OutputError):
        filesystem.remove_own([partial], _own_files)
        raise


def _check_free_space(partial: Path, needed: int) -> None:
    """Raise OutputError if `needed` bytes do not fit on the disk; `partial` may hold some."""
    free = free_bytes(partial.parent) + sum(path.stat().st_size for path in partial.iterdir())
    if needed > free:
        raise OutputError(
            "CACHE_TOO_LARGE",
            f"the decoded images need {needed / 2**30:.2f} GiB in {partial.parent}, which has "
            f"{free / 2**30:.2f} GiB free: choose a different cache folder, or smaller images",
        )


def _write_split(
    folder: Path,
    name: str,
    split: RawSplit,
    shape: Shape,
    bad_images: BadImageConfig,
    left_out: list[BadImage],
) -> Manifest:
    """Write the usable images and labels of a split; return their entry in the manifest."""
    digest = hashlib.sha256()
    kept: list[int] = []
    counts = np.zeros((shape[-1], 256), dtype=np.int64)  # [C, values]: exact as integers
    images = AppendFile(folder / f"{name}{_IMAGES}")
    journal = AppendFile(folder / f"{name}{_JOURNAL}")
    bar = tqdm(
        desc=f"decoding {name}",
        total=len(split.labels),
        unit="image",
        leave=False,
        disable=None,
    )
    with closing(images), closing(journal), bar:
        for row, chunk in _chunks(split, shape, images, journal, bad_images, left_out):
            digest.update(chunk.data)
            dropped = {index for index, *_ in row["left_out"]}
            kept += [index for index in range(row["start"], row["stop"]) if index not in dropped]
            for channel in range(len(counts)):
                counts[channel] += np.bincount(chunk[..., channel].ravel(), minlength=256)
            bar.update(row["stop"] - row["start"])
        images.sync()
    labels = split.labels[kept].tobytes()
    filesystem.write_file_atomic(folder / f"{name}{_LABELS}", labels)
    values = np.arange(256)
    return {
        "num_samples": len(kept),
        "images_sha256": digest.hexdigest(),
        "labels_sha256": hashlib.sha256(labels).hexdigest(),
        "pixel_sums": [(counts @ values).tolist(), (counts @ values**2).tolist()],
    }


def _chunks(
    split: RawSplit,
    shape: Shape,
    images: AppendFile,
    journal: AppendFile,
    bad_images: BadImageConfig,
    left_out: list[BadImage],
) -> Iterator[tuple[Row, Pixels]]:
    """Yield chunks of a split's usable images [n, H, W, C], in order, each with its journal row.

    A chunk is yielded once its pixels and its row are written.
    """
    start = 0
    for row, chunk in _written_chunks(images, journal, shape):
        left_out += [BadImage(code, message) for _, code, message in row["left_out"]]
        yield row, chunk
        start = row["stop"]
    usable = bad_images.usable(split, left_out, start=start)
    num_known = len(left_out)
    while found := list(islice(usable, _CHUNK_IMAGES)):
        last, _ = found[-1]
        stop = last + 1 if len(found) == _CHUNK_IMAGES else len(split.labels)
        dropped = sorted({*range(start, stop)} - {index for index, _ in found})
        bad = zip(dropped, left_out[num_known:], strict=True)
        chunk = np.ascontiguousarray(np.stack([image for _, image in found]))
        row = {
            "start": start,
            "stop": stop,
            "sha256": hashlib.sha256(chunk.data).hexdigest(),
            "left_out": [[index, *reason] for index, reason in bad],
        }
        images.append(chunk.tobytes())
        journal.append(json.dumps(row).encode() + b"\n")
        yield row, chunk
        start = stop
        num_known = len(left_out)


def _written_chunks(
    images: AppendFile, journal: AppendFile, shape: Shape
) -> Iterator[tuple[Row, Pixels]]:
    """Yield the chunks that a killed writer left, up to the first wrong hash; cut off the rest."""
    num_image_bytes = 0
    num_journal_bytes = 0
    with filesystem.open_file(images.path) as file:
        for line in filesystem.read_lines(journal.path):
            try:
                row = parse_json(line)
                left_out = [BadImage(code, message) for _, code, message in row["left_out"]]
                num_images = row["stop"] - row["start"] - len(left_out)
                data = file.read(num_images * math.prod(shape))
            except (ValueError, KeyError, TypeError):
                break  # after a power loss the file can hold anything
            if hashlib.sha256(data).hexdigest() != row["sha256"]:
                break
            yield row, np.frombuffer(data, np.uint8).reshape(-1, *shape)
            num_image_bytes += len(data)
            num_journal_bytes += len(line)
    images.truncate(num_image_bytes)
    journal.truncate(num_journal_bytes)


def _encoded(manifest: Manifest) -> bytes:
    return json.dumps(manifest, indent=1).encode()


def _sha256(manifest: Manifest) -> str:
    return hashlib.sha256(_encoded(manifest)).hexdigest()


def _open(folder: Path) -> ImageDataset | None:
    """Map the cache into memory; None if it is missing, incomplete or damaged."""
    try:
        text = filesystem.read_file(folder / _MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
        manifest = dict(parse_json(text))
        if manifest.pop(_SHA256) != _sha256(manifest):
            raise ValueError(f"{_MANIFEST} is not what was written")
        left_out = manifest.pop(_LEFT_OUT, {"train": [], "test": []})
        shape = [int(size) for size in manifest["shape"]]  # [H, W, C]
        class_names = tuple(str(name) for name in manifest["class_names"])
        train, test = (
            _open_split(folder, name, manifest[name], shape, len(class_names), left_out[name])
            for name in ("train", "test")
        )
        normalization = _normalization(manifest["train"], shape)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        logger.debug("no usable image cache in %s: %s", folder, error)
        return None
    return ImageDataset(
        train=train,
        test=test,
        class_names=class_names,
        normalization=normalization,
        fingerprint=_sha256(manifest),  # it contains the hashes of the files
    )


def _open_split(
    folder: Path, name: str, entry: Any, shape: list[int], num_classes: int, left_out: Any
) -> ImageSplit:
    num_samples = int(entry["num_samples"])
    files = [
        MappedFile(path, str(entry[f"{what}_sha256"]), path.stat())
        for path, what in (
            (folder / f"{name}{_IMAGES}", "images"),
            (folder / f"{name}{_LABELS}", "labels"),
        )
    ]
    images = _mapped(files[0], [num_samples, *shape], dtype=torch.uint8)
    labels = _mapped(files[1], [num_samples], dtype=torch.int64)
    return ImageSplit(
        images=images.permute(0, 3, 1, 2),
        labels=labels,
        num_classes=num_classes,
        left_out=tuple(BadImage(str(code), str(message)) for code, message in left_out),
        files=tuple(files),
    )


def _mapped(file: MappedFile, shape: list[int], *, dtype: torch.dtype) -> Tensor:
    """Map a file into memory. Raises ValueError if its size or hash is wrong."""
    num_elements = math.prod(shape)
    if file.status.st_size != num_elements * dtype.itemsize:
        raise ValueError(f"{file.path} has {file.status.st_size} bytes")
    # A private mapping: writes to the tensor do not change the file.
    flat = torch.from_file(str(file.path), shared=False, size=num_elements, dtype=dtype)
    # Verified at every start: a flipped bit would train a different model.
    if hashlib.sha256(flat.numpy().data).hexdigest() != file.sha256:
        raise ValueError(f"{file.path} is not what was written")
    return flat.view(shape)


def _normalization(entry: Any, shape: list[int]) -> Normalization:
    count = int(entry["num_samples"]) * shape[0] * shape[1] * 255
    sums, squares = entry["pixel_sums"]
    mean = [total / count for total in sums]
    variance = [total / (count * 255) - m**2 for total, m in zip(squares, mean, strict=True)]
    std = [max(math.sqrt(max(v, 0.0)), _MIN_STD) for v in variance]
    return Normalization(mean=tuple(mean), std=tuple(std))
