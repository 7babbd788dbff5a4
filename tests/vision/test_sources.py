from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.vision import ImageDataset, load_images
from accel_trainer.vision.sources.find import find_image_source

from .make_data import png, random_images, write_image_folder, write_parquet, write_parquet_folder
from .odd_pictures import bomb


def load(root: Path) -> ImageDataset:
    return load_images(str(root), cache_dir=root.parent / "cache")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "layout", ["{}.parquet", "data/{}-00000-of-00001.parquet", "plain_text/{}-0.parquet"]
)
@pytest.mark.parametrize("columns", [("img", "label"), ("image", "fine_label")])
def test_parquet_is_found_where_hub_snapshots_have_it(
    root: Path, layout: str, columns: tuple[str, str]
) -> None:
    images = random_images(4)
    for split in ("train", "test"):
        write_parquet(
            root / layout.format(split),
            [png(image) for image in images],
            [0, 1, 2, 0],
            image_column=columns[0],
            label_column=columns[1],
            class_names=["ant", "bee", "cow"],
        )
    dataset = load(root)
    assert torch.equal(dataset.train.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert dataset.test.labels.tolist() == [0, 1, 2, 0]
    assert dataset.class_names == ("ant", "bee", "cow")
    assert dataset.num_channels == 3


def test_parquet_in_several_files_is_one_split_in_name_order(root: Path) -> None:
    images = random_images(6)
    for part in range(3):
        rows = [png(image) for image in images[2 * part : 2 * part + 2]]
        write_parquet(root / f"train-{part}.parquet", rows, [part, part])
    write_parquet(root / "test.parquet", [png(images[0])], [2])
    dataset = load(root)
    assert torch.equal(dataset.train.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.class_names == ("0", "1", "2")


def test_image_folders_name_the_classes(root: Path) -> None:
    write_image_folder(root)
    (root / "train" / "ant" / ".DS_Store").write_bytes(b"not an image")
    dataset = load(root)
    assert dataset.class_names == ("ant", "bee")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = np.concatenate([random_images(3, seed=0), random_images(3, seed=1)])
    assert torch.equal(dataset.train.images, torch.from_numpy(expected).permute(0, 3, 1, 2))


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_the_binary_version_of_cifar_is_read(root: Path, label_bytes: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    labels = np.array([[7] * (label_bytes - 1) + [label] for label in (0, 1, 2, 1)], dtype=np.uint8)
    data = np.concatenate([labels, images], axis=1).tobytes()
    folder = root / ("cifar-10-batches-bin" if label_bytes == 1 else "cifar-100-binary")
    folder.mkdir()
    if label_bytes == 1:
        half = len(data) // 2
        (folder / "data_batch_1.bin").write_bytes(data[:half])
        (folder / "data_batch_2.bin").write_bytes(data[half:])
        (folder / "test_batch.bin").write_bytes(data)
        (folder / "batches.meta.txt").write_text("ant\nbee\ncow\n\n")
    else:
        (folder / "train.bin").write_bytes(data)
        (folder / "test.bin").write_bytes(data)
        (folder / "fine_label_names.txt").write_text("ant\nbee\ncow\n")
    dataset = load(root)
    assert torch.equal(dataset.train.images, torch.from_numpy(images).view(4, 3, 32, 32))
    assert dataset.train.labels.tolist() == [0, 1, 2, 1]
    assert dataset.class_names == ("ant", "bee", "cow")


def test_digits_come_without_a_download(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    dataset = load_images("digits", cache_dir=tmp_path)
    assert dataset.train.images.shape == (1438, 1, 16, 16)
    assert dataset.test.images.shape == (359, 1, 16, 16)
    assert dataset.num_classes == 10
    assert torch.bincount(dataset.test.labels).min() >= 35
    train = {image.numpy().tobytes() for image in dataset.train.images}
    assert not any(image.numpy().tobytes() in train for image in dataset.test.images)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cifar", ConfigError, r"DATA_NAME.*'cifar': did you mean cifar10\?.*cifar100 or digits,"),
        ("mnist", ConfigError, r"DATA_NAME.*no dataset or folder 'mnist': --dataset is cifar10"),
        ("./nowhere", DataError, r"DATA_NOT_FOUND.*no folder ./nowhere"),
    ],
)
def test_an_unknown_name_is_answered_with_the_choices(
    tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_images(name, cache_dir=tmp_path)


def test_an_unreachable_hub_is_one_line_that_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA_HUB.*uoft-cs/cifar10.*give a folder") as caught:
        load_images("cifar10", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_hub_is_asked_once_before_the_library_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def unreachable(self: object, repository: str, *, revision: str, timeout: float) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(DataError, match=r"DATA_HUB.*\(Name or service not known\)"):
        load_images("cifar100", cache_dir=tmp_path)


def test_a_dataset_of_the_hub_is_read_as_its_parquet_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    images = write_parquet_folder(tmp_path / "hub")
    files = {split: str(tmp_path / "hub" / f"{split}.parquet") for split in ("train", "test")}
    hub = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "hf"))
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, revision: asked.append((name, revision)) or hub
    )
    dataset = load_images("cifar10", cache_dir=tmp_path / "cache")
    assert torch.equal(dataset.train.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert dataset.class_names == ("ant", "bee", "cow")
    ((name, revision),) = asked
    assert find_image_source("cifar10").key == f"hub:{name}@{revision}"


GOOD = png(random_images(1)[0])
GREY = png(random_images(1)[0, :, :, 0])
BAD_ROWS = {
    "empty": (b"", 1, r"DATA_IMAGE\]: row 2 of .*train.parquet cannot be decoded \("),
    "null": (None, 1, r"DATA_IMAGE\]: row 2 of .*train.parquet has no image"),
    "no label": (
        GOOD,
        None,
        r"DATA_LABEL\]: row 2 of .*train.parquet has no label in column label \(1 such",
    ),
    "a label without a class": (
        GOOD,
        3,
        r"DATA_LABEL\]: row 2 of .*train.parquet has label 3 \(1 such row\): the",
    ),
    "a negative label": (
        GOOD,
        -1,
        r"DATA_LABEL\]: row 2 of .* has label -1 \(1 such row\): the classes are 0 to 2",
    ),
}


@pytest.mark.parametrize(("encoded", "label", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named(
    root: Path, encoded: bytes | None, label: int | None, message: str
) -> None:
    """Fault (Data, config and users' code): a label is missing or out of range -> an error with the
    row or sample, and the label
    """
    names = ["ant", "bee", "cow"]
    write_parquet(
        root / "train.parquet", [GOOD, GOOD, encoded, GOOD], [0, 1, label, 2], class_names=names
    )
    write_parquet(root / "test.parquet", [GOOD], [0], class_names=names)
    with pytest.raises(DataError, match=message) as caught:
        load(root)
    assert "\n" not in str(caught.value)
    assert not any(path.suffix != ".lock" for path in (root.parent / "cache").glob("[!.]*"))


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_bomb_in_the_first_row_is_refused_before_it_takes_memory(root: Path, side: int) -> None:
    for name in ("train", "test"):
        write_parquet(root / f"{name}.parquet", [bomb(side), bomb(side)], [0, 1])
    with pytest.raises(DataError, match=r"DATA_IMAGE_LARGE\]: row 0 of .* pixels"):
        load(root)


def test_a_grey_image_among_coloured_ones_is_read_as_colour(root: Path) -> None:
    write_parquet(root / "train.parquet", [GOOD, GREY], [0, 1])
    write_parquet(root / "test.parquet", [GOOD], [0])
    assert load(root).train.images.shape == (2, 3, 8, 8)
    write_parquet(root / "train.parquet", [GREY, GOOD], [0, 1])
    with pytest.raises(DataError, match=r"DATA_IMAGE_MODE\]: row 1 of .*train.parquet is a colour"):
        load(root)


def drop_test(root: Path) -> None:
    (root / "test.parquet").unlink()


def empty_test(root: Path) -> None:
    write_parquet(root / "test.parquet", [], [], class_names=["ant", "bee", "cow"])


def empty_train(root: Path) -> None:
    write_parquet(root / "train.parquet", [], [], class_names=["ant", "bee", "cow"])


def cut_parquet(root: Path) -> None:
    os.truncate(root / "train.parquet", 100)


def other_columns(root: Path) -> None:
    write_parquet(root / "train.parquet", [GOOD], [0], image_column="picture")


def unseen_test_label(root: Path) -> None:
    write_parquet(root / "train.parquet", [GOOD], [0])
    write_parquet(root / "test.parquet", [GOOD, GOOD], [0, 5])


def test_sizes_differ_between_splits(root: Path) -> None:
    write_parquet(root / "train.parquet", [GOOD], [0])
    write_parquet(root / "test.parquet", [png(random_images(1, size=9)[0])], [0])
    with pytest.raises(DataError, match=r"DATA_IMAGE_SIZE\]: row 0 of .*test.parquet is 9x9"):
        load(root)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_test, r"DATA_NOT_RECOGNISED\]: no dataset in .*images: expected train\*.parquet"),
        (empty_test, r"DATA_EMPTY\]: the test split has no images"),
        (empty_train, r"DATA_EMPTY\]: the train split has no images"),
        (cut_parquet, r"DATA_PARQUET\]: .*train.parquet cannot be read"),
        (other_columns, r"DATA_COLUMNS\]: the splits of .*train.parquet differ in column label"),
        (unseen_test_label, r"DATA_LABEL\]: row 1 of .*test.parquet is of class 5, which no"),
    ],
)
def test_a_damaged_parquet_folder_is_explained(
    root: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_parquet_folder(root)
    damage(root)
    with pytest.raises(DataError, match=message):
        load(root)


def test_a_damaged_image_folder_is_explained(root: Path) -> None:
    write_image_folder(root)
    (root / "train" / "bee" / "1.png").write_bytes(GOOD[:60])
    with pytest.raises(DataError, match=r"DATA_IMAGE\]: .*train/bee/1.png .*cannot be decoded"):
        load(root)
    (root / "train" / "bee" / "1.png").unlink()
    (root / "test" / "cow").mkdir()
    (root / "test" / "cow" / "0.png").write_bytes(GOOD)
    with pytest.raises(DataError, match=r"DATA_LABEL\]: .*test/cow/0.png .*is of class cow, which"):
        load(root)


def test_an_empty_folder_and_a_file_are_no_datasets(root: Path) -> None:
    with pytest.raises(DataError, match="DATA_NOT_RECOGNISED"):
        load(root)
    archive = root / "cifar-10-binary.tar.gz"
    archive.write_bytes(b"")
    with pytest.raises(DataError, match=r"DATA_NOT_A_FOLDER.*is a file: extract it"):
        load(archive)


def test_binary_files_cut_short_or_missing_are_named(root: Path) -> None:
    (root / "data_batch_1.bin").write_bytes(bytes(3073 + 100))
    with pytest.raises(DataError, match=r"DATA_NOT_FOUND.*test_batch.bin"):
        load(root)
    (root / "test_batch.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match="DATA_BINARY.*data_batch_1.bin has 3173 bytes, not"):
        load(root)


@pytest.mark.parametrize("files", [("data_batch_1", "batches.meta"), ("train", "test", "meta")])
def test_pickles_are_refused_unread(root: Path, files: tuple[str, ...]) -> None:
    """Fault (Malice): CIFAR's Python batches, which are pickles -> refused without being read; the
    binary version is supported
    """
    folder = root / "cifar-python"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(DataError, match="DATA_PICKLE.*is a Python pickle, which can run code when"):
        load(root)


def test_real_cifar10_decodes_to_the_known_channel_means(tmp_path: Path) -> None:
    folder = os.environ.get("ACCEL_TRAINER_CIFAR10")
    if folder is None:
        pytest.skip("set ACCEL_TRAINER_CIFAR10 to a folder with CIFAR-10 in parquet to run this")
    dataset = load_images(folder, cache_dir=tmp_path)
    assert dataset.train.images.shape == (50_000, 3, 32, 32)
    assert dataset.test.images.shape == (10_000, 3, 32, 32)
    assert torch.bincount(dataset.train.labels).tolist() == [5_000] * 10
    assert dataset.normalization.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-4)
    assert dataset.normalization.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=3e-3)
