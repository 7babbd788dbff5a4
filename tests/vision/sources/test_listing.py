"""Every file below a folder is read, or left out for a reason that is given."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_trainer.core.errors import DataError, UserError
from accel_trainer.vision import load_images, load_photos
from accel_trainer.vision.sources.listing import LITTER, describe_left_out, list_photos
from accel_trainer.vision.sources.photo_folders import list_splits
from tests.vision.make_photos import encoded, photo, write_classes, write_photos

JPEG = encoded(photo(12, 10))
PHOTOS = (
    "1.jpg",
    "A.JPEG",
    "x.y.png",
    "a.tar.webp",
    ".hidden.jpg",
    "__x__.bmp",
    "é.GIF",
    "._9.jpg",
)
OTHERS = ("1.HEIC", "b.avif", "c.txt", "d", "e.xml", "f.jpg.bak", "g.DNG", "h.zip", "i.jpg~")
LITTER_FILES = (".DS_Store", "Thumbs.db", "THUMBS.DB", "desktop.ini", ".gitkeep")
LITTER_FOLDERS = (".git", "__MACOSX", "@eaDir", ".ipynb_checkpoints", ".Trash-1000", "$RECYCLE.BIN")
CLASSES = ("cat", "__background__", ".net", "..dots", "._cat2", "a b", "#tag", "_", "@x", "NA")


def make_tree(root: Path, seed: int) -> tuple[set[str], set[str], set[str]]:
    """Write a tree; return what has to be read, what may not be, and the folders not entered."""
    draw = random.Random(seed)
    read, unread, closed = set[str](), set[str](), set[str]()
    places = [root]
    for name in draw.sample(CLASSES, 4):
        place = draw.choice(places) / name
        place.mkdir(parents=True)
        places.append(place)
    for place in places:
        for name in draw.sample(PHOTOS, 4):
            (place / name).write_bytes(draw.choice([JPEG, b""]))
            read.add(str(place / name))
        for name in (*draw.sample(OTHERS, 3), draw.choice(LITTER_FILES)):
            (place / name).write_bytes(b"x")
            unread.add(str(place / name))
        if draw.random() < 0.5:
            (place / "twin.jpg").write_bytes(JPEG)
            (place / "._twin.jpg").write_bytes(b"AppleDouble")
            read.add(str(place / "twin.jpg"))
            unread.add(str(place / "._twin.jpg"))
        if draw.random() < 0.5:
            (place / "gone.jpg").symlink_to("/nowhere/1.jpg")
            (place / "round.png").symlink_to("round.png")
            unread |= {str(place / "gone.jpg"), str(place / "round.png")}
        if draw.random() < 0.3:
            os.mkfifo(place / "pipe.jpg")
            unread.add(str(place / "pipe.jpg"))
        if draw.random() < 0.5:
            litter = place / draw.choice(LITTER_FOLDERS)
            litter.mkdir()
            (litter / "1.jpg").write_bytes(JPEG)
            closed.add(str(litter))
        if draw.random() < 0.3:
            (place / "empty").mkdir()
            closed.add(str(place / "empty"))
    return read, unread, closed


def test_each_file_of_generated_trees_is_read_or_left_out_by_a_reason(tmp_path: Path) -> None:
    for seed in range(60):
        root = tmp_path / str(seed)
        root.mkdir()
        read, unread, closed = make_tree(root, seed)
        listing = list_photos(root)
        left_out = {each.path for each in listing.left_out}
        assert set(listing.photos) == read, seed
        assert left_out == unread | closed, seed
        assert len(listing.photos) == len(read)
        assert len(listing.left_out) == len(unread | closed)
        assert all(each.reason for each in listing.left_out)
        # What is said adds up to what is left out.
        lines = describe_left_out(listing.left_out)
        counts = [re.search(r": (\d+) (?:file|folder)s? \(", line) for line in lines]
        assert sum(int(found[1]) for found in counts if found) == len(listing.left_out)


def test_only_litter_is_left_out_without_a_warning(tmp_path: Path) -> None:
    for index, name in enumerate((*LITTER_FILES, "note.txt", "a.xml", "1.heic", "photo")):
        (tmp_path / name).write_bytes(b"x")
        (each,) = list_photos(tmp_path).left_out
        assert (each.reason == LITTER) == (index < len(LITTER_FILES))
        assert each.is_loss == (name == "1.heic")
        (tmp_path / name).unlink()


def test_files_beside_the_splits_are_accounted_for(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_classes(tmp_path / split)
    write_classes(tmp_path / "more", per_class=1)
    for name in ("1.jpg", "README.md", ".DS_Store"):
        (tmp_path / name).write_bytes(JPEG)
    found = list_splits(tmp_path)
    left_out = {
        os.path.relpath(each.path, tmp_path): each for each in [*found.left_out, *found.beside]
    }
    assert sorted(left_out) == [".DS_Store", "1.jpg", "README.md", "more", "test"]
    assert [name for name, each in left_out.items() if each.is_loss] == ["1.jpg", "more"]
    photos = load_photos(tmp_path, cache_dir=tmp_path / "cache")
    assert [note for note in photos.notes if "more" in note]
    assert [fact for fact in photos.facts if "test" in fact]


def three(suffix: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Makes three of these in a folder."""

    def lose(folder: Path) -> None:
        folder.mkdir(parents=True)
        for index in range(3):
            make(folder / f"{index}{suffix}")

    return lose


LOST: dict[str, Callable[[Path], object]] = {
    "heic": three(".HEIC", lambda path: path.write_bytes(b"\0\0\0\x18ftypheic")),
    "links": three(".jpg", lambda path: path.symlink_to(f"../../.git/annex/{path.stem}")),
    "links to folders": three(".jpg", lambda path: path.symlink_to(path.parents[1])),
    "texts": three(".txt", lambda path: path.write_text("cow")),
    "pages": three(".aspx", lambda path: path.write_text("<html>")),
    "pipes": three(".jpg", os.mkfifo),
    "folders": three(".jpg", Path.mkdir),
    "zip": three(".zip", lambda path: path.write_bytes(b"PK")),
    "no suffix": three("", lambda path: path.write_bytes(b"no photo")),
    "a deeper folder": lambda folder: three(".heif", Path.touch)(folder / "deep"),
    "a dead link": lambda folder: folder.symlink_to("/mnt/photos/not/there"),
}


@pytest.mark.parametrize("depth", ["", "wild"])
@pytest.mark.parametrize("kind", LOST)
def test_a_class_of_which_nothing_is_read_is_refused_by_every_reader(
    kind: str, depth: str, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        write_classes(tmp_path / split / depth)
    folder = tmp_path / "train" / depth / "cow"
    LOST[kind](folder)
    for load in (load_photos, load_images):
        with pytest.raises(DataError, match="cow") as error:
            load(str(tmp_path), cache_dir=tmp_path / "cache")
        assert error.value.code == "DATA_CLASS_UNREAD"
        assert str(error.value).endswith(f"replace it, or move {folder} elsewhere")
        is_counted = kind not in ("a dead link", "folders", "links to folders")
        assert "3 files" in str(error.value) or not is_counted


@pytest.mark.parametrize("name", ["__x__", ".net", "._cat", "..", "...", "#1", "~", "-"])
def test_a_class_may_have_any_name_that_is_not_litter(name: str, tmp_path: Path) -> None:
    name = name if name != ".." else "..a"
    for split in ("train", "val"):
        write_classes(tmp_path / split, ("ant", name))
    photos = load_photos(tmp_path, cache_dir=tmp_path / "cache")
    assert photos.class_names == tuple(sorted(("ant", name)))
    assert photos.notes == ()


def test_photos_and_small_images_have_the_same_classes_and_notes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("__a__", ".b"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(2):
                (folder / f"{index}.png").write_bytes(encoded(photo(8, 8, seed=index), "png"))
            (folder / "2.heic").write_bytes(b"")
    photos = load_photos(tmp_path / "images", cache_dir=tmp_path / "cache")
    images = load_images(str(tmp_path / "images"), cache_dir=tmp_path / "cache")
    assert photos.class_names == images.class_names == (".b", "__a__")
    assert photos.train.labels.tolist() == images.train.labels.tolist()
    assert photos.notes == images.notes
    assert len(photos.notes) == 4


def test_two_spellings_of_one_split_are_refused(tmp_path: Path) -> None:
    for split in ("train", "Train", "val"):
        write_classes(tmp_path / split)
    with pytest.raises(UserError, match="Train and train"):
        load_photos(tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("load", [load_photos, load_images])
def test_a_link_to_the_folder_of_another_class_is_refused(
    load: Callable[..., object], tmp_path: Path
) -> None:
    root = tmp_path / "photos"
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            write_photos(root / split / name, ["0.jpg"])
    (root / "train" / "wasp").symlink_to("bee")
    with pytest.raises(DataError, match="are the same photo in two classes") as error:
        load(str(root), cache_dir=tmp_path / "cache")
    assert "train/wasp/0.jpg" in str(error.value)
    (root / "train" / "wasp").unlink()
    (root / "train" / "bee").rename(tmp_path / "bees")
    (root / "train" / "bee").symlink_to(tmp_path / "bees")
    load(str(root), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("missing", [(), ("bee",), ("ant", "bee")])
def test_classes_that_are_only_trained_on_are_named(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    names = ("ant", "bee", "cow")
    for split, found in (("train", names), ("val", sorted({*names} - {*missing}))):
        for name in found:
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(2):
                (folder / f"{index}.png").write_bytes(encoded(photo(8, 8, seed=index), "png"))
    photos = load_photos(tmp_path / "images", cache_dir=tmp_path / "cache")
    images = load_images(str(tmp_path / "images"), cache_dir=tmp_path / "cache")
    assert photos.notes == images.notes
    assert len(photos.notes) == bool(missing)
    assert all(f"no validation photo of {', '.join(missing)}:" in note for note in photos.notes)
