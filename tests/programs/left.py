"""What a run leaves, without what was measured, and how that of two runs differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel_trainer.core.filesystem import TEMPORARY_NAME

MEASURED = {"samples_per_s", "wall_s", "peak_memory_bytes"}
# What tells of the attempts: their times, their machines and what they said.
OF_ATTEMPTS = ("attempts.jsonl", "status.json", "environment.json", "config.yaml", "run.lock")


def left_by(run: Path) -> dict[str, Any]:
    """Return all that a run leaves, by the path of the file."""
    return {
        str(path.relative_to(run)): _content(path)
        for path in sorted(run.rglob("*"))
        if path.is_file()
        and path.name not in OF_ATTEMPTS
        and path.relative_to(run).parts[0] not in ("logs", "recipe.py")
    }


def _content(path: Path) -> Any:
    if path.name == "COMMIT":
        return "the hash of the manifest"
    if path.name == "metrics.jsonl":
        return [_row(line) for line in path.read_text().splitlines()]
    if path.name not in ("trainer.json", "result.json", "manifest.json"):
        return path.read_bytes()
    values = json.loads(path.read_bytes())
    if path.name == "trainer.json":  # measured numbers vary in length
        del values["callbacks"]["MetricLogger"]["history_bytes"]
    if path.name == "result.json":
        values = {name: values[name] for name in values.keys() - MEASURED}
    if path.name == "manifest.json":
        del values["files"]  # which are compared themselves
        del values["num_processes"]  # those of the attempt
    return values


def _row(line: str) -> Any:
    try:
        return {name: v for name, v in json.loads(line).items() if not name.startswith("perf/")}
    except ValueError:
        return line  # half a row


def differences(whole: dict[str, Any], killed: dict[str, Any], *, keeps_all: bool) -> list[str]:
    """Return what is other in a run that was killed than in one that was not, a line each.

    A run that is interrupted has more checkpoints; if it keeps only the newest, others take their
    place, and what both have must be equal. The newest and the best are in both. A preemption saves
    the position of an evaluation before it.
    """
    killed = {**killed, **_as_evaluated(whole, killed)}
    best = (whole.get("result.json") or {}).get("best") or {}
    newest = max((name.split("/")[1] for name in whole if "/step-" in name), default="")
    needed = {newest, best.get("name", newest)}
    found = []
    for name in sorted(whole.keys() | killed.keys()):
        checkpoint = name.split("/")[1] if "/step-" in name else None
        if any(TEMPORARY_NAME.fullmatch(part) for part in Path(name).parts):
            found.append(f"{name} is left over")
        elif name not in whole:
            if checkpoint is None:
                found.append(f"{name} is only in the killed run")
        elif name not in killed:
            if checkpoint is None or keeps_all or checkpoint in needed:
                found.append(f"{name} is missing")
        elif whole[name] != killed[name]:
            found.append(f"{name} differs{_where(whole[name], killed[name])}")
    return found


def _as_evaluated(whole: dict[str, Any], killed: dict[str, Any]) -> dict[str, Any]:
    """Return the `trainer.json` of those that were killed before the evaluation of their step."""
    return {
        name: values
        for name, values in whole.items()
        if name.endswith("trainer.json")
        and name in killed
        and values["evaluated_step"] == values["position"]["optimizer_step"]
        and killed[name]["evaluated_step"] != values["evaluated_step"]
        and killed[name]["position"] == values["position"]
    }


def _where(mine: Any, theirs: Any) -> str:
    """Return where two JSON values differ first."""
    if isinstance(mine, list) and isinstance(theirs, list):
        pairs = [*zip(mine, theirs, strict=False)]
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if index == len(pairs):
            return f": {len(mine)} and {len(theirs)} entries"
        return f" at {index}{_where(mine[index], theirs[index])}"
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = sorted(mine.keys() | theirs.keys())
        name = next(n for n in names if mine.get(n) != theirs.get(n))
        return f" in {name}{_where(mine.get(name), theirs.get(name))}"
    return f": {mine!r:.60} and {theirs!r:.60}" if not isinstance(mine, bytes) else ""
