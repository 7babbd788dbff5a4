"""`accel-trainer pack SOURCE OUT`: shrink photos once and store them in a few Arrow files.

OUT can be read with `datasets.load_from_disk` and `recipes/images.py --dataset OUT`. It contains
Arrow files with the splits, class names and file names of SOURCE, and a SHA-256 for each photo,
which a run checks on every read. Photos that are already small are copied unchanged. If the command
is killed, run it again: it continues, and produces the same bytes.

example: accel-trainer pack photos packed --short-side 256 --num-workers 8
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...core import filesystem, platform
from ...core.errors import DataError, OutputError
from ...core.filesystem import writes_to
from ...core.json_files import read_json_object, write_json
from ...core.own_files import SUMS, format_sums, read_sums
from ...core.run_dir import prepare_directory
from ...core.wording import counted
from ...vision.data.photo_decode import decoder_version
from ...vision.sources.photo_columns import CHECKSUM
from ...vision.sources.photo_splits import PhotoSplits, load_splits
from ..common.output import JsonObject, tell
from ..common.parser import CommandParser
from ..common.threads import decoding_threads, in_order
from .reencode import reencode
from .shards import Record, Shard, describe_shards, plan_shards, write_shard

_SETTINGS = "pack.json"
_COMMIT = "dataset_dict.json"
_LOCK = ".lock"
_FIX = "choose a different OUT, or delete it"
_FORMAT = 1


def main(argv: Sequence[str]) -> int:
    """Pack a dataset, or continue; print what was written."""
    parser = CommandParser(__doc__)
    parser.add_source()
    parser.add_argument("out", type=Path, help="the folder to write")
    for flag, text, default, most in (
        ("--short-side", "shorter side in pixels; default: 256", 256, 1 << 16),
        ("--quality", "JPEG quality, 1 to 100; default: 92", 92, 100),
        ("--shard-size", "photos per file; default: 4096", 4096, 1 << 20),
    ):
        parser.add_number(flag, text, default=default, lowest=1, highest=most)
    parser.add_argument(
        "--on-bad-image",
        choices=("error", "skip"),
        default="error",
        help=("whether to stop at a photo that cannot be decoded, or to skip it; default: error"),
    )
    parser.add_data_options()
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the pool below already has one thread per CPU
    source = load_splits(
        options.source,
        image_column=options.image_column,
        label_column=options.label_column,
        cache_dir=options.cache_dir,
    )
    for note in source.notes:
        tell(note, file=sys.stderr)
    settings = {
        "format": _FORMAT,
        "source": source.fingerprint,
        "short_side": options.short_side,
        "quality": options.quality,
        "shard_size": options.shard_size,
        "on_bad_image": options.on_bad_image,
        "versions": _versions(),
    }
    out = prepare_directory(options.out)
    _refuse_other_files(out)
    with writes_to(out), _locked(out):
        _claim(out, settings)
        filesystem.sweep(out)
        pack(source, out, settings, num_workers=options.num_workers)
    return 0


def pack(source: PhotoSplits, out: Path, settings: JsonObject, *, num_workers: int | None) -> None:
    """Write the shards that are missing or damaged, then the files that make `out` a dataset."""
    from datasets import load_from_disk

    known = read_sums(out)
    sums: dict[str, str] = {}
    left_out: list[DataError] = []
    with decoding_threads(num_workers) as threads:
        for split, photos in source.splits.items():
            filesystem.make_directory(out / split)
            filesystem.sweep(out / split)
            shards = list(plan_shards(split, len(photos), settings["shard_size"]))
            progress = tqdm(desc=f"packing {split}", total=len(photos), unit="photo", disable=None)
            with progress as bar:
                for shard in shards:
                    path = out / split / shard.name
                    digest = filesystem.sha256_of(path) if path.exists() else None
                    is_damaged = known is not None and digest != known.get(f"{split}/{shard.name}")
                    if digest is None or is_damaged:
                        records = _records(source, shard, settings, threads, left_out, bar)
                        digest = write_shard(path, records)
                    sums[f"{split}/{shard.name}"] = digest
                    bar.update(shard.rows.stop - bar.n)
            descriptions = describe_shards(shards, source.class_names, source.fingerprint)
            for name, content in descriptions.items():
                write_json(out / split / name, content)
    filesystem.write_file_atomic(out / SUMS, format_sums(sums))
    write_json(out / _COMMIT, {"splits": list(source.splits)})
    if left_out:
        num_photos = counted(len(left_out), "photo")
        tell(f"left out now: {num_photos}, the first because {left_out[0].message}")
    num_bytes = sum((out / name).stat().st_size for name in sums)
    packed = load_from_disk(str(out))
    counts = ", ".join(f"{split.num_rows:,} {name}" for name, split in packed.items())
    tell(
        f"{out}: {counts} photos of {counted(len(source.class_names), 'class')}, "
        f"{num_bytes:,} bytes in {counted(len(sums), 'file')}"
    )


def _versions() -> dict[str, str]:
    import pyarrow

    return {
        "decoder": decoder_version(),
        "torch": torch.__version__,
        "pyarrow": pyarrow.__version__,
    }


def _refuse_other_files(out: Path) -> None:
    """Raise OutputError if `out` has files and no settings of a pack; nothing in it is changed."""
    if (out / _SETTINGS).exists():
        return
    names = (entry.name for entry in out.iterdir() if entry.name != _LOCK)
    # A pack that was killed at its start leaves temporaries.
    if found := sorted(name for name in names if not filesystem.TEMPORARY_NAME.fullmatch(name)):
        fact = f"{out} holds {found[0]}, which pack did not write"
        raise OutputError("PACK_OUT", f"{fact}: {_FIX}")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold a lock on `out` inside the block. Raises OutputError if another process holds it."""
    descriptor = filesystem.open_regular(out / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        platform.take_lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise OutputError(
            "LOCKED", f"{out} is in use by another pack: wait for it, or choose a different OUT"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def _claim(out: Path, settings: JsonObject) -> None:
    """Store the settings, or check those of an earlier pack. Raises OutputError for others."""
    path = out / _SETTINGS
    if not path.exists():
        write_json(path, settings)
        return
    try:
        stored = read_json_object(path)
    except (OSError, ValueError) as error:
        raise OutputError("PACK_OUT", f"{path} cannot be read ({error}): {_FIX}") from error
    names = [name for name in settings if settings[name] != stored.get(name)]
    if names:
        listed = "; ".join(f"{name}: {stored.get(name)} -> {settings[name]}" for name in names)
        raise OutputError(
            "PACK_OUT",
            f"{out} was packed from other data or with other settings ({listed}): {_FIX}",
        )


def _records(
    source: PhotoSplits,
    shard: Shard,
    settings: JsonObject,
    threads: ThreadPoolExecutor,
    left_out: list[DataError],
    bar: Any,
) -> Iterator[Record]:
    """Yield the rows of a shard, in order.

    A photo that cannot be decoded is added to `left_out`, or raises DataError, as the settings ask.
    """
    photos = source.splits[shard.split]

    def record(index: int) -> Record | DataError:
        try:
            data = reencode(
                photos.encoded_at(index),
                photos.name_of(index),
                short_side=settings["short_side"],
                quality=settings["quality"],
            )
        except DataError as error:
            return error
        image = {"bytes": data, "path": source.stored_name(shard.split, index)}
        return {
            "image": image,
            "label": int(photos.labels[index]),
            CHECKSUM: hashlib.sha256(data).hexdigest(),
        }

    for row in in_order(threads, record, shard.rows):
        bar.update()
        if isinstance(row, dict):
            yield row
        elif settings["on_bad_image"] == "skip":
            left_out.append(row)
        else:
            raise DataError(
                row.code, f"{row.message}, or leave such photos out with --on-bad-image skip"
            )
