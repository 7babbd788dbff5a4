"""Tars: read as what they are, or refused with the member and the cause; never cut in silence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from accel_trainer.core.errors import DataError
from accel_trainer.vision import Photos, load_photos
from tests.vision.make_photos import encoded, photo, write_tar

PHOTO = [encoded(photo(10, 10, seed=index)) for index in range(4)]


def samples(count: int = 4) -> list[tuple[str, bytes]]:
    return [
        member
        for index in range(count)
        for member in (
            (f"{index:04}.jpg", PHOTO[index % 4]),
            (f"{index:04}.cls", b"%d" % (index % 2)),
        )
    ]


def load(root: Path, val_fraction: float = 0.5) -> Photos:
    return load_photos(root, cache_dir=root.parent / "cache", val_fraction=val_fraction)


def test_a_tar_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", samples()).read_bytes()
    end = whole.rindex(b"0003.cls") + 1024
    draw = random.Random(0)
    cuts = {512, 1024, end, *(draw.randrange(1, end) for _ in range(30))}
    for cut in sorted(cuts):
        path = tmp_path / str(cut) / "train.tar"
        path.parent.mkdir()
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="train.tar is damaged") as error:
            load(path.parent)
        assert error.value.code == "DATA_DAMAGED", cut
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "train.tar").write_bytes(whole + whole)
    with pytest.raises(DataError, match="after its end marker"):
        load(tmp_path / "joined")


REFUSED = {
    "members that are apart": (
        [*(each for each in samples() if "jpg" in each[0]), *samples()[1::2]],
        ("not adjacent", "0000.jpg", "0000.cls"),
    ),
    "dots in names": (
        [(name.replace("00", "v1.", 1), data) for name, data in samples()],
        ("first dot", "v1"),
    ),
    "a sample without a label": ([*samples(), ("0009.jpg", PHOTO[0])], ("0009.jpg",)),
    "a member twice": ([*samples(), samples()[-1]], ("0003.cls twice",)),
    "photos alone": ([each for each in samples() if "jpg" in each[0]], ("no labels",)),
    "class folders": ([(f"ant/{name}", each) for name, each in samples()[::2]], ("extract it",)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tar_whose_samples_are_unclear_is_one_line_with_the_member(
    kind: str, tmp_path: Path
) -> None:
    members, words = REFUSED[kind]
    write_tar(tmp_path / "tars" / "train.tar", members)
    with pytest.raises(DataError) as error:
        load(tmp_path / "tars")
    assert error.value.code == "DATA_TAR"
    assert all(word in str(error.value) for word in (*words, "train.tar"))


def test_the_line_end_of_a_text_file_is_not_part_of_its_label(tmp_path: Path) -> None:
    texts = [b"cat", b"cat\n", b"cat\r\n", b"dog\n", b"dog", b"dog\n"]
    members = [
        member
        for index, text in enumerate(texts)
        for member in ((f"{index}.jpg", PHOTO[index % 4]), (f"{index}.txt", text))
    ]
    write_tar(tmp_path / "tars" / "train.tar", members)
    assert load(tmp_path / "tars").class_names == ("cat", "dog")
