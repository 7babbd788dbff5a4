from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.core import filesystem
from accel_trainer.core.errors import OutputError
from accel_trainer.vision import BadImageConfig, ImageDataset, load_images
from accel_trainer.vision.data import cache
from accel_trainer.vision.sources.raw import RawImages
from tests.faults.disks import CountingDisk, DyingDisk, installed
from tests.variants import slow

from .make_data import png, random_images, write_image_folder, write_parquet, write_parquet_folder

# Newer Pythons warn of threads; those of torch are idle here, and a spawned process takes 3 s to
# import it.
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    write_parquet_folder(folder)
    return folder


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were decoded into, one entry each time."""
    folders: list[Path] = []
    build = cache._build
    monkeypatch.setattr(
        cache,
        "_build",
        lambda folder, *rest, **more: (folders.append(folder), build(folder, *rest, **more)),
    )
    return folders


def load(root: Path) -> ImageDataset:
    return load_images(str(root), cache_dir=root.parent / "cache")


def only_folder(root: Path) -> Path:
    (folder,) = (
        path for path in (root.parent / "cache").iterdir() if not path.name.startswith(".")
    )
    return folder


def test_a_dataset_is_decoded_once(root: Path, builds: list[Path]) -> None:
    first, second = load(root), load(root)
    assert len(builds) == 1
    assert torch.equal(first.train.images, second.train.images)
    assert first.fingerprint == second.fingerprint
    assert first.normalization == second.normalization


def test_normalisation_is_that_of_the_training_pixels(root: Path) -> None:
    dataset = load(root)
    values = dataset.train.images.double() / 255
    assert dataset.normalization.mean == pytest.approx(values.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert dataset.normalization.std == pytest.approx(
        values.std((0, 2, 3), correction=0).tolist(), abs=1e-12
    )


def test_a_constant_channel_is_not_divided_by_zero(tmp_path: Path) -> None:
    images = random_images(6)
    images[..., 1] = 40
    for name in ("train", "test"):
        write_parquet(
            tmp_path / "flat" / f"{name}.parquet",
            [png(image) for image in images],
            [0, 1, 0, 1, 0, 1],
        )
    std = load(tmp_path / "flat").normalization.std
    assert std[1] == 1 / 255
    assert std[0] > 0.2


def test_changed_sources_are_decoded_again_and_have_another_fingerprint(
    root: Path, builds: list[Path]
) -> None:
    first = load(root)
    write_parquet_folder(root, num_train=13)
    second = load(root)
    assert len(second.train) == 13
    assert first.fingerprint != second.fingerprint
    assert len(first.train) == 12
    assert len(builds) == 2


def test_a_changed_file_of_an_image_folder_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "folder"
    write_image_folder(root)
    first = load(root)
    changed = root / "train" / "ant" / "0.png"
    changed.write_bytes(png(random_images(1, seed=9)[0]))
    os.utime(changed, ns=(0, 0))
    assert load(root).fingerprint != first.fingerprint


def test_copies_of_the_same_parquet_have_the_same_fingerprint(root: Path, tmp_path: Path) -> None:
    write_parquet_folder(tmp_path / "copy")
    assert load(root).fingerprint == load(tmp_path / "copy").fingerprint


def edit_manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "images.json"
        manifest = json.loads(path.read_text())
        edit(manifest)
        path.write_text(json.dumps(manifest, indent=1))

    return damage


def write_manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "images.json").write_text(text)


def flip_a_bit(folder: Path) -> None:
    path = folder / "train_images.u8"
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)


def change_a_label(folder: Path) -> None:
    path = folder / "train_labels.i64"
    path.write_bytes(b"\x02" + path.read_bytes()[1:])


def deny_a_dimension(folder: Path) -> None:
    """As a version with another format would, with its own hash."""
    edit_manifest(lambda manifest: (manifest.pop("sha256"), manifest["shape"].pop()))(folder)
    data = (folder / "images.json").read_bytes()
    edit_manifest(lambda manifest: manifest.update(sha256=hashlib.sha256(data).hexdigest()))(folder)


def lose_manifest(folder: Path) -> None:
    (folder / "images.json").unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a pixel": flip_a_bit,
    "a label": change_a_label,
    "no images": lambda folder: (folder / "train_images.u8").unlink(),
    "images cut short": lambda folder: os.truncate(folder / "test_images.u8", 10),
    "a pixel sum": edit_manifest(lambda each: each["train"]["pixel_sums"][0].__setitem__(0, 7)),
    "the name of a class": edit_manifest(lambda each: each["class_names"].__setitem__(0, "wasp")),
    "no hash": edit_manifest(lambda each: each.pop("sha256")),
    "a dimension": deny_a_dimension,
    "no manifest": lose_manifest,
    "a manifest cut short": lambda folder: os.truncate(folder / "images.json", 30),
    "a manifest of other types": write_manifest('{"shape": "none", "class_names": 3}'),
    "a manifest that is a list": write_manifest("[]"),
    "a manifest too deep": write_manifest("[" * 100_000),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_built_again(root: Path, builds: list[Path], kind: str) -> None:
    """Fault (Data, config and users' code): the cache of decoded images is damaged: pixels, labels
    or metadata -> it is rebuilt, with a warning
    """
    expected = load(root)
    images = expected.train.images.clone()
    DAMAGE[kind](only_folder(root))
    found = load(root)
    assert len(builds) == 2
    assert torch.equal(found.train.images, images)
    assert found.fingerprint == expected.fingerprint
    assert found.class_names == expected.class_names
    assert found.normalization == expected.normalization
    load(root)
    assert len(builds) == 2


@pytest.mark.parametrize("kind", ["a file", "a link", "a file beside the cache's"])
def test_what_is_no_cache_is_not_removed(root: Path, kind: str) -> None:
    load(root)
    folder = only_folder(root)
    if kind == "a file beside the cache's":
        lose_manifest(folder)
        kept = folder / "mine.txt"
    else:
        kept = folder.rename(root / "elsewhere") / "mine.txt" if kind == "a link" else folder
    if kind == "a link":
        folder.symlink_to(root / "elsewhere")
        lose_manifest(folder)
    elif kind == "a file":
        shutil.rmtree(folder)
    kept.write_text("mine")
    with pytest.raises(OutputError, match="does not belong to an image cache, which would"):
        load(root)
    assert kept.read_text() == "mine"
    assert folder.is_symlink() == (kind == "a link")


def test_the_fingerprint_of_the_digits_never_changes(tmp_path: Path) -> None:
    """A checkpoint holds it: with another one, no run on these images could be continued."""
    pytest.importorskip("sklearn")
    expected = "92ac0f06d2c8a794309ea03810d98c3589a04570bf9d1224cec851098f665ad4"
    assert load_images("digits", cache_dir=tmp_path).fingerprint == expected


def test_writing_into_a_mapped_tensor_leaves_the_cache_as_it_is(
    root: Path, builds: list[Path]
) -> None:
    load(root).train.images.zero_()
    load(root)
    assert len(builds) == 1


def load_in_process(root: Path, results: Queue[str]) -> None:
    results.put(load(root).fingerprint)


def load_and_die(root: Path, num_changes: int) -> None:
    with installed(DyingDisk(num_changes)):
        load_images(str(root), cache_dir=root.parent / "cache", bad_images=SKIP)


SKIP = BadImageConfig(policy="skip", max_fraction=0.5)


@FORKS
@pytest.mark.parametrize("every", [4, *slow([1])])
def test_a_build_that_is_killed_anywhere_continues_with_the_same_bytes(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault (Data, config and users' code): the build of that cache is killed -> the next start
    continues after the last chunk with a valid hash, and writes the same bytes
    """
    monkeypatch.setattr(cache, "_CHUNK_IMAGES", 4)
    root = tmp_path / "images"
    images = [png(image) for image in random_images(23)]
    for bad in (5, 8, 22):
        images[bad] = images[bad][:40]
    write_parquet(root / "train.parquet", images, [index % 3 for index in range(23)])
    write_parquet(root / "test.parquet", images[:5], [0, 1, 2, 0, 1])
    with installed(CountingDisk()) as disk:
        whole = load_images(str(root), cache_dir=tmp_path / "whole", bad_images=SKIP)
    (expected,) = (path for path in (tmp_path / "whole").iterdir() if path.is_dir())
    decoded: list[int] = []
    usable = BadImageConfig.usable

    def count(self: BadImageConfig, split: Any, left_out: Any, *, start: int = 0) -> Any:
        for index, image in usable(self, split, left_out, start=start):
            decoded.append(index)
            yield index, image

    monkeypatch.setattr(BadImageConfig, "usable", count)
    repeated = []
    last = len(disk.operations) - 1
    for num_changes in [*range(0, last, every), last]:
        writer = multiprocessing.get_context("fork").Process(
            target=load_and_die, args=(root, num_changes)
        )
        writer.start()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        decoded.clear()
        found = load_images(str(root), cache_dir=tmp_path / "cache", bad_images=SKIP)
        repeated.append(len(decoded))
        assert found.fingerprint == whole.fingerprint
        assert found.train.left_out == whole.train.left_out
        folder = only_folder(root)
        assert {path.name for path in expected.iterdir()} == {
            path.name for path in folder.iterdir()
        }
        assert all(
            (folder / path.name).read_bytes() == path.read_bytes() for path in expected.iterdir()
        )
        shutil.rmtree(tmp_path / "cache")
    assert last >= 30
    assert repeated[0] == 26, "all, and the first for its size"
    assert repeated[-1] == 0, "it was done"
    assert sorted(repeated, reverse=True) == repeated


@FORKS
def test_processes_that_load_at_once_get_the_same_and_decode_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    results: Queue[str] = context.Queue()
    builders: Queue[int] = context.Queue()
    build = cache._build

    def build_slowly(
        folder: Path, raw: RawImages, bad_images: BadImageConfig, *, is_sole_writer: bool
    ) -> None:
        builders.put(os.getpid())
        time.sleep(0.3)  # long enough for all others to arrive
        build(folder, raw, bad_images, is_sole_writer=is_sole_writer)

    monkeypatch.setattr(cache, "_build", build_slowly)
    processes = [context.Process(target=load_in_process, args=(root, results)) for _ in range(4)]
    for process in processes:
        process.start()
    fingerprints = {results.get(timeout=600) for _ in processes}
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * 4
    assert fingerprints == {load(root).fingerprint}
    assert builders.get(timeout=600) in {process.pid for process in processes}
    assert builders.empty()


@FORKS
def test_a_chunk_that_a_power_loss_has_damaged_is_decoded_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "_CHUNK_IMAGES", 4)
    expected = load_images(str(root), cache_dir=tmp_path / "whole").fingerprint
    for damage in (b"flip", b"json"):
        writer = multiprocessing.get_context("fork").Process(target=load_and_die, args=(root, 26))
        writer.start()
        writer.join()
        (partial,) = (root.parent / "cache").glob("*.partial")
        journal = partial / "train_chunks.jsonl"
        assert len(journal.read_bytes().splitlines()) == 3
        if damage == b"flip":
            data = bytearray((partial / "train_images.u8").read_bytes())
            data[800] ^= 1
            (partial / "train_images.u8").write_bytes(data)
        else:
            journal.write_bytes(journal.read_bytes().replace(b'"stop"', b'"\0\0\0\0"', 1))
        assert load(root).fingerprint == expected
        shutil.rmtree(root.parent / "cache")


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
@FORKS
def test_users_wait_for_each_other_in_a_shared_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with cache._writer_lock(tmp_path):
        pass
    (tmp_path / ".lock").chmod(0o444)  # as for another user
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(tmp_path)
            if os.geteuid() == 0:
                os.setuid(65534)
            with cache._writer_lock(Path(".")) as is_sole_writer:
                code = 0 if is_sole_writer else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_without_locks_a_second_writer_is_tolerated(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    write = cache._write_split
    nested: list[ImageDataset | None] = []

    def write_while_another_does(*arguments: Any) -> object:
        if not nested:
            nested.append(None)
            nested[0] = load(root)
        return write(*arguments)

    monkeypatch.setattr(cache, "_write_split", write_while_another_does)
    found = load(root)
    assert nested[0] is not None
    assert found.fingerprint == nested[0].fingerprint
    only_folder(root)


def test_a_cache_that_can_only_be_read_is_used(
    root: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(root)

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest, **more: _reading(path, flags, *rest, **more)
    )
    assert len(load(root).train) == 12
    assert len(builds) == 1


_open = os.open


def _reading(path: object, flags: int, *rest: object, **more: object) -> int:
    assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return _open(path, flags, *rest, **more)  # type: ignore[arg-type]


def test_a_full_disk_is_reported_before_and_while_decoding(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cache, "free_bytes", lambda path: 100)
        with pytest.raises(OutputError, match=r"CACHE_TOO_LARGE.*choose a different cache folder"):
            load(root)

    def full(path: Path, descriptor: int, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem.disk, "write", full)
    with pytest.raises(OutputError, match="CACHE_NOT_WRITABLE.*No space left on device.*free some"):
        load(root)
    assert not [path for path in (root.parent / "cache").iterdir() if path.name != ".lock"]
