"""The export of a run that has not ended, or of a checkpoint: a temporary one, with the best weights so far."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ...checkpoint.format import LoadedCheckpoint, decode_files, read_files
from ...checkpoint.retention import BEST_FILE, best_name, find_checkpoint
from ...checkpoint.serialization import read_json_object
from ...checkpoint.sharded import stream_tensors
from ...core import filesystem
from ...core.errors import CheckpointError, ConfigError
from ...vision.pretrained import find_export, read_export_content

Weights = Literal["model", "ema"]


@contextmanager
def opened_export(path: Path | str, *, weights: Weights | None = None) -> Iterator[Path]:
    """Yield the folder of the export at `path`: a run, one of its checkpoints, an export, or ORG/NAME on the hub.

    A checkpoint, or a run that has not ended, has none: then it is a temporary one, of the best
    checkpoint so far, else of the newest. Its `config.json` says which, as `weights`. `weights`
    chooses those of a checkpoint.

    Raises:
        CheckpointError: there is nothing to export, or it is damaged.
        ConfigError: `weights` are not there, or `path` is no checkpoint.
    """
    folder = Path(path)
    is_checkpoint = (folder / "manifest.json").is_file()
    run = folder.resolve().parent.parent if is_checkpoint else folder
    if not is_checkpoint and (
        (run / "model.safetensors").is_file() or not has_only_checkpoints(run)
    ):
        if weights is not None:
            raise ConfigError(
                "USAGE",
                f"--weights {weights} is for a checkpoint, which {path} is not: leave it out",
            )
        yield find_export(path)
        return
    content = _description(run)
    loaded, says = (
        (decode_files(read_files(folder), folder), "") if is_checkpoint else _best_so_far(run)
    )
    chosen: str = weights or ("ema" if "ema" in loaded.pieces else "model")
    if not is_checkpoint and weights is None and loaded.name == best_name(run / "checkpoints"):
        chosen = _weights_of_best(run)
    if chosen not in loaded.pieces:
        raise CheckpointError(
            "CKPT_MISSING", f"{path} has no {chosen} weights: set --weights to model"
        )
    with tempfile.TemporaryDirectory(prefix="export-") as temporary:
        export = Path(temporary)
        filesystem.replace_file(export / "model.safetensors", stream_tensors(loaded.pieces[chosen]))
        digest = filesystem.sha256_of(export / "model.safetensors")
        content |= {"weights": f"{chosen} of {says}{loaded.name}", "sha256": digest}
        filesystem.write_file_atomic(export / "config.json", json.dumps(content).encode())
        if says:
            logging.getLogger(__name__).warning(
                "%s has not ended: using the %s", path, content["weights"]
            )
        yield export


def has_only_checkpoints(run: Path) -> bool:
    """Whether a run has saved, but not ended."""
    has_export = (run / "export" / "model.safetensors").is_file()
    return not has_export and (run / "config.yaml").is_file() and (run / "checkpoints").is_dir()


def _description(run: Path) -> dict[str, object]:
    if not (run / "export" / "config.json").is_file() or (run / "export").is_symlink():
        fact = f"{run} does not describe its model yet"
        raise CheckpointError(
            "EXPORT", f"{fact}: start its command again, which adds export/config.json"
        )
    content = read_export_content(run / "export")
    return {name: value for name, value in content.items() if not name.endswith("sha256")}


def _best_so_far(run: Path) -> tuple[LoadedCheckpoint, str]:
    directory = run / "checkpoints"
    best = best_name(directory)
    if best is not None and (directory / best).is_dir():
        return decode_files(
            read_files(directory / best), directory / best
        ), "the best checkpoint so far, "
    found = find_checkpoint(directory)
    if found is None:
        raise CheckpointError("EXPORT", f"{run} has saved no checkpoint yet: wait for its first")
    return found[1], "the newest checkpoint so far, "


def _weights_of_best(run: Path) -> str:
    metric = read_json_object(run / "checkpoints" / BEST_FILE).get("metric")
    return "ema" if str(metric).startswith("eval_ema/") else "model"
