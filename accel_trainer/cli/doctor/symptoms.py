"""Explains the errors of a failed run: known messages of torch, NCCL and the system, with the fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.serialization import read_json_object
from ...core.filesystem import open_file
from ...run.parser import read_stored_yaml
from .findings import Finding

_MAX_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Symptom:
    """`pattern` matches the error text; `meaning` is the cause and the fix."""

    code: str
    pattern: str
    meaning: str


SYMPTOMS = tuple(
    Symptom(code, **texts) for code, texts in read_stored_yaml(Path(__file__).with_suffix(".yaml")).items()
)


def diagnose(run: Path) -> list[Finding]:
    """Return the explanation of the error that ended the run, if it is a known one."""
    try:
        status = read_json_object(run / "status.json")
    except (OSError, ValueError):
        return []
    error = status.get("error")
    if status.get("state") != "failed" or not error or not isinstance(error, str):
        return []
    logs = [] if (run / "logs").is_symlink() else sorted((run / "logs").glob("rank-*.log"))
    said = "\n".join([error, *map(_tail, logs)])
    first_line = error.splitlines()[0]
    return [
        Finding(symptom.code, "warning", f"the last attempt ended with: {first_line[:160]}; {symptom.meaning}")
        for symptom in SYMPTOMS
        if re.search(symptom.pattern, said)
    ][:1]


def _tail(log: Path) -> str:
    try:
        with open_file(log) as file:
            file.seek(max(0, log.stat().st_size - _MAX_LOG_BYTES))
            return file.read(_MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
