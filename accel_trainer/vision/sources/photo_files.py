"""Opens photos on disk or on the hub as a `datasets.Dataset`: folders, parquet, webdataset tars, `save_to_disk`."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ...core.run_dir import expand_home

_TRAIN_FOLDERS = ("train", "training")
VAL_NAMES = ("validation", "val", "valid", "dev", "test", "testing", "eval", "evaluation")
"""The splits that are evaluated, preferred first."""

_PROBE_TIMEOUT_S = 5
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_EXPECTED = "train/<class>/*.jpg with or without val/<class>/*.jpg, <class>/*.jpg, metadata.csv, parquet, or tars"


def open_dataset(source: str | Path, *, cache_dir: Path | None) -> Any:
    """Return the `Dataset` or `DatasetDict` of a folder, a parquet or tar file, or a name on the hub.

    What `datasets` writes for local files is below `cache_dir`; None: in its own cache.

    Raises:
        DataError: nothing there, or nothing that is recognised.
    """
    path = expand_home(Path(source))
    if path.is_dir():
        return _open_folder(path.absolute(), _cache(cache_dir))
    if path.suffix == ".parquet" and path.is_file():
        return _load("parquet", path, data_files=glob.escape(str(path.absolute())), cache_dir=_cache(cache_dir))
    if path.suffix == ".tar" and path.is_file():
        return _load("webdataset", path, data_files=glob.escape(str(path.absolute())), cache_dir=_cache(cache_dir))
    if path.exists():
        raise DataError("DATA_NOT_A_FOLDER", f"{source} is not a folder, parquet or a tar: extract it")
    if not is_hub_name(str(source)):
        raise DataError("DATA_NOT_FOUND", f"no folder {source}: give an existing one, or OWNER/NAME on the hub")
    return load_from_hub(str(source))


def is_hub_name(source: str) -> bool:
    """Return whether it is OWNER/NAME and no file or folder here."""
    return bool(_HUB_NAME.fullmatch(source)) and not expand_home(Path(source)).exists()


def load_from_hub(repository: str) -> Any:
    """Return a dataset of the hub, or from the Hugging Face cache if it was downloaded before.

    Raises:
        DataError: it is in neither.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi, constants

    try:
        if not constants.HF_HUB_OFFLINE:
            # `load_dataset` retries for 24 s (datasets 5.2), so check first whether the hub answers.
            HfApi().dataset_info(repository, timeout=_PROBE_TIMEOUT_S)
        return load_dataset(repository)
    except Exception as error:  # its errors, and those of its HTTP library, are of any type
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fact = f"no folder {repository}, and it cannot be loaded from the Hugging Face hub ({reason})"
        fix = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "set HF_HUB_OFFLINE=1 if it was downloaded"
        raise DataError("DATA_HUB", f"{fact}: check the name, give a local folder, or {fix}") from error


def _cache(cache_dir: Path | None) -> str | None:
    return str(expand_home(cache_dir) / "datasets") if cache_dir else None


def _open_folder(root: Path, cache_dir: str | None) -> Any:
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        from datasets import load_from_disk

        return _checked(lambda: load_from_disk(str(root)), root)
    if _has_tables(root):
        return _load(str(root), root, cache_dir=cache_dir)  # finds splits by file names, as on the hub
    _require_images(root)
    splits = _image_splits(root)
    patterns = {name: _patterns(folder) for name, folder in splits.items()}
    dataset = _load("imagefolder", root, data_files=patterns, cache_dir=cache_dir)
    if not any(map(_has_metadata, splits.values())):
        for split in dataset.values():
            _check_archives(root, _paths(split))
        _check_classes(root, dataset)
    return dataset


def _paths(dataset: Any) -> Any:
    from datasets import Image

    return dataset.cast_column("image", Image(decode=False)).flatten().data.column("image.path")


def _patterns(folder: Path) -> list[str]:
    """Return the patterns of all files below a folder. `**` does not follow links."""
    links = [path for path in _folders(folder) if path.is_symlink()]
    return [f"{glob.escape(str(path))}/**" for path in (folder, *links)]


def _load(name: str, path: Path, **options: Any) -> Any:
    from datasets import load_dataset

    return _checked(lambda: load_dataset(name, **options), path)


def _checked(load: Callable[[], Any], path: Path) -> Any:
    try:
        with _quiet():
            return load()
    except Exception as error:  # the readers of `datasets` raise errors of any type
        reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
        if damaged := _find_damaged(path):
            raise DataError(
                "DATA_DAMAGED", f"{damaged} is damaged ({reason}): restore it, or write it again"
            ) from error
        fact = f"{path} cannot be read by datasets ({type(error.__cause__ or error).__name__}: {reason})"
        raise DataError("DATA_NOT_RECOGNISED", f"{fact}: expected {_EXPECTED}") from error


def _find_damaged(root: Path) -> Path | None:
    """Return the first table below a folder, or description of one, that cannot be opened: `datasets` names none."""
    import pyarrow.parquet as pq
    from datasets.table import MemoryMappedTable

    readers: dict[str, Callable[[str], Any]] = {
        ".arrow": MemoryMappedTable.from_file,
        ".json": lambda name: json.loads(Path(name).read_bytes()),
        ".parquet": pq.read_metadata,
    }
    for path in sorted(path for path in root.rglob("*") if path.suffix in readers):
        try:
            readers[path.suffix](str(path))
        except Exception:  # of any type, as above
            return path
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars, of which each process would have several (`Downloading data`, for local files as well)."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _has_tables(root: Path) -> bool:
    """Return whether parquet or tars lie in the folder or in one below it."""
    for pattern in ("*.parquet", "*.tar", "*/*.parquet", "*/*.tar"):
        if any(path.name not in _METADATA for path in root.glob(pattern)):
            return True
    return False


def _require_images(root: Path) -> None:
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    others = set[str]()
    for _, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        suffixes = {os.path.splitext(name)[1].lower() or name for name in names if not name.startswith(".")}
        if not suffixes.isdisjoint(ImageFolder.EXTENSIONS):
            return
        others |= suffixes
    found = f"only {', '.join(sorted(others)[:5])} files" if others else "no files"
    raise DataError("DATA_NOT_RECOGNISED", f"no photos in {root}, {found}: expected {_EXPECTED}")


def _has_metadata(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _METADATA)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _image_splits(root: Path) -> dict[str, Path]:
    """Return the folder of each split. A folder `train` that holds images itself is a class of that name."""
    if _has_metadata(root):
        return {"train": root}
    splits = {path.name.lower(): path for path in _folders(root) if _holds_classes(path)}
    train = next((splits[name] for name in _TRAIN_FOLDERS if name in splits), None)
    val = next((splits[name] for name in VAL_NAMES if name in splits), None)
    if train is None:
        if val is not None and len(splits) == len(_folders(root)) and set(splits) <= set(VAL_NAMES):
            raise DataError("DATA_NOT_RECOGNISED", f"{root} has {val.name}/ but no train/: expected {_EXPECTED}")
        return {"train": root}
    return {"train": train} if val is None else {"train": train, "validation": val}


def _holds_classes(folder: Path) -> bool:
    return bool(_folders(folder)) or _has_metadata(folder)


def _check_archives(root: Path, paths: Any) -> None:
    """Raise DataError if `imagefolder` added the photos of a zip that lies beside the others."""
    import pyarrow.compute as pc

    inside = paths.filter(pc.starts_with(paths, "zip://"))
    if len(inside):
        archive = inside[0].as_py().rpartition("::")[2]
        fact = f"{root} has photos and an archive of photos ({archive})"
        raise DataError("DATA_ARCHIVE", f"{fact}: extract it, or move it to another folder")


def _check_classes(root: Path, splits: Mapping[str, Any]) -> None:
    """Raise DataError if `imagefolder` found no classes, or splits in their place."""
    if "label" in splits["train"].column_names:
        names = splits["train"].features["label"].names
        if {name.lower() for name in names} <= {*_TRAIN_FOLDERS, *VAL_NAMES}:
            fact = f"{root} has no class folders: {' and '.join(names)} hold photos themselves"
            raise DataError("DATA_NO_CLASSES", f"{fact}: expected {_EXPECTED}")
        return
    paths = [os.path.relpath(path, root) for split in splits.values() for path in _paths(split).to_pylist()]
    by_depth = {path.count(os.sep): path for path in paths}
    if len(by_depth) > 1:
        shallow, deep = by_depth[min(by_depth)], by_depth[max(by_depth)]
        fact = f"the photos in {root} are at different depths ({shallow} and {deep}), so their classes are unclear"
        raise DataError("DATA_DEPTH", f"{fact}: move them all into <class>/ folders of the same depth")
    fact = f"all {len(paths)} photos of {root} are in one class folder ({os.path.dirname(paths[0]) or '.'})"
    raise DataError("DATA_NO_CLASSES", f"{fact}, so there is nothing to tell apart: expected {_EXPECTED}")
