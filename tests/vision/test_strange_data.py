"""Folders and tables of strangers: nothing in them is run, expanded, followed in circles or handed
to a program."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL import EpsImagePlugin
from PIL import Image as PILImage

from accel_trainer.core.errors import DataError, UserError
from accel_trainer.vision import load_images, load_photos
from accel_trainer.vision.data.photo_decode import FORMATS, decode_photo, photo_suffixes
from accel_trainer.vision.sources.photo_files import open_dataset

from .make_photos import decode_all, encoded, photo, write_classes, write_photos, write_tar

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n"
LABELS = [0, 1, 0, 1, 0, 1]
Write = Callable[[Path, bytes], object]


def a_folder(root: Path, data: bytes) -> None:
    write_classes(root)
    (root / "ant" / "0.jpg").write_bytes(data)


def small_images(root: Path, data: bytes) -> None:
    for split in ("train", "test"):
        write_photos(root / split, ["ant/0.png", "bee/0.png"], size=(8, 8))
        (root / split / "ant" / "1.png").write_bytes(data)


def a_table(data: bytes, *, with_paths: bool = False) -> Dataset:
    others = [encoded(photo(9, 9, seed=index)) for index in range(len(LABELS) - 1)]
    features = Features({"image": Image(), "label": ClassLabel(names=["ant", "bee"])})
    images = [
        {"bytes": each, "path": f"{index}.jpg" if with_paths else None}
        for index, each in enumerate((data, *others))
    ]
    return Dataset.from_dict({"image": images, "label": LABELS}, features=features)


def parquet(root: Path, data: bytes) -> None:
    root.mkdir()
    a_table(data).to_parquet(str(root / "train.parquet"))


def arrow(root: Path, data: bytes) -> None:
    a_table(data, with_paths=True).save_to_disk(str(root))


def tar(root: Path, data: bytes) -> None:
    others = {f"{index}.jpg": encoded(photo(9, 9, seed=index)) for index in range(1, len(LABELS))}
    members = {"0.jpg": data, **others}
    write_tar(
        root / "train.tar",
        [
            (name, content)
            for jpg in members
            for name, content in (
                (jpg, members[jpg]),
                (jpg.replace("jpg", "cls"), b"%d" % LABELS[int(jpg[0])]),
            )
        ],
    )


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which leaves a file where it ran."""
    program, ran = tmp_path / "bin" / "gs", tmp_path / "ran"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return ran


def test_pillow_hands_postscript_to_ghostscript(ghostscript: Path) -> None:
    with PILImage.open(io.BytesIO(POSTSCRIPT)) as image, pytest.raises(OSError):  # noqa: PT011
        image.load()
    assert ghostscript.exists(), "the tests below look for this"


@pytest.mark.parametrize(
    "write", [a_folder, parquet, arrow, tar, small_images], ids=lambda write: write.__name__
)
def test_a_photo_that_is_postscript_is_never_given_to_ghostscript(
    write: Write, tmp_path: Path, ghostscript: Path
) -> None:
    root = tmp_path / "photos"
    write(root, POSTSCRIPT)
    with pytest.raises(DataError, match=r"cannot be decoded \(it is not an image in JPEG, PNG"):
        read_all(root, tmp_path / "cache", is_small=write is small_images)
    assert not ghostscript.exists()


@pytest.mark.parametrize("write", [a_folder, parquet, arrow, tar], ids=lambda write: write.__name__)
def test_datasets_never_decodes_an_image(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    pillows = PILImage.open

    def recorded(file: Any, mode: Any = "r", formats: Any = None) -> Any:
        opened.append(formats)
        return pillows(file, mode, formats)

    root = tmp_path / "photos"
    write(root, encoded(photo(9, 9), "png"))
    monkeypatch.setattr(PILImage, "open", recorded)
    photos = load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
    decode_all(photos)
    assert set(opened) == {FORMATS}, "the only opener names its formats"


def read_all(root: Path, cache: Path, *, is_small: bool) -> None:
    if is_small:
        load_images(str(root), cache_dir=cache)
    else:
        decode_all(load_photos(root, val_fraction=0.5, cache_dir=cache))


@pytest.mark.parametrize("kind", ["eps", "tga", "pcx", "jpeg2000", "ico"])
def test_a_format_that_is_not_listed_is_refused_by_name(kind: str) -> None:
    with pytest.raises(DataError, match="a photo cannot be decoded"):
        decode_photo(encoded(photo(32, 32), kind), "a photo")


def test_every_listed_format_has_a_suffix_that_predict_looks_for() -> None:
    suffixes = photo_suffixes()
    assert {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".gif", ".bmp", ".ppm"} <= suffixes
    assert not {".eps", ".ps", ".wmf", ".mpeg"} & suffixes


# --- names ---

ODD_NAMES = (
    "$SECRET",
    "${SECRET}",
    "a::b:c",
    "back\\slash",
    "zip:::x",
    "x:y",
    "~",
    "%24",
    "{a,b}",
    "[x] *?",
    "a\nb",
)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_name_of_a_photo_a_class_or_a_folder_is_only_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "what-only-the-environment-knows")
    root = tmp_path / f"in {name}" / "photos"
    files = [f"ant/{name}.jpg", "ant/1.jpg", f"class {name}/{name}.jpg", f"class {name}/1.jpg"]
    write_photos(root, files)
    photos = load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert photos.class_names == ("ant", f"class {name}")
    decode_all(photos)
    names = [
        split.name_of(index) for split in (photos.train, photos.val) for index in range(len(split))
    ]
    assert sorted(text.partition(" (row")[0] for text in names) == sorted(
        str(root / file) for file in files
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("parquet", "$SECRET"),
        ("tar", "$SECRET"),
        ("parquet", "a::b"),
        ("tar", "a::b"),
    ],
)
def test_a_table_whose_path_datasets_would_change_is_refused(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "what-only-the-environment-knows")
    root, jpg = tmp_path / name, encoded(photo(9, 9))
    writers = {"parquet": parquet, "tar": tar}
    writers[kind](tmp_path / "plain", jpg)
    (tmp_path / "plain").rename(root)
    with pytest.raises(DataError) as error:
        load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")
    assert re.search(r"contains \$ or ::, .* datasets \w+: rename it", str(error.value))
    assert name in str(error.value)
    assert "what-only-the-environment-knows" not in str(error.value)


@pytest.mark.parametrize("name", ["$HOME", "a::b", "[x] *?"])
def test_a_saved_dataset_is_read_whatever_its_folder_is_called(name: str, tmp_path: Path) -> None:
    arrow(tmp_path / "saved", encoded(photo(9, 9)))
    (tmp_path / "saved").rename(tmp_path / name)
    decode_all(load_photos(tmp_path / name, val_fraction=0.5, cache_dir=tmp_path / "cache"))


def test_photos_with_odd_names_are_found_by_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "what-only-the-environment-knows")
    root = tmp_path / "$SECRET" / "a::b"
    for split in ("train", "val"):
        write_photos(root / split, ["$SECRET.jpg", "a::b.jpg"])
        (root / split / "metadata.csv").write_text(
            "file_name,label\n$SECRET.jpg,ant\na::b.jpg,bee\n"
        )
    decode_all(load_photos(root, cache_dir=tmp_path / "cache"))


def test_the_photos_of_a_folder_are_in_the_order_of_imagefolder(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    names = [
        "ant/1.jpg",
        "ant/10.jpg",
        "ant/2.JPG",
        "ant-x/a.png",
        "Ant/Ü.jpeg",
        "猫/b c.jpg",
        "ant/x..y.jpg",
    ]
    write_photos(root, [*names, "bee/1.jpg", ".trash/1.jpg", "__MACOSX/1.jpg"])
    write_photos(tmp_path / "elsewhere", ["1.jpg", "2.jpg"])
    (root / "aaa").symlink_to(tmp_path / "elsewhere")
    write_photos(tmp_path / "more", ["1.jpg"])
    (root / "bee" / "3.jpg").symlink_to(tmp_path / "more" / "1.jpg")
    patterns = [f"{root}/**", f"{root}/aaa/**"]
    theirs = load_dataset(
        "imagefolder", data_files=patterns, cache_dir=str(tmp_path / "cache"), split="train"
    )
    theirs = theirs.cast_column("image", Image(decode=False))
    ours = open_dataset(root, cache_dir=tmp_path / "cache").splits["train"][0].dataset
    assert ours["image"][:] == theirs["image"][:]
    assert ours["label"][:] == theirs["label"][:]
    assert ours.features["label"].names == theirs.features["label"].names


# --- links and other files ---


def test_links_in_circles_end_in_one_line(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    (root / "a").mkdir(parents=True)
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "here").symlink_to(root / "a")
    with pytest.raises(DataError, match="no photos in"):
        load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("target", [".", "..", "/"])
def test_a_link_back_to_a_folder_that_it_lies_in_is_named(target: str, tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos")
    (root / "cow").symlink_to(target)
    with pytest.raises(DataError, match="photos/cow links back to .*, a folder that contains it"):
        load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")


def test_a_link_to_a_folder_that_is_not_followed_is_said(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos" / "train" / "insects").parent
    write_classes(tmp_path / "photos" / "val" / "insects")
    write_photos(tmp_path / "elsewhere", ["1.jpg"])
    (root / "insects" / "cow").symlink_to(tmp_path / "elsewhere")
    photos = load_photos(tmp_path / "photos", cache_dir=tmp_path / "cache")
    assert photos.class_names == ("ant", "bee")
    (note,) = photos.notes
    assert "links to folders are only followed at the top" in note
    assert note.endswith("cow")


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a sparse file"])
def test_a_row_whose_path_is_no_photo_of_a_possible_size_ends_in_one_line(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "it"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path = Path("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    images = pa.array(
        [{"bytes": None, "path": str(path)}] * 4,
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    (tmp_path / "photos").mkdir()
    for split in ("train", "test"):
        pq.write_table(
            pa.table({"image": images, "label": [0, 1, 0, 1]}),
            tmp_path / "photos" / f"{split}.parquet",
        )
    with pytest.raises(
        DataError, match=r"cannot be read \((not a regular file|1,099,511,627,776 bytes)"
    ):
        decode_all(load_photos(tmp_path / "photos", cache_dir=tmp_path / "cache"))


def test_a_member_of_a_tar_is_not_loaded_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*unused: object, **unused_too: object) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)
    members = {}
    for index, number in enumerate(LABELS):
        members |= {
            f"{index}.jpg": encoded(photo(9, 9, seed=index)),
            f"{index}.cls": b"%d" % number,
            f"{index}.pth": b"any bytes",
            f"{index}.npz": b"more of them",
        }
    write_tar(tmp_path / "photos" / "train.tar", members.items())
    decode_all(load_photos(tmp_path / "photos", val_fraction=0.5, cache_dir=tmp_path / "cache"))


CARD = (
    "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: "
    "{path}\n---\n# Ants\n"
)


@pytest.mark.parametrize("place", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "path",
    [
        "http://127.0.0.1:9/a.parquet",
        "/etc/*.parquet",
        "../*.parquet",
        "~/a.parquet",
        "zip://a::b.zip",
        "$HOME/a",
        "&a [*a, *a]",
    ],
)
def test_a_card_leads_to_no_other_data(place: str, path: str, tmp_path: Path) -> None:
    parquet(tmp_path / "photos", encoded(photo(9, 9)))
    a_table(encoded(photo(5, 5))).to_parquet(str(tmp_path / "a.parquet"))
    text = CARD.format(path=path)
    (tmp_path / "photos" / place).write_text(
        text if place.endswith("md") else text.split("---\n")[1]
    )
    data = open_dataset(tmp_path / "photos", cache_dir=tmp_path / "cache")
    (table,) = data.splits["train"]
    assert table.name == str(tmp_path / "photos" / "train.parquet")
    assert len(table.dataset) == len(LABELS)
    assert str(tmp_path / "photos" / place) in [each.path for each in data.left_out]


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "pipe", ""])
def test_a_saved_dataset_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    arrow(root, encoded(photo(9, 9)))
    os.mkfifo(root / "pipe")
    state = json.loads((root / "state.json").read_text())
    (root / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": name}]}))
    with pytest.raises(
        UserError, match=re.escape(f"refers to {name!r}, which is not a file beside it")
    ):
        load_photos(root, val_fraction=0.5, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["train/state.json", "train/dataset_info.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_description_that_is_no_file_is_not_waited_for(
    name: str, kind: str, tmp_path: Path
) -> None:
    root = tmp_path / "saved"
    DatasetDict(train=a_table(b"no photo"), test=a_table(b"no photo")).save_to_disk(str(root))
    path = root / name
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"(state|dataset_info)\.json cannot be read"):
        open_dataset(root, cache_dir=tmp_path)


def test_a_table_that_claims_a_terabyte_is_one_line(tmp_path: Path) -> None:
    write_classes(tmp_path / "photos", per_class=1)
    path = tmp_path / "photos" / "metadata.csv"
    path.write_text("file_name,label\n")
    os.truncate(path, 2**40)
    with pytest.raises(DataError, match=r"metadata.csv is 1,099,511,627,776 bytes, more than"):
        open_dataset(tmp_path / "photos", cache_dir=tmp_path)
