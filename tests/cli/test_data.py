from __future__ import annotations

import base64
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from accel_trainer.vision import EvalTransform, PhotoSplit, load_photos
from accel_trainer.vision.data.photo_decode import decode_photo, read_header
from accel_trainer.vision.sources.photo_splits import load_splits
from tests.vision.make_photos import encoded, photo, write_classes

from .conftest import run_command

KINDS = ("png", "jpeg", "webp", "tiff")
pytestmark = pytest.mark.usefixtures("quiet_datasets")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    write_classes(root / "train", ["ant", "bee"], per_class=4)
    write_classes(root / "val", ["ant", "bee"], per_class=1)
    for path in (root / "val").rglob("*.jpg"):
        path.write_bytes(
            encoded(photo(64, 48, seed=99 + len(path.parts[-2]) + ord(path.parts[-2][0])))
        )
    (root / "train" / "bee" / "grey.png").write_bytes(encoded(photo(20, 90).convert("L"), "png"))
    return root


def data(
    capsys: pytest.CaptureFixture[str], source: Path, *flags: object, cache: Path | None = None
) -> tuple[int, str, str]:
    return run_command(
        capsys, ["data", source, "--cache-dir", cache or source.parent / "cache", *flags]
    )


def test_a_whole_dataset_is_described(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = data(capsys, photos)
    assert (code, err) == (0, "")
    assert f"{photos}: 11 photos of 2 classes" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["class", "train", "validation"] in lines
    assert ["bee", "5", "1"] in lines
    assert ["ant", "4", "1"] in lines
    assert ["(all)", "9", "2"] in lines
    assert "shorter side: 20 to 48 pixels, median 30" in out
    assert "formats: 10 JPEG RGB, 1 PNG L" in out
    assert "duplicates: none" in out


def test_copies_of_images_are_found_by_content_first_those_that_leak(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(photos / "train" / "ant" / "0.jpg", photos / "train" / "ant" / "again.jpg")
    shutil.copy(photos / "train" / "bee" / "1.jpg", photos / "val" / "bee" / "leak.jpg")
    _, out, _ = data(capsys, photos)
    assert "duplicates: 2 photos identical to an earlier one, 1 of them in a different split" in out
    listed = [line for line in out.splitlines() if " = " in line]
    assert ["leak.jpg" in line for line in listed] == [True, False]


def test_copies_are_counted_by_pixels_after_photos_are_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "photos", ["ant", "bee"], per_class=8)
    for path in sorted(root.rglob("*.jpg"))[::2]:
        pixels = Image.fromarray(decode_photo(path.read_bytes(), ""))
        path.with_name(f"{path.stem} again.png").write_bytes(encoded(pixels, "png"))
        shutil.copy(path, path.with_name(f"{path.stem} third.jpg"))
    shutil.copy(root / "ant" / "1.jpg", root / "bee" / "wrong.jpg")
    for fraction in ("0.3", "0.6"):
        chosen = load_photos(root, val_fraction=float(fraction), cache_dir=tmp_path / "cache")
        train, val = (
            [decode_photo(each.encoded_at(index), "").tobytes() for index in range(len(each))]
            for each in (chosen.train, chosen.val)
        )
        num_leaks = sum(pixels in train for pixels in val)
        _, out, _ = data(capsys, root, "--val-fraction", fraction)
        assert num_leaks > 2
        assert f"17 photos identical to an earlier one, {num_leaks} of them in a different" in out
        assert "1 in a different class" in out
        listed = [line for line in out.splitlines() if " = " in line]
        assert "wrong.jpg" in listed[0]
        assert out.split("\n\n")[1].split()[1:3] == ["train", "validation"]


def test_broken_photos_are_named_with_the_exit_code_of_a_run_that_stops(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = photos / "train" / "bee" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    code, out, _ = data(capsys, photos)
    assert code == 65
    assert "1 broken:" in out
    assert "bee/2.jpg" in out
    assert "formats: 9 JPEG RGB, 1 PNG L" in out


def test_what_a_run_would_refuse_is_said_with_its_exit_code(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(photos / "val")
    code, out, _ = data(capsys, photos)
    assert code == 65
    assert "a run would stop: error[DATA_NO_VAL]" in out
    assert "--val-fraction 0.1" in out
    code, out, _ = data(capsys, photos, "--val-fraction", "0.5")
    assert code == 0
    assert "would stop" not in out


def test_a_folder_that_is_not_a_dataset_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("Once")
    code, out, err = data(capsys, tmp_path / "thesis")
    assert (code, out, len(err.splitlines())) == (65, "", 1)


def test_of_many_classes_the_largest_and_the_smallest_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "photos"
    write_classes(root, [f"{number:02}" for number in range(25)], per_class=1)
    (root / "07" / "more.jpg").write_bytes(encoded(photo(33, 33)))
    _, out, _ = data(capsys, root, "--val-fraction", "0.3")
    rows = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert len(rows) == 1 + 10 + 1 + 10 + 1
    assert rows[1] in (["07", "2", "0"], ["07", "1", "1"], ["07", "0", "2"])
    assert rows[11][:3] == ["(5", "more", "classes)"]


def test_the_page_shows_what_the_model_sees_and_needs_no_other_file(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "train" / "bee").rename(photos / "train" / "<bee>")
    (photos / "val" / "bee").rename(photos / "val" / "<bee>")
    path = tmp_path / "page.html"
    code, out, _ = data(capsys, photos, "--html", path, "--image-size", "32")
    assert code == 0
    assert str(path) in out
    page = path.read_text()
    assert not re.search(r"<script|https?://", page)
    assert "&lt;bee&gt;" in page
    assert "<bee>" not in page
    pictures = [
        np.array(Image.open(io.BytesIO(base64.b64decode(data))))
        for data in re.findall(r'base64,([^"]+)"', page)
    ]
    assert [picture.shape for picture in pictures] == [(32, 32, 3)] * 9
    split: PhotoSplit = load_splits(str(photos), cache_dir=tmp_path / "cache").splits["train"]
    seen = EvalTransform(size=32)(split.encoded_at(4), "photo").numpy()
    near = [
        at for at, picture in enumerate(pictures) if np.abs(picture.astype(int) - seen).mean() < 8
    ]
    assert near == [4]


def test_what_another_program_would_decode_differently_is_counted(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = data(capsys, photos, "--image-size", "10")
    shrunk = re.search(r"of their size, for 10 pixels: (\d+)", out)
    assert shrunk is not None
    transform, found = EvalTransform(size=10), load_splits(str(photos), cache_dir=None).splits
    expected = 0
    for split in found.values():
        for at in range(len(split)):
            encoded_photo = split.encoded_at(at)
            header = read_header(encoded_photo, "")
            box = transform.box(header.height, header.width)
            expected += header.is_plain_jpeg and min(box.height, box.width) >= 20
    assert int(shrunk[1]) == expected > 3


def test_what_a_model_would_hardly_see_is_listed(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        random = np.random.default_rng(number)
        twelve_bits = random.integers(0, 4096, (30, 40)).astype(np.uint16)
        path = photos / "train" / "ant" / f"deep {number}.png"
        path.write_bytes(encoded(Image.fromarray(twelve_bits), "png"))
    (photos / "train" / "ant" / "red.png").write_bytes(
        encoded(Image.new("RGB", (40, 30), "red"), "png")
    )
    pages = [photo(40, 30, seed=seed) for seed in range(3)]
    (photos / "val" / "bee" / "scan.tiff").write_bytes(
        encoded(pages[0], "tiff", save_all=True, append_images=pages[1:])
    )
    code, out, _ = data(capsys, photos)
    lines = out.splitlines()
    assert code == 0, "a run would read them all"
    assert "deep 0.png" in lines[lines.index("almost no contrast: 3 (3 of class ant)") + 1]
    assert out.count("3 of the 3 training photos in PNG I;16") == 1
    assert "multiplying them by 16" in out
    assert "red.png" in lines[lines.index("one colour: 1 (1 of class ant)") + 1]
    heading = "several frames or pages, of which the first is read: 1 (1 of class bee)"
    assert "scan.tiff" in lines[lines.index(heading) + 1]
