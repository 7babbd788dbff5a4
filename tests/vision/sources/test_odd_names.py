"""A photo is one by its first bytes, whatever its name is, and no class is lost in silence."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from PIL import Image

from accel_trainer.cli.share.predict import find_images
from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.vision import load_photos
from accel_trainer.vision.data.photo_decode import FORMATS, decode_photo
from accel_trainer.vision.sources.listing import list_photos
from tests.vision.make_photos import encoded, photo, write_classes

ODD_SUFFIXES = (".jpg_large", ".jpg?itok=x-1", "", ".jpg!d", ".php", ".jpg-orig", ".image", ".jfi")
OTHERS = {
    "notes": b"to do",
    "BMW": b"BMW and others",
    "list.lst": b"P1 is a name, P2 too",
    "1.nef": b"II*\0 raw of a camera",
    "1.dng": b"MM\0* raw of a camera",
    "movie.mp4": b"\0\0\0\x18ftypmp42",
    "sound.wav": b"RIFF....WAVE",
    "short": b"",
}


@pytest.mark.parametrize("kind", FORMATS)
def test_photos_are_found_by_their_first_bytes(kind: str, tmp_path: Path) -> None:
    data = encoded(photo(9, 9).convert("RGB"), kind)
    for suffix in ODD_SUFFIXES:
        (tmp_path / f"a{suffix}").write_bytes(data)
    for name, content in OTHERS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "b.jpg").write_bytes(data)
    for backup in ("b.jpg~", "b.jpg.bak", "b.jpg.orig"):
        (tmp_path / backup).write_bytes(data)
    listing = list_photos(tmp_path)
    assert sorted(listing.photos) == sorted(
        str(tmp_path / name) for name in ("b.jpg", *(f"a{suffix}" for suffix in ODD_SUFFIXES))
    )
    assert len(listing.inodes) == len(listing.photos)
    left_out = {Path(each.path).name for each in listing.left_out}
    assert left_out == {*OTHERS, "b.jpg~", "b.jpg.bak", "b.jpg.orig"}


def test_a_class_of_photos_with_odd_names_is_a_class(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_classes(tmp_path / split)
        for index, path in enumerate(sorted((tmp_path / split / "bee").iterdir())):
            path.rename(path.with_name(f"{index}{ODD_SUFFIXES[index]}"))
    photos = load_photos(tmp_path, cache_dir=tmp_path / "cache")
    assert photos.class_names == ("ant", "bee")
    assert photos.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert not photos.notes


@pytest.mark.parametrize("given", ["-", "https://x.org/1.jpg", "s3://photos/1.jpg"])
def test_what_is_no_path_is_not_called_a_missing_file(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not read: save them"):
        find_images(Path(given))
    with pytest.raises(DataError, match="on the web or from standard input"):
        load_photos(given, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"PK\3\4 and more", "a zip archive"),
        (b"\x1f\x8b and more", "a gzip archive"),
        (b"%PDF-1.7", "a PDF"),
        (b"\n<!DOCTYPE html><html>", "a page of the web"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        (b"", "an empty file"),
        (b"no idea", "it is not an image in JPEG, PNG"),
    ],
)
def test_what_a_file_is_instead_of_a_photo_is_said(data: bytes, cause: str, tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "ant" / "0.jpg").write_bytes(data)
    photos = load_photos(tmp_path, val_fraction=0.4, cache_dir=tmp_path / "cache")
    errors = []
    for split in (photos.train, photos.val):
        for index in range(len(split)):
            try:
                decode_photo(split.encoded_at(index), split.name_of(index))
            except DataError as error:
                errors.append(str(error))
    (error_line,) = errors
    assert cause in error_line
    assert "\n" not in error_line


def test_the_bands_of_a_tiff_that_cannot_be_read_are_said() -> None:
    data = bytearray(encoded(Image.new("RGB", (4, 4)), "tiff"))
    image = Image.open(io.BytesIO(data))
    place = data.index(struct.pack("<HHI", 277, 3, 1))
    data[place + 8] = 5
    assert image.tag_v2[277] == 3
    with pytest.raises(DataError, match="a TIFF of 5 bands of 8 bits"):
        decode_photo(bytes(data), "five bands")
