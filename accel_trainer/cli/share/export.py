"""`accel-trainer export RUN --to DIR`: export the trained model.

The export contains the weights, the model's source as plain torch, and a model card.

example: accel-trainer export runs/first --to model
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...callbacks.onnx import ONNX_FILES
from ...checkpoint.serialization import unpack_tensors
from ...core import filesystem
from ...core.errors import CheckpointError, OutputError
from ...core.history import is_number
from ...core.own_files import SUMS, format_sums, unchanged_in
from ...core.run_dir import holds_run, prepare_directory
from ...vision.pretrained import read_export_config, read_export_content
from ..common.output import JsonObject, Numbers, tell
from ..common.parser import CommandParser
from ..report.card import write_card
from ..runs.metric_groups import group_of_weights
from ..runs.run_reader import RunReader, read_run
from .best_so_far import opened_export
from .onnx_model import convert, is_own_model
from .plain_model import write_source, write_transform

_MAX_WEIGHTS_BYTES = 2**36
# Finds the step in a run's description of its exported weights.
_STEP = re.compile(r"step[- ](\d+)")


def main(argv: Sequence[str]) -> int:
    """Write the export and print where it is."""
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=Path, help="a run folder; the run may still be unfinished")
    to_help = "the folder to write"
    parser.add_argument("--to", type=Path, metavar="DIR", required=True, help=to_help)
    onnx_help = "add model.onnx, which maps normalised images to logits"
    parser.add_switch("--onnx", onnx_help)
    options = parser.parse_args(argv)
    export(read_run(options.run), options.to, with_onnx=options.onnx)
    tell(options.to)
    return 0


def export(run: RunReader, folder: Path, *, with_onnx: bool = False) -> None:
    """Write weights, config, source and model card to `folder`, and optionally the model as ONNX.

    Raises:
        CheckpointError: the run has no exported model, or it wrote no ONNX file of a model that is
            not from accel_trainer.vision.
        OutputError: the folder cannot be written, or the run's records contradict each other.
    """
    with opened_export(run.folder) as source:
        config = read_export_content(source) | {"evaluation": evaluation_of(run)}
        files = _files_of_model(source, config, with_onnx)
    metrics = reported_metrics(run, config)
    if any(map(config.get, ("eval_transform", "model", "onnx"))):
        files["transform.py"] = write_transform().encode()
    files |= {
        "config.json": json.dumps(config, indent=1).encode(),
        **write_card(run, config, metrics),
    }
    _write(folder, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write an export, or replace an earlier one that nobody has changed.

    Raises OutputError if a different file would be overwritten, or `folder` is of a run.
    """
    fix = "move it away, or choose a different folder"
    folder = prepare_directory(folder)
    for place in (folder, folder.parent):
        if holds_run(place):
            raise OutputError("EXPORT", f"{folder} is part of the run {place}: give a new folder")
    sums = {name: _sha256(data) for name, data in files.items()}
    # A killed export has left some of its files, and no list.
    own = unchanged_in(folder) | {name for name in sums if _hash_of(folder / name) == sums[name]}
    for name in (*files, SUMS):
        if os.path.lexists(folder / name) and name not in own:
            fact = f"{folder / name} would be overwritten, and differs from what an export wrote"
            raise OutputError("EXPORT", f"{fact}: {fix}")
    try:
        for name, data in {**files, SUMS: format_sums(sums)}.items():
            filesystem.write_file_atomic(folder / name, data)
    except OSError as error:
        raise OutputError(
            "EXPORT", f"{folder} cannot be written ({error.strerror}): choose a different folder"
        ) from error


def _hash_of(path: Path) -> str | None:
    with suppress(OSError):  # there is no such file
        return filesystem.sha256_of(path)
    return None


def _files_of_model(source: Path, config: JsonObject, with_onnx: bool) -> dict[str, bytes]:
    """Return the weights, the source of a model of ours, and the ONNX file that the run wrote.

    `with_onnx` writes an ONNX file if there is none. Its hash and that of the weights are stored in
    `config`.
    """
    names = ["model.safetensors", *(name for name, key in ONNX_FILES.items() if key in config)]
    files = {
        name: filesystem.read_file(source / name, max_bytes=_MAX_WEIGHTS_BYTES) for name in names
    }
    is_own = is_own_model(source)
    if with_onnx and is_own and len(names) == 1:
        fix = "start its recipe again with --onnx, which then only exports"
        raise CheckpointError(
            "EXPORT", f"{source} has no model.onnx, and only the recipe has the class: {fix}"
        )
    if is_own:
        return files
    _check_readable(files["model.safetensors"])
    # A wrong hash is kept, so that `verify` finds the damage.
    config.setdefault("sha256", _sha256(files["model.safetensors"]))
    if with_onnx and len(names) == 1:
        onnx = convert(source, config)
        files |= onnx.contents
        config |= onnx.config
    return files | {"model.py": write_source(read_export_config(source)).encode()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_readable(weights: bytes) -> None:
    try:
        unpack_tensors(weights)
    except ValueError as error:
        raise CheckpointError(
            "EXPORT", f"the exported weights cannot be read ({error}): export them again"
        ) from error


def reported_metrics(run: RunReader, config: JsonObject) -> Numbers:
    """Return the metrics of the run's exported weights, by their names without the group.

    Raises:
        OutputError: `result.json` and `metrics.jsonl` contradict each other.
    """
    weights = str(config.get("weights"))
    match = _STEP.search(weights)
    step = int(match[1]) if match else None
    rows = [row for row in run.evaluations() if row["optimizer_step"] == step]
    claims = list(rows)
    # A run that a signal stopped at this step may have been evaluated only before it.
    is_evaluated = run.result.get("state") != "preempted"
    if is_evaluated and run.result.get("optimizer_step") == step:
        claims.append(run.result.get("metrics") or {})
    match run.result.get("best"):
        case {"name": str(name), "metric": str(metric), "value": value} if name in weights:
            claims.append({metric: value})
    group = group_of_weights(weights, (name for claim in claims for name in claim))
    metrics: Numbers = {}
    for name, value in (item for claim in claims for item in claim.items()):
        found, _, quantity = name.partition("/")
        if found == group and is_number(value):
            known = metrics.setdefault(quantity, value)
            if known != value:
                fact = (
                    f"{name} at step {step} is {known} in metrics.jsonl, but {value} in result.json"
                )
                raise OutputError("RUN_CHANGED", f"{run.folder}: {fact}")
    return metrics


def run_of(model: Path) -> RunReader | None:
    """Return the run of `model`: itself, or that with this checkpoint or export; None: none."""
    run = model
    if (model / "manifest.json").is_file():
        run = model.resolve().parent.parent
    elif not (model / "config.yaml").is_file() and model.resolve().name == "export":
        run = model.resolve().parent
    return read_run(run) if (run / "config.yaml").is_file() else None


def evaluation_of(run: RunReader) -> JsonObject:
    """Return the evaluation settings that change the numbers."""
    # The environment has the precision if the config left the choice to the launcher.
    precision = run.environment.get("mixed_precision") or run.settings.get(
        "runtime.mixed_precision"
    )
    settings = {
        "mixed_precision": precision or "no",
        "tta": run.settings.get("task.tta", "none"),
        "seed": run.settings.get("seed", 0),
        "ignore_index": run.settings.get("task.ignore_index"),
        "photos": run.config.get("photos"),  # they decide which photos are for validation
    }
    return {name: value for name, value in settings.items() if value is not None}
