"""Compares the tensors of a run with each other: checkpoints, digests in rows, the export."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from safetensors.torch import load_file

from accel_trainer import CheckpointError
from accel_trainer.commands import digest_of, filesystem, first_difference, read_json_object

from .evidence import Evidence, step_named
from .verdict import Found, judge

_SOURCE = re.compile(
    r"(?P<weights>model|ema) (?:of the best checkpoint (?P<name>\S+)|after step (?P<step>\d+))"
)


def _check_files(evidence: Evidence) -> Found:
    """Compare the files of each checkpoint with the hashes in its manifest."""
    for name in evidence.checkpoints:
        try:
            evidence.load(name)
        except CheckpointError as error:
            return "DIFFERS", error.message
    if not evidence.checkpoints:
        return "not checked", "there is none"
    return "equal", f"the files of {len(evidence.checkpoints)} with their hashes"


def _check_digests(evidence: Evidence) -> Found:
    """Compare the digests in rows with the checkpoints of the same steps."""
    compared = 0
    for name in evidence.manifests:
        expected = {
            part.removeprefix("digest/"): (part, digest)
            for row in evidence.rows
            if row["optimizer_step"] == step_named(name)
            for part, digest in row.items()
            if part.startswith("digest/")
        }
        pieces = evidence.load(name).pieces if expected else {}
        for piece, (part, digest) in expected.items():
            if piece in pieces and (found := digest_of(pieces[piece])) != digest:
                fact = f"{piece} of {name} has the digest {found}, but its row has {digest}"
                return "DIFFERS", f"{part}: {fact}"
            compared += piece in pieces
    if not compared:
        return "not checked", "no row with digests is at a checkpoint"
    return "equal", f"{compared} in rows, with the checkpoints of their steps"


def _check_export(evidence: Evidence) -> Found:
    """Compare the exported weights with the checkpoint that they are from."""
    folder = evidence.run.folder / "export"
    path = folder / "model.safetensors"
    if not path.exists():
        return "not checked", "there is none"
    config = read_json_object(folder / "config.json")
    found = _SOURCE.fullmatch(str(config.get("weights")))
    if found is None:
        return "DIFFERS", "its config.json does not record which weights it has"
    best = (evidence.run.result.get("best") or {}).get("name")
    is_best_kept = best in evidence.manifests
    if evidence.is_result_current and is_best_kept and found["name"] != best:
        fact = f"it has {found['weights']} of {found['name'] or found['step']}"
        return "DIFFERS", f"{fact}, but the best is {best}"
    if config.get("sha256") != filesystem.sha256_of(path):
        return "DIFFERS", "model.safetensors does not match the hash in its config.json"
    sources = [
        name
        for name in evidence.manifests
        if name == found["name"] or str(step_named(name)) == found["step"]
    ]
    if not sources:
        return "not checked", f"there is no {found['name'] or found['step']}"
    pieces = evidence.load(sources[-1]).pieces
    stored = load_file(path)
    tensor = first_difference(pieces[found["weights"]], stored)
    fact = f"{tensor} differs from {found['weights']} in {sources[-1]}"
    compared = f"{len(stored)} tensors of {found['weights']} in {sources[-1]}"
    return judge(None if tensor is None else fact, compared=compared)


CHECKS: Mapping[str, Callable[[Evidence], Found]] = {
    "checkpoints": _check_files,
    "digests": _check_digests,
    "export": _check_export,
}
"""The checks of tensors, by what they are about."""
