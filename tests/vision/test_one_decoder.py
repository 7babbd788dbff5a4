"""All ways to read a picture come to the same pixels, or to the same error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_trainer.cli.data.describe import examine_photo, hash_of
from accel_trainer.cli.share.predict import read_image
from accel_trainer.core.errors import DataError
from accel_trainer.vision import BadImageConfig, load_images, load_photos
from accel_trainer.vision.data.loaders import notes_on_split
from accel_trainer.vision.data.photo_decode import decode_photo, read_header
from accel_trainer.vision.data.photo_reader import PhotoDataset
from accel_trainer.vision.data.pixel_range import PixelRanges

from .make_photos import encoded
from .odd_pictures import HEIGHT, WIDTH, OddPicture, odd_pictures

SKIP = BadImageConfig(policy="skip", max_fraction=0.99)


@pytest.fixture(scope="module")
def pictures() -> list[OddPicture]:
    return list(odd_pictures())


def write(folder: Path, pictures: Sequence[OddPicture]) -> Path:
    """A folder of two classes, the same in both splits, with names in the given order."""
    for split in ("train", "test"):
        for number, picture in enumerate(pictures):
            path = folder / split / f"class {number * 2 // len(pictures)}"
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{number:03} {picture.name}").write_bytes(picture.data)
    return folder


def test_every_odd_picture_has_the_pixels_that_it_means(pictures: list[OddPicture]) -> None:
    """Fault (Data, config and users' code): pixels are signed, floating-point or 32-bit numbers, so
    that their white level is unknown -> an error with the photo and its values: the package
    neither clips it nor guesses a scale
    """
    assert len(pictures) > 120
    assert len({picture.name for picture in pictures}) == len(pictures)
    wrong = []
    for picture in pictures:
        try:
            found = decode_photo(picture.data, picture.name)
        except DataError as error:
            lines = str(error).splitlines()
            is_right = picture.pixels is None and len(lines) == 1 and picture.name in lines[0]
        else:
            header = read_header(picture.data, picture.name)
            is_right = (
                picture.pixels is not None
                and np.array_equal(found, picture.pixels)
                and (header.height, header.width, header.is_grey)
                == (HEIGHT, WIDTH, picture.is_grey)
            )
        if not is_right:
            wrong.append(picture.name)
    assert wrong == []


def test_all_that_read_a_picture_come_to_the_same_pixels_or_error(
    pictures: list[OddPicture], tmp_path: Path
) -> None:
    root = write(tmp_path / "odd", pictures)
    small = load_images(str(root), cache_dir=tmp_path / "cache", bad_images=SKIP).train
    photos = load_photos(str(root), cache_dir=tmp_path / "cache").train
    dataset = PhotoDataset(photos, np.array)
    rows = iter(small.images.permute(0, 2, 3, 1).numpy())
    reasons = iter(small.left_out)
    config: Any = as_exported(in_channels=3)
    assert len(small) + len(small.left_out) == len(photos) == len(pictures)
    for number, picture in enumerate(pictures):
        path = Path(photos.name_of(number).partition(" (row")[0])
        assert path.name == f"{number:03} {picture.name}"
        examined = examine_photo(photos, number)
        if picture.pixels is None:
            with pytest.raises(DataError) as error_of_photo:
                dataset[number]
            with pytest.raises(DataError) as error_of_prediction:
                read_image(path, config)
            left_out = next(reasons).message
            assert str(path) in left_out
            assert (
                len(
                    {
                        reason_in(message)
                        for message in (
                            left_out,
                            error_of_photo.value.message,
                            error_of_prediction.value.message,
                            examined.problem or "",
                        )
                    }
                )
                == 1
            )
            continue
        row = next(rows)
        assert np.array_equal(row, picture.pixels), picture.name
        assert np.array_equal(dataset[number][0], row), picture.name
        assert np.array_equal(as_pixels(read_image(path, config)), row), picture.name
        assert (examined.height, examined.width) == (HEIGHT, WIDTH)
        assert examined.is_narrow == (int(row.max()) - int(row.min()) < 32)
        assert examined.sha256 == hash_of(row)


def reason_in(message: str) -> str:
    """What is wrong, without the name: photos are also named by their row."""
    return message.partition("cannot be decoded")[2]


def as_exported(*, in_channels: int) -> SimpleNamespace:
    """What `predict` reads of a model that was trained on small images."""
    normalization = SimpleNamespace(mean=(0.0,) * in_channels, std=(1.0,) * in_channels)
    return SimpleNamespace(
        in_channels=in_channels,
        image_size=(HEIGHT, WIDTH),
        normalization=normalization,
        transform=None,
    )


def as_pixels(image: Any) -> Any:
    return (image * 255).round().permute(1, 2, 0).byte().numpy()


def test_grey_images_of_any_depth_have_one_channel(
    pictures: list[OddPicture], tmp_path: Path
) -> None:
    grey = [picture for picture in pictures if picture.is_grey and picture.pixels is not None]
    assert len(grey) > 20
    root = write(tmp_path / "grey", grey)
    images = load_images(str(root), cache_dir=tmp_path / "cache").train.images
    config: Any = as_exported(in_channels=1)
    for picture, image, path in zip(grey, images, sorted(root.glob("train/*/*")), strict=True):
        assert np.array_equal(image.numpy()[0], picture.pixels[..., 0]), picture.name
        assert np.array_equal(as_pixels(read_image(path, config))[..., 0], image.numpy()[0])


def with_bits(bits: int, *, stored_in: int, seed: int = 0, offset: int = 0) -> bytes:
    """A grey PNG of noise that uses `bits` of the bits of its file."""
    values = np.random.default_rng(seed).integers(0, 2**bits, (HEIGHT, WIDTH)) + offset
    return encoded(Image.fromarray(values.astype(f"uint{stored_in}")), "png")


@pytest.mark.parametrize(
    ("bits", "stored_in", "offset", "advice"),
    [
        (12, 16, 0, "multiplying them by 16"),
        (8, 16, 0, "multiplying them by 256"),
        (10, 16, 0, "multiplying them by 64"),
        (1, 8, 0, "multiplying them by 128"),
        (4, 8, 0, "multiplying them by 16"),
        (12, 16, 32768, "stretch them"),
        (14, 16, 0, None),
        (16, 16, 0, None),
        (8, 8, 0, None),
        (6, 8, 0, None),
    ],
)
def test_pictures_that_use_little_of_their_range_are_said(
    bits: int,
    stored_in: int,
    offset: int,
    advice: str | None,
    tmp_path: Path,
) -> None:
    """Fault (Data, config and users' code): photos use less than an eighth of the range of their
    format, such as 12 bits in 16 -> a warning at the start, with the missing factor;
    `accel-trainer data` and `pack` also print it
    """
    data = [with_bits(bits, stored_in=stored_in, seed=seed, offset=offset) for seed in range(6)]
    root = write(
        tmp_path / "noise",
        [OddPicture(f"{seed}.png", each, None) for seed, each in enumerate(data)],
    )
    notes = [*load_photos(str(root), cache_dir=tmp_path / "cache").notes]
    images = load_images(str(root), cache_dir=tmp_path / "cache")
    splits = (images.train, images.test)
    of_images = [line for each in splits for line in notes_on_split("", each, images.class_names)]
    assert len(notes) == len(of_images) == (2 if advice else 0), "one for each split"
    for line in (*notes, *of_images):
        assert advice is not None
        assert advice in line
        assert line.startswith("6 of the 6 ")
        assert "\n" not in line


@pytest.mark.parametrize("kind", ["one class", "an eighth of all", "white on transparent"])
def test_dark_pictures_are_said_whatever_lies_beside_them(kind: str) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        num_classes = int(draw.integers(2, 6))
        labels = draw.integers(0, num_classes, 40)
        is_dark = labels == labels[0]
        if kind == "an eighth of all":
            is_dark = draw.permutation(40) < 6
        ranges = PixelRanges()
        for seed, (label, dark) in enumerate(zip(labels, is_dark, strict=True)):
            picture = with_bits(10 if dark else 16, stored_in=16, seed=seed)
            if kind == "white on transparent":
                picture = logo(white=bool(dark), seed=seed)
            ranges.look_at(picture, "", f"c{label}")
        (note,) = ranges.notes("photos")
        assert note.startswith(f"{is_dark.sum()} of the 40 photos in PNG ")
        if kind != "an eighth of all":
            assert f"({is_dark.sum()} of class c{labels[0]})" in note
        assert ("darker ground" if "white" in kind else "multiplying them by 64") in note


def logo(*, white: bool, seed: int) -> bytes:
    """White or coloured noise on transparent ground."""
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 4)).astype(np.uint8)
    pixels[..., :3] |= 255 * white
    return encoded(Image.fromarray(pixels), "png")


def test_single_dark_pictures_of_classes_are_not_said() -> None:
    for dark in range(30):
        ranges = PixelRanges()
        for seed in range(30):
            picture = with_bits(1 if seed == dark else 8, stored_in=8, seed=seed)
            ranges.look_at(picture, "", f"c{seed % 15}")
        assert not ranges.notes("photos")


def test_of_large_photos_an_even_few_are_looked_at() -> None:
    for side, at_least in ((100, 256), (2000, 16)):
        ranges = PixelRanges()
        black = encoded(Image.new("L", (side, side)), "png")
        for _ in range(256):
            ranges.look_at(black, "", "c")
        (note,) = ranges.notes("photos")
        assert at_least <= int(note.split()[0]) <= 256 * 2**18 / side**2 + 1


def test_a_broken_picture_is_left_to_whoever_needs_it() -> None:
    ranges = PixelRanges()
    for data in (b"nothing", with_bits(12, stored_in=16)[:60], with_bits(12, stored_in=16)):
        ranges.look_at(data, "", "c")
    (note,) = ranges.notes("photos")
    assert note.startswith("1 of the 1 photos in PNG I;16")
