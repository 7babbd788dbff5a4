"""A photo has one place over all splits: links of any kind to it are seen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_trainer.core.errors import DataError
from accel_trainer.vision import load_images, load_photos
from tests.vision.make_photos import encoded, photo, write_classes

NUM_VAL = 4


def classes(root: Path, *splits: str) -> Path:
    for seed, split in enumerate(splits):
        for number, name in enumerate(("ant", "bee")):
            (root / split / name).mkdir(parents=True)
            for index in range(2):
                data = encoded(photo(8, 8, seed=100 * seed + 10 * number + index), "png")
                (root / split / name / f"{index}.png").write_bytes(data)
    return root


def each_photo(root: Path, split: str) -> Iterator[tuple[Path, Path]]:
    """Yield each photo of a split, and the path of the same name in val."""
    for path in sorted((root / split).rglob("*.png")):
        copy = root / "val" / path.relative_to(root / split)
        copy.parent.mkdir(parents=True, exist_ok=True)
        yield path, copy


def link_folder(root: Path) -> None:
    (root / "val").symlink_to("train")


def link_classes(root: Path) -> None:
    (root / "val").mkdir()
    for name in ("ant", "bee"):
        (root / "val" / name).symlink_to(root / "train" / name)


def link_photos(root: Path) -> None:
    for path, copy in each_photo(root, "train"):
        copy.symlink_to(os.path.relpath(path, copy.parent))


def link_hard(root: Path) -> None:
    for path, copy in each_photo(root, "train"):
        os.link(path, copy)


def link_both_elsewhere(root: Path) -> None:
    (root / "train").rename(root.parent / "pool")
    for path in sorted((root.parent / "pool").rglob("*.png")):
        for split in ("train", "val"):
            link = root / split / path.relative_to(root.parent / "pool")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def describe_others(root: Path) -> None:
    """Metadata that names photos of the other split."""
    for split in ("train", "val"):
        lines = ["file_name,label"]
        for name in ("ant", "bee"):
            lines += [f"../train/{name}/{index}.png,{name}" for index in range(2)]
        (root / split).mkdir(exist_ok=True)
        (root / split / "metadata.csv").write_text("\n".join(lines))


def copy_photos(root: Path) -> None:
    for path, copy in each_photo(root, "train"):
        shutil.copy(path, copy)


LINKS = [
    link_folder,
    link_classes,
    link_photos,
    link_hard,
    link_both_elsewhere,
    describe_others,
]


@pytest.mark.parametrize("link", LINKS)
def test_photos_that_are_links_to_training_photos_are_said(
    link: Callable[[Path], None], tmp_path: Path
) -> None:
    root = classes(tmp_path / "photos", "train")
    link(root)
    notes = load_photos(root, cache_dir=tmp_path / "cache").notes
    (note,) = [each for each in notes if "through links" in each]
    assert note.startswith(f"{NUM_VAL} of {NUM_VAL} validation photos")
    if link is not describe_others:  # which the other reader refuses
        images = load_images(str(root), cache_dir=tmp_path / "cache")
        assert [each for each in images.notes if "through links" in each] == [note]


def test_copies_and_links_within_a_split_are_not_said(tmp_path: Path) -> None:
    root = classes(tmp_path / "photos", "train")
    copy_photos(root)
    for path in sorted((root / "train").rglob("*.png")):
        os.link(path, path.with_name(f"again {path.name}"))
    assert not load_photos(root, cache_dir=tmp_path / "cache").notes
    assert not load_images(str(root), cache_dir=tmp_path / "cache").notes


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_a_photo_in_two_classes_is_refused_in_every_split(kind: str, tmp_path: Path) -> None:
    for place in ("train", "val"):
        root = classes(tmp_path / place, "train", "val")
        getattr(root / place / "bee" / "x.png", kind)(root / "train" / "ant" / "0.png")
        for load in (load_photos, load_images):
            with pytest.raises(DataError, match="the same photo in two classes") as error:
                load(str(root), cache_dir=tmp_path / "cache")
            assert f"{place}/bee/x.png" in str(error.value)


def test_all_names_of_a_photo_are_set_aside_together(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos", per_class=12)
    for index, path in enumerate(sorted(root.rglob("*.jpg"))):
        for number in range(3):
            link = path.with_name(f"{number} {path.name}")
            link.symlink_to(path) if index % 2 else os.link(path, link)
    photos = load_photos(root, val_fraction=0.4, cache_dir=tmp_path / "cache")
    train, val = (
        {each.encoded_at(at) for at in range(len(each))} for each in (photos.train, photos.val)
    )
    assert len(photos.train) == 4 * len(train)
    assert len(photos.val) == 4 * len(val)
    assert not train & val
