"""Finds the export of a run, or makes a temporary one of a checkpoint or of an unfinished run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.format import LoadedCheckpoint, decode_files, read_files
from ...checkpoint.loading import load_checkpoint
from ...checkpoint.retention import BEST_FILE, best_name
from ...checkpoint.sharded import stream_tensors
from ...core import filesystem
from ...core.errors import CheckpointError, ConfigError
from ...core.json_files import read_json_object
from ...core.logger import logger
from ...vision.pretrained import find_export, read_export_content
from ..runs.metric_groups import Weights, weights_of_metric


@contextmanager
def opened_export(path: Path | str, *, weights: Weights | None = None) -> Iterator[Path]:
    """Yield the folder of the export at `path`.

    `path` is a run, one of its checkpoints, an export, or ORG/NAME on the hub. A checkpoint and a
    run that has not ended have no export: for them a temporary one is made, for a run from its best
    checkpoint so far, else from its newest, as `weights` in its `config.json` records. The argument
    `weights` chooses the weights of a checkpoint.

    Raises:
        CheckpointError: there is nothing to export, it is damaged, or it has no such weights.
        ConfigError: `weights` is given and `path` is no checkpoint.
    """
    folder = Path(path)
    is_checkpoint = (folder / "manifest.json").is_file()
    run = folder.resolve().parent.parent if is_checkpoint else folder
    has_export = (run / "model.safetensors").is_file() or not has_only_checkpoints(run)
    if not is_checkpoint and has_export:
        if weights is not None:
            raise ConfigError(
                "USAGE",
                f"--weights {weights} is for a checkpoint, which {path} is not: leave it out",
            )
        yield find_export(path)
        return
    content = _description(run)
    if is_checkpoint:
        loaded = decode_files(read_files(folder), folder)
        origin = ""
    else:
        loaded, origin = _best_so_far(run)
    chosen: str = weights or ("ema" if "ema" in loaded.pieces else "model")
    if not is_checkpoint and weights is None and loaded.name == best_name(run / "checkpoints"):
        metric = read_json_object(run / "checkpoints" / BEST_FILE).get("metric")
        chosen = weights_of_metric(str(metric))
    if chosen not in loaded.pieces:
        raise CheckpointError(
            "CKPT_MISSING", f"{path} has no {chosen} weights: set --weights to model"
        )
    with tempfile.TemporaryDirectory(prefix="export-") as temporary:
        export = Path(temporary)
        filesystem.replace_file(export / "model.safetensors", stream_tensors(loaded.pieces[chosen]))
        digest = filesystem.sha256_of(export / "model.safetensors")
        content |= {"weights": f"{chosen} of {origin}{loaded.name}", "sha256": digest}
        filesystem.write_file_atomic(export / "config.json", json.dumps(content).encode())
        if origin:
            logger.warning("%s has not ended: using the %s", path, content["weights"])
        yield export


def has_only_checkpoints(run: Path) -> bool:
    """Whether `run` is a run with checkpoints that has not ended."""
    has_export = (run / "export" / "model.safetensors").is_file()
    return not has_export and (run / "config.yaml").is_file() and (run / "checkpoints").is_dir()


def _description(run: Path) -> dict[str, object]:
    """Return what `export/config.json` says of the model, without hashes of files."""
    if not (run / "export" / "config.json").is_file() or (run / "export").is_symlink():
        fact = f"{run} does not describe its model yet"
        raise CheckpointError(
            "EXPORT", f"{fact}: start its command again, which adds export/config.json"
        )
    content = read_export_content(run / "export")
    of_files = (*(name for name in content if name.endswith("sha256")), "onnx")
    return {name: value for name, value in content.items() if name not in of_files}


def _best_so_far(run: Path) -> tuple[LoadedCheckpoint, str]:
    """Return the best checkpoint of a run, else the newest, and text that says which it is."""
    directory = run / "checkpoints"
    best = best_name(directory)
    if best is not None and (directory / best).is_dir():
        loaded = decode_files(read_files(directory / best), directory / best)
        return loaded, "the best checkpoint so far, "
    found = load_checkpoint(directory)
    if found is None:
        raise CheckpointError("EXPORT", f"{run} has saved no checkpoint yet: wait for its first")
    return found, "the newest checkpoint so far, "
