"""Folders that people have: each is loaded, to the last pixel, or refused in one line."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage

from accel_trainer.core.errors import UserError
from accel_trainer.vision import Photos, load_photos

from .make_photos import decode_all, encoded, photo, write_classes, write_photos, write_tar

ANTS_AND_BEES = ("ant", "bee")
Write = Callable[[Path], object]


class Loaded(NamedTuple):
    """What is found: photos to train and to evaluate on (None: some of each), and the classes."""

    num_train: int | None
    num_val: int | None
    classes: tuple[str, ...] = ANTS_AND_BEES


class Folder(NamedTuple):
    """`write` makes it; `path` in it is given to `load_photos`.

    `found` is what it holds, or part of the error.
    """

    write: Write
    found: Loaded | str
    val_fraction: float = 0.0
    path: str = ""


def splits(*names: str, classes: tuple[str, ...] = ANTS_AND_BEES, per_class: int = 3) -> Write:
    def write(root: Path) -> None:
        for name in names:
            write_classes(root / name, classes, per_class=per_class)

    return write


def files(*names: str) -> Write:
    return lambda root: write_photos(root, names)


def texts(contents: dict[str, str]) -> Write:
    def write(root: Path) -> None:
        for name, content in contents.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def both(*writes: Write) -> Write:
    return lambda root: [write(root) for write in writes]


def in_formats(root: Path) -> None:
    """Every format and mode, some under the suffix of another."""
    small = photo(21, 17)
    kinds = {
        "a.jpg": encoded(small),
        "b.png": encoded(small.convert("RGBA"), "png"),
        "c.webp": encoded(small, "webp"),
        "d.bmp": encoded(small, "bmp"),
        "e.tiff": encoded(small.convert("CMYK"), "tiff"),
        "f.gif": encoded(small.convert("P"), "gif"),
        "g.jpeg": encoded(small.convert("L")),
        "h.JPG": encoded(small.convert("1"), "png"),
        "i.png": encoded(small.convert("CMYK")),
        "j.PNG": encoded(
            PILImage.fromarray(np.arange(99, dtype=np.uint16).reshape(9, 11) * 600), "png"
        ),
    }
    for name in ANTS_AND_BEES:
        (root / name).mkdir(parents=True)
        for file, data in kinds.items():
            (root / name / file).write_bytes(data)


def with_links(root: Path) -> None:
    write_classes(root.parent / "elsewhere", ANTS_AND_BEES)
    root.mkdir()
    (root / "ant").symlink_to(root.parent / "elsewhere" / "ant")
    (root / "bee").mkdir()
    for index in range(3):
        (root / "bee" / f"{index}.jpg").symlink_to(
            root.parent / "elsewhere" / "bee" / f"{index}.jpg"
        )


def table(count: int = 4) -> Dataset:
    images = [encoded(photo(20, 20, seed=index)) for index in range(count)]
    columns = {"image": images, "label": [index % 2 for index in range(count)]}
    features = {"image": Image(), "label": ClassLabel(names=list(ANTS_AND_BEES))}
    return Dataset.from_dict(columns, features=Features(features))


def parquet(*names: str) -> Write:
    def write(root: Path) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            table().to_parquet(str(root / name))

    return write


def plain_parquet(labels: list[Any], kind: pa.DataType | None = None) -> Write:
    """Without the metadata of `datasets`, the photos in a column of bytes."""

    def write(root: Path) -> None:
        root.mkdir()
        for name in ("train", "test"):
            images = [encoded(photo(9, 9, seed=index)) for index in range(len(labels))]
            is_struct = kind is not None and pa.types.is_struct(kind)
            images = pa.array(
                [{"bytes": data} for data in images] if is_struct else images, kind or pa.binary()
            )
            pq.write_table(
                pa.table({"jpeg": images, "class": pa.array(labels)}), root / f"{name}.parquet"
            )

    return write


def tars(*names: str, **members: Callable[[int], bytes]) -> Write:
    def write(root: Path) -> None:
        for name in names:
            each = product(range(4), members.items())
            write_tar(
                root / name,
                [(f"{index:04}.{suffix}", content(index)) for index, (suffix, content) in each],
            )

    return write


def jpg(index: int) -> bytes:
    return encoded(photo(15, 15, seed=index))


def label(index: int) -> bytes:
    return b"%d" % (index % 2)


def saved(**parts: int) -> Write:
    def write(root: Path) -> None:
        whole = DatasetDict({name: table(count) for name, count in parts.items()})
        (whole if len(parts) > 1 else next(iter(whole.values()))).save_to_disk(str(root))

    return write


def zipped(root: Path, name: str = "photos.zip") -> None:
    root.mkdir(exist_ok=True)
    with zipfile.ZipFile(root / name, "w") as archive:
        archive.writestr("ant/1.jpg", jpg(1))


METADATA = "file_name,class\na.jpg,bee\nb.jpg,ant\nmore/c.jpg,ant\n"
CLASSES_0_1 = ("0", "1")
FOLDERS = {
    # --- one folder per class ---
    "Train and Val": Folder(splits("Train", "Val"), Loaded(6, 6)),
    "train, val and test: val is evaluated": Folder(
        both(splits("train", "val"), splits("test", per_class=5)), Loaded(6, 6)
    ),
    "train, a fraction set aside": Folder(splits("train", per_class=12), Loaded(None, None), 0.3),
    "classes at the top, a fraction set aside": Folder(
        splits("", per_class=12), Loaded(None, None), 0.3
    ),
    "a slash at the end": Folder(splits("train", "val"), Loaded(6, 6), path="/"),
    "every format and mode": Folder(in_formats, Loaded(None, None), 0.3),
    "suffixes in capitals": Folder(
        both(files("train/ant/1.JPG", "train/bee/1.JPEG"), files("val/ant/1.Jpg", "val/bee/1.PNG")),
        Loaded(2, 2),
    ),
    "classes two folders deep": Folder(both(splits("train/insects", "val/insects")), Loaded(6, 6)),
    "classes in different groups": Folder(
        both(
            splits("train/flying", classes=("bee",)),
            splits("train/walking", "val/walking", classes=("ant",)),
        ),
        Loaded(6, 3),
    ),
    "a class called train": Folder(
        splits("", classes=("boat", "car", "train"), per_class=9),
        Loaded(None, None, ("boat", "car", "train")),
        0.3,
    ),
    "numbers as classes": Folder(
        splits("train", "val", classes=CLASSES_0_1), Loaded(6, 6, CLASSES_0_1)
    ),
    "spaces and other letters": Folder(
        splits("train", "val", classes=("Große Bären", "猫 и собака")),
        Loaded(6, 6, ("Große Bären", "猫 и собака")),
    ),
    "brackets and stars in the path": Folder(
        splits("a [1] {b} *?/train", "a [1] {b} *?/val"), Loaded(6, 6), path="a [1] {b} *?"
    ),
    "odd names of files": Folder(
        files(
            *(
                f"{split}/{name}/{file}"
                for split in ("train", "val")
                for name in ANTS_AND_BEES
                for file in (
                    "a b.jpg",
                    "c[1].jpg",
                    "100%.jpg",
                    "#1.jpg",
                    "x..y.jpg",
                    "-.jpg",
                    "q?.jpg",
                )
            )
        ),
        Loaded(14, 14),
    ),
    "the same names in all classes": Folder(splits("train", "val", per_class=1), Loaded(2, 2)),
    "links to files and folders": Folder(with_links, Loaded(None, None), 0.5),
    "an empty class": Folder(
        both(splits("train", "val"), lambda root: (root / "train" / "cow").mkdir()), Loaded(6, 6)
    ),
    "other files beside": Folder(
        both(
            splits("train", "val"),
            texts({"train/ant/Thumbs.db": "", "README.md": "# Ants", "notes.txt": ""}),
        ),
        Loaded(6, 6),
    ),
    "hidden files of macOS": Folder(
        both(
            splits("train", "val"),
            texts({".DS_Store": "", "train/.DS_Store": "", "train/ant/._1.jpg": ""}),
            lambda root: write_classes(root / "__MACOSX" / "train", ANTS_AND_BEES),
        ),
        Loaded(6, 6),
    ),
    "another folder beside train": Folder(
        both(splits("train", "val"), files("raw/1.jpg")), Loaded(6, 6)
    ),
    "tiny photos": Folder(
        both(
            lambda root: write_photos(root / "train", ["ant/1.jpg", "bee/1.jpg"], size=(1, 1)),
            lambda root: write_photos(root / "val", ["ant/1.jpg", "bee/1.jpg"], size=(300, 1)),
        ),
        Loaded(2, 2),
    ),
    # --- metadata ---
    "metadata.csv": Folder(
        both(files("a.jpg", "b.jpg", "more/c.jpg"), texts({"metadata.csv": METADATA})),
        Loaded(None, None),
        0.5,
    ),
    "metadata.jsonl": Folder(
        both(
            files("a.jpg", "b.jpg"),
            texts(
                {
                    "metadata.jsonl": '{"file_name": "a.jpg", "label": 7}\n{"file_name": '
                    '"b.jpg", "label": 3}\n'
                }
            ),
        ),
        Loaded(None, None, ("3", "7")),
        0.5,
    ),
    "metadata.csv in each split": Folder(
        both(
            files("train/1.jpg", "train/2.jpg", "val/1.jpg"),
            texts({"train/metadata.csv": "file_name,label\n1.jpg,ant\n2.jpg,bee\n"}),
            texts({"val/metadata.csv": "file_name,label\n1.jpg,bee\n"}),
        ),
        Loaded(2, 1),
    ),
    "metadata.csv with more columns": Folder(
        both(
            files("a.jpg", "b.jpg"),
            texts({"metadata.csv": "file_name,label,text\na.jpg,ant,x\nb.jpg,bee,y\n"}),
        ),
        Loaded(None, None),
        0.5,
    ),
    # --- tables ---
    "parquet as on the hub": Folder(
        both(
            parquet("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
            parquet("data/validation-00000-of-00001.parquet"),
            texts({"README.md": "---\nlicense: mit\n---\n# Ants and bees\n", "LICENSE": ""}),
            files("assets/example.jpg"),
        ),
        Loaded(8, 4),
    ),
    "parquet of other programs": Folder(plain_parquet([0, 1, 1]), Loaded(3, 3, CLASSES_0_1)),
    "parquet of polars": Folder(
        plain_parquet([0, 1, 1], pa.large_binary()), Loaded(3, 3, CLASSES_0_1)
    ),
    "parquet with bytes and path in a struct": Folder(
        plain_parquet([0, 1, 1], pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        Loaded(3, 3, CLASSES_0_1),
    ),
    "parquet with strings as labels": Folder(plain_parquet(["bee", "ant", "bee"]), Loaded(3, 3)),
    "one parquet file": Folder(
        parquet("photos.parquet"), Loaded(None, None), 0.5, "photos.parquet"
    ),
    "save_to_disk of a single dataset": Folder(saved(train=6), Loaded(None, None), 0.5),
    "one tar": Folder(
        tars("a.tar", jpg=jpg, cls=label), Loaded(None, None, CLASSES_0_1), 0.5, "a.tar"
    ),
    # --- refused ---
    "nothing there": Folder(lambda root: root.mkdir(), "is not a folder here", path="nowhere"),
    "an empty folder": Folder(lambda root: root.mkdir(), "no photos in"),
    "only other files": Folder(
        texts({"a.txt": "", "b.csv": "x,y\n1,2\n"}), "only .csv, .txt files: expected train/"
    ),
    "photos of a phone": Folder(texts({"ant/1.heic": "", "bee/2.heic": ""}), "only .heic files"),
    "no validation split": Folder(
        splits("train"), "has no validation split: set one aside with --val-fraction 0.1"
    ),
    "a fraction though there is val": Folder(
        splits("train", "val"), "does not apply: leave it out", 0.1
    ),
    "a fraction that leaves nothing": Folder(
        splits("train", per_class=2), "no validation photos", 1e-9
    ),
    "val without train": Folder(splits("val"), "has val/ but no train/"),
    "no classes": Folder(
        files("1.jpg", "2.jpg"),
        "are in no class folder: make a folder per class, give the one above",
        0.1,
    ),
    "no classes in the splits": Folder(
        files("train/1.jpg", "train/2.jpg", "val/3.jpg"), "no class folders", 0.1
    ),
    "as for YOLO": Folder(
        both(
            files("images/train/1.jpg", "images/val/2.jpg"),
            texts({"labels/train/1.txt": "0 1 1 1 1"}),
        ),
        "no class folders",
        0.1,
    ),
    "a csv of another form": Folder(
        both(files("images/1.jpg", "images/2.jpg"), texts({"labels.csv": "id,label\n1,ant\n"})),
        "are in the same class folder (images): if ",
        0.1,
    ),
    "a single class": Folder(
        splits("train", "val", classes=("ant",)), "are in the same class folder", 0.0
    ),
    "different depths": Folder(
        files("ant/1.jpg", "bee/small/2.jpg"), "at different depths (ant/1.jpg and bee/", 0.1
    ),
    "ImageNet, whose val has no classes": Folder(
        both(splits("train"), files("val/1.jpg", "val/2.jpg")), "has no validation split"
    ),
    "a class that is only in val": Folder(
        both(splits("train"), splits("val", classes=("ant", "wasp"))),
        "is of class wasp, which no training photo has",
    ),
    "a photo": Folder(files("1.jpg"), "is not a folder, a parquet file or a tar", path="1.jpg"),
    "a zip": Folder(zipped, "extract an archive", path="photos.zip"),
    "a folder with a zip": Folder(zipped, "only .zip files"),
    "a zip beside the photos": Folder(
        both(splits("", per_class=9), lambda root: zipped(root, "more.zip")),
        "an archive of photos (",
        0.3,
    ),
    "pickles": Folder(texts({"data_batch_1": "", "batches.meta": ""}), "no photos in"),
    "metadata with two columns of labels": Folder(
        both(files("a.jpg"), texts({"metadata.csv": "file_name,breed,color\na.jpg,ant,red\n"})),
        "set --label-column breed or --label-column color",
        0.1,
    ),
    "damaged parquet": Folder(
        texts({"train.parquet": "PAR1 no", "test.parquet": ""}), "test.parquet cannot be read"
    ),
    "parquet without photos": Folder(
        lambda root: both(
            lambda root: root.mkdir(),
            *(
                lambda root, name=name: pq.write_table(
                    pa.table({"x": [1], "label": [0]}), root / name
                )
                for name in ("train.parquet", "test.parquet")
            ),
        )(root),
        "none of which holds images",
    ),
    "save_to_disk without its files": Folder(
        both(texts({"state.json": "{}"}), texts({"dataset_info.json": "{}"})),
        "state.json cannot be read",
    ),
    "half a photo": Folder(
        both(
            splits("train", "val"),
            lambda root: (root / "val" / "ant" / "9.jpg").write_bytes(jpg(0)[:300]),
        ),
        "val/ant/9.jpg (row 3 of",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_it_is_loaded_or_refused_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault (Data, config and users' code): a folder of photos that is not laid out as expected ->
    one line with what was found and what was expected, before the first step
    """
    monkeypatch.chdir(tmp_path)
    folder, root = FOLDERS[kind], tmp_path / "photos"
    folder.write(root)
    source = f"photos/{folder.path}" if folder.path else "photos"
    if isinstance(folder.found, Loaded):
        photos = load_photos(source, val_fraction=folder.val_fraction, cache_dir=tmp_path / "cache")
        expect(photos, folder.found)
        decode_all(photos)
        return
    with pytest.raises(UserError) as error:
        decode_all(
            load_photos(source, val_fraction=folder.val_fraction, cache_dir=tmp_path / "cache")
        )
    assert "\n" not in str(error.value)
    assert folder.found in str(error.value)
    assert "photos" in str(error.value)


def expect(photos: Photos, found: Loaded) -> None:
    assert photos.class_names == found.classes
    for split, number in ((photos.train, found.num_train), (photos.val, found.num_val)):
        assert len(split) == number if number is not None else len(split) > 0
        assert split.labels.min() >= 0
        assert split.labels.max() < len(found.classes)


def test_photos_may_be_added_between_runs(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    splits("train", "val")(root)
    assert len(load_photos(root, cache_dir=tmp_path / "cache").train) == 6
    write_photos(root, ["train/ant/new.jpg"])
    assert len(load_photos(root, cache_dir=tmp_path / "cache").train) == 7
    assert not (tmp_path / "cache").exists(), "the listing of a folder is not stored"
