"""Explains the error of a failed run: known messages of torch, NCCL and the system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...core.json_files import read_json_object
from ...core.yaml_files import read_yaml
from .findings import Finding


@dataclass(frozen=True)
class Symptom:
    """A known error: `pattern` matches its text, `meaning` is its cause and its fix."""

    code: str
    pattern: str
    meaning: str


SYMPTOMS = tuple(
    Symptom(code, **texts) for code, texts in read_yaml(Path(__file__).with_suffix(".yaml")).items()
)


def diagnose(run: Path) -> list[Finding]:
    """Return the explanation of the error that ended the run, empty if the error is not known."""
    try:
        status = read_json_object(run / "status.json")
    except (OSError, ValueError):
        return []
    error = status.get("error")
    if status.get("state") != "failed" or not error or not isinstance(error, str):
        return []
    first_line = error.splitlines()[0]
    for symptom in SYMPTOMS:
        if re.search(symptom.pattern, error):
            message = f"the last attempt ended with: {first_line[:160]}; {symptom.meaning}"
            return [Finding(symptom.code, "error", message)]
    return []
