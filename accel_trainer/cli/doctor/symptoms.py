"""Explains the error of a failed run: known messages of torch, NCCL and the system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...core.yaml_files import read_yaml
from ..common.output import JsonObject
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


def diagnose(status: JsonObject) -> list[Finding]:
    """Return the explanation of the error that ended a run, empty if the error is not known."""
    error = status.get("error")
    if status["state"] != "failed" or not isinstance(error, str):
        return []
    for symptom in SYMPTOMS:
        if re.search(symptom.pattern, error):
            message = f"the last attempt ended with: {error[:160]}; {symptom.meaning}"
            return [Finding(symptom.code, "error", message)]
    return []
