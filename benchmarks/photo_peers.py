"""Other ways to get photos as batches of uint8, each set up as its documentation says; `photos`
compares them."""

from __future__ import annotations

import importlib.util
import io
import math
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, library
from torch.utils.data import DataLoader

SIZE, BATCH_SIZE = 224, 64
SCALE, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)
NUM_CLASSES, NUM_SHARDS = 2, 4


class PilTransform:
    """RandomResizedCrop and a flip of a PIL image, as in torchvision."""

    def __call__(self, image: Any) -> Tensor:
        from PIL import Image

        left, top, columns, rows = self._box(*image.size)
        place = (left, top, left + columns, top + rows)
        image = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=place)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def of_rows(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"image": [self(image) for image in rows["image"]], "label": rows["label"]}

    def of_bytes(self, data: bytes) -> Tensor:
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            return self(image)

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = random.uniform(*SCALE) * width * height
            aspect = math.exp(random.uniform(*map(math.log, SHAPE)))
            columns, rows = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < columns <= width and 0 < rows <= height:
                return (
                    random.randint(0, width - columns),
                    random.randint(0, height - rows),
                    columns,
                    rows,
                )
        return 0, 0, width, height


class Encoded:
    """A dataset of files in memory, which PIL decodes."""

    def __init__(self, files: Sequence[bytes], num_rows: int) -> None:
        self._files, self._num_rows, self._transform = files, num_rows, PilTransform()

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform.of_bytes(self._files[index % len(self._files)]), index % NUM_CLASSES


@dataclass(frozen=True)
class Source:
    """Encoded photos, which repeat up to `num_rows`; also as a `datasets.Dataset`; a folder to
    write other forms to."""

    files: Sequence[bytes]
    num_rows: int
    saved: Any
    folder: Path

    def rows(self) -> Iterator[tuple[int, bytes, int]]:
        for index in range(self.num_rows):
            yield index, self.files[index % len(self.files)], index % NUM_CLASSES


def pil(source: Source, num_workers: int) -> Iterator[Any]:
    data: Any = Encoded(source.files, source.num_rows)
    return iter(DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers))


def hf_datasets(source: Source, num_workers: int) -> Iterator[Any]:
    rows = source.saved.with_transform(PilTransform().of_rows)
    return iter(DataLoader(rows, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers))


def timm_loader(source: Source, num_workers: int) -> Iterator[Any]:
    """`create_loader` on a folder: PIL and torchvision's transforms, collated to uint8 for its
    prefetcher.

    Without the prefetcher itself, which normalises the batch on its device.
    """
    _define_torchvision_operators()
    from timm.data import create_dataset, create_loader

    folder = source.folder / "folder"
    if not folder.exists():
        for index, data, label in source.rows():
            (folder / str(label)).mkdir(parents=True, exist_ok=True)
            (folder / str(label) / f"{index}.jpg").write_bytes(data)
    loader = create_loader(
        create_dataset("", root=str(folder)),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH_SIZE,
        is_training=True,
        scale=SCALE,
        ratio=SHAPE,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        device=torch.device("cpu"),
    )
    return iter(loader.loader)


def _define_torchvision_operators() -> None:
    """torchvision's wheel on PyPI does not load beside a CPU build of torch; no photo needs what it
    then lacks."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(
                f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            )


def webdataset(source: Source, num_workers: int) -> Iterator[Any]:
    """Tars, a shuffle buffer of 1,000, PIL."""
    import webdataset as wds

    folder = source.folder / "tars"
    if not folder.exists():
        folder.mkdir()
        for shard in range(NUM_SHARDS):
            with tarfile.open(folder / f"{shard:06}.tar", "w") as tar:
                for index, data, label in source.rows():
                    if index % NUM_SHARDS == shard:
                        for kind, content in (("jpg", data), ("cls", str(label).encode())):
                            member = tarfile.TarInfo(f"{index:06}.{kind}")
                            member.size = len(content)
                            tar.addfile(member, io.BytesIO(content))
    tars = f"{folder}/{{000000..{NUM_SHARDS - 1:06}}}.tar"
    dataset = (
        wds.WebDataset(tars, shardshuffle=NUM_SHARDS)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
    )
    dataset = dataset.map_tuple(PilTransform(), int).batched(BATCH_SIZE)
    return iter(wds.WebLoader(dataset, batch_size=None, num_workers=num_workers))


def litdata(source: Source, num_workers: int) -> Iterator[Any]:
    """Chunks written by `optimize`, of files as they are, and a `StreamingDataset` that decodes
    them by PIL."""
    import litdata as ld

    class Photos(ld.StreamingDataset):  # type: ignore[misc]  # of any type where litdata is not installed
        transform_photo = PilTransform()

        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            sample = super().__getitem__(index)
            return self.transform_photo.of_bytes(sample["image"]), sample["label"]

    folder = source.folder / "chunks"
    if not folder.exists():
        inputs = [(data, label) for _, data, label in source.rows()]
        # It sets the start method for the whole process: that of the others.
        ld.optimize(
            _sample, inputs, str(folder), chunk_bytes="16MB", num_workers=1, start_method="fork"
        )
    return iter(
        ld.StreamingDataLoader(
            Photos(str(folder), shuffle=True), batch_size=BATCH_SIZE, num_workers=num_workers
        )
    )


def _sample(row: tuple[bytes, int]) -> dict[str, Any]:
    return {"image": row[0], "label": row[1]}


@dataclass(frozen=True)
class Peer:
    """A way, and the packages that it needs."""

    batches: Callable[[Source, int], Iterator[Any]]
    needs: Sequence[str] = ()


PIL, HF = "PIL + torch DataLoader", "HF datasets set_transform + DataLoader"
PEERS = {
    PIL: Peer(pil),
    HF: Peer(hf_datasets),
    "timm create_loader": Peer(timm_loader, ("timm", "torchvision")),
    "webdataset": Peer(webdataset, ("webdataset",)),
    "litdata": Peer(litdata, ("litdata",)),
}


def installed_peers() -> list[str]:
    """Return the peers that can be measured here, and print which cannot."""
    names = []
    for name, peer in PEERS.items():
        missing = [package for package in peer.needs if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name}: left out, {' and '.join(missing)} not installed")
        else:
            names.append(name)
    return names
