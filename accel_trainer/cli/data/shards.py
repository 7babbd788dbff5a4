"""Writes the Arrow files of a packed dataset, and the files that `datasets` needs beside them."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core import filesystem
from ...vision.sources.photo_columns import CHECKSUM

Record = dict[str, Any]
"""A photo as a row of a table, by column."""

_BATCH_SIZE = 64  # photos in an Arrow record batch


@dataclass(frozen=True)
class Shard:
    """A file with the photos `rows` of a split."""

    split: str
    name: str
    rows: range


def plan_shards(split: str, num_photos: int, shard_size: int) -> Iterator[Shard]:
    """Yield the shards of a split; an empty split has one empty shard."""
    starts = range(0, num_photos, shard_size) or range(1)
    for number, start in enumerate(starts):
        name = f"data-{number:05}-of-{len(starts):05}.arrow"
        yield Shard(split, name, range(start, min(start + shard_size, num_photos)))


def _features(class_names: Sequence[str]) -> Any:
    from datasets import ClassLabel, Features, Image, Value

    return Features(
        {"image": Image(), "label": ClassLabel(names=list(class_names)), CHECKSUM: Value("string")}
    )


def write_shard(path: Path, records: Iterator[Record]) -> str:
    """Write a shard, whole or not at all, and return its hash."""
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        for chunk in _stream(records):
            digest.update(chunk)
            yield chunk

    filesystem.replace_file(path, chunks())
    return digest.hexdigest()


def _stream(records: Iterator[Record]) -> Iterator[bytes]:
    """Yield the records as the parts of an Arrow stream."""
    import pyarrow as pa

    schema = _features(()).arrow_schema.remove_metadata()
    file = io.BytesIO()

    def take_written() -> bytes:
        data = file.getvalue()
        file.seek(0)
        file.truncate()
        return data

    with pa.ipc.new_stream(file, schema) as writer:
        while rows := list(itertools.islice(records, _BATCH_SIZE)):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
            yield take_written()
    yield take_written()


def describe_shards(
    shards: Sequence[Shard], class_names: Sequence[str], fingerprint: str
) -> dict[str, Any]:
    """Return the two files that `load_from_disk` needs beside the shards of a split."""
    split = shards[0].split
    state: dict[str, Any] = {
        "_data_files": [{"filename": shard.name} for shard in shards],
        "_fingerprint": hashlib.sha256(f"{fingerprint} {split}".encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    info = {"citation": "", "description": "", "homepage": "", "license": ""}
    return {
        "state.json": state,
        "dataset_info.json": {**info, "features": _features(class_names).to_dict()},
    }
