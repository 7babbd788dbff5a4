"""Damages, swaps or deletes photos and tables at random places: is each named, or not seen?"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_trainer.cli.main import main
from accel_trainer.core.errors import UserError
from accel_trainer.vision import load_photos
from accel_trainer.vision.data.photo_decode import decode_photo
from tests.cli.test_pack import contents
from tests.vision.make_photos import encoded, photo

CLASSES = ("ant", "bee", "cow")
PER_CLASS = 8
LAYOUTS = ("packed", "folder", "saved", "parquet")
DAMAGES = ("a bit", "512 bytes", "cut short", "swapped", "deleted", "emptied")
context = multiprocessing.get_context("fork")


def write_layouts(root: Path) -> None:
    """Write the same photos in each layout."""
    import datasets

    for split, number in (("train", PER_CLASS), ("val", 3)):
        for place, name in enumerate(CLASSES):
            (root / "folder" / split / name).mkdir(parents=True)
            for index in range(number):
                data = encoded(photo(60 + index, 50, seed=10 * index + place))
                (root / "folder" / split / name / f"{index}.jpg").write_bytes(data)
    flags = ["--cache-dir", str(root / "cache"), "--shard-size", "6", "--num-workers", "1"]
    assert main(["pack", str(root / "folder"), str(root / "packed"), *flags]) == 0
    splits = datasets.load_dataset(
        "imagefolder", data_dir=str(root / "folder"), cache_dir=str(root / "cache")
    )
    splits = datasets.DatasetDict({name: embedded(split) for name, split in splits.items()})
    splits.save_to_disk(str(root / "saved"))
    (root / "parquet").mkdir()
    for name, split in splits.items():
        split.to_parquet(str(root / "parquet" / f"{name}-00000-of-00001.parquet"))


def embedded(split: Any) -> Any:
    """Return a dataset whose photos lie in its table."""
    from datasets.table import embed_table_storage

    return split.with_format("arrow").map(embed_table_storage, batched=True).with_format(None)


def damage(folder: Path, kind: str, draw: random.Random) -> list[str]:
    """Change one file, or swap two, below `folder`; return their names.

    Files that say nothing are left out.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    changed = [path]
    if kind == "a bit":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    elif kind == "512 bytes":
        place = draw.randrange(len(data))
        data[place : place + 512] = bytes(len(data[place : place + 512]))
        path.write_bytes(data)
    elif kind == "cut short":
        path.write_bytes(data[: draw.randrange(1, len(data))])
    elif kind == "swapped":
        other = draw.choice(
            [each for each in files if each.suffix == path.suffix and each != path] or files
        )
        changed.append(other)
        mine = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(mine)
    elif kind == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"")
    return [str(each.relative_to(folder)) for each in changed]


def read(folder: Path, cache: Path) -> dict[str, str]:
    """Read every photo as a run does; return the hash of all that it trains on, or the error."""
    digest = hashlib.sha256()
    try:
        photos = load_photos(folder, cache_dir=cache)
        digest.update(repr(photos.class_names).encode())
        for split in (photos.train, photos.val):
            digest.update(split.labels.tobytes())
            for index in range(len(split)):
                digest.update(decode_photo(split.encoded_at(index), split.name_of(index)).tobytes())
    except UserError as error:
        return {"code": error.code, "said": error.message}
    return {"read": digest.hexdigest(), "fingerprint": photos.fingerprint}


def in_process(work: Callable[[], Any], log: Path) -> Any:
    """Return what `work` returns, or how its process ended: damage may kill it."""
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sender.send(work())

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(600) else None
    except EOFError:
        answer = None
    process.join(600)
    return {"ended": process.exitcode, "log": log.read_text()[-1500:]} if answer is None else answer


class Campaign:
    """The layouts, and what reading them undamaged returns."""

    def __init__(self, scratch: Path) -> None:
        import datasets

        # The threads that it warns of are torch's and idle.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        datasets.disable_progress_bars()
        self._scratch = scratch
        self._root = scratch / "whole"
        write_layouts(self._root)
        self._expected = {name: read(self._root / name, scratch / "cache") for name in LAYOUTS}
        assert len({each.get("read") for each in self._expected.values()}) == 1, self._expected

    def run_trial(self, number: int) -> dict[str, Any]:
        """Damage a copy of a layout, and read it."""
        draw = random.Random(number)
        layout = LAYOUTS[number % len(LAYOUTS)]
        kind = DAMAGES[number // len(LAYOUTS) % len(DAMAGES)]
        place = self._scratch / "trial"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self._root / layout, place / layout)
        names = damage(place / layout, kind, draw)
        answer = in_process(lambda: read(place / layout, place / "cache"), place / "log")
        found = self._outcome(answer, names, layout)
        result = {
            "number": number,
            "layout": layout,
            "damage": kind,
            "files": names,
            "outcome": found,
            **answer,
        }
        if layout == "packed":
            result["packed_again"] = self._pack_again(place)
        return result

    def _outcome(self, answer: dict[str, Any], names: list[str], layout: str) -> str:
        expected = self._expected[layout]
        if "ended" in answer:
            return "crashed"
        if "said" in answer:
            said = answer["said"]
            is_named = (
                any(name in said or Path(name).name in said for name in names) or "(row " in said
            )
            return "named" if is_named else "refused"
        if answer["read"] == expected["read"]:
            return "the same pixels"
        return (
            "not seen, but at a resume"
            if answer["fingerprint"] != expected["fingerprint"]
            else "not seen"
        )

    def _pack_again(self, place: Path) -> str:
        """Pack the source over the damaged result; return whether it is whole again."""
        flags = [
            "--cache-dir",
            str(self._root / "cache"),
            "--shard-size",
            "6",
            "--num-workers",
            "1",
        ]
        argv = ["pack", str(self._root / "folder"), str(place / "packed"), *flags]
        answer = in_process(lambda: {"code": main(argv)}, place / "log")
        if contents(place / "packed") == contents(self._root / "packed"):
            return "whole"
        return "crashed" if "ended" in answer else "refused" if answer["code"] else "different"


def is_ok(result: dict[str, Any]) -> bool:
    """Return whether a start or a resume sees harmful damage, and packing again repairs it."""
    must_be_named = result["damage"] in ("cut short", "emptied") and result["outcome"] == "refused"
    is_repaired = result.get("packed_again", "whole") == "whole" or "pack.json" in result["files"]
    return result["outcome"] not in ("crashed", "not seen") and not must_be_named and is_repaired
