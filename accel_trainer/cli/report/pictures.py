"""Some predictions of a run and its most confident mistakes, for its report."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ...core.json_files import read_json_object
from ...vision.mistakes import MISTAKES_FILE
from ..runs.run_reader import RunReader

_NUM_PICTURES = 16
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+=*")

Picture = Mapping[str, Any]


def read_samples(run: RunReader, name: str) -> list[Picture]:
    """Return samples of the last evaluation that the run stored.

    `mistakes`: the most confident first; `predictions`: evenly spaced ones, right or wrong.
    """
    try:
        stored = read_json_object(run.folder / MISTAKES_FILE).get(name, [])
    except FileNotFoundError:
        return []
    return [
        {
            "src": row["picture"] if _PICTURE.fullmatch(row["picture"]) else "",
            "label": str(row["prediction"]),
            "truth": str(row["label"]),
            "confidence": f"{float(row['probability']):.0%}",
            "name": _without_folders(str(row["name"]), run),
        }
        for row in stored[:_NUM_PICTURES]
    ]


def _without_folders(name: str, run: RunReader) -> str:
    """Return the name of a sample as its dataset knows it.

    A report is made to be shown: it does not tell where a machine keeps its files.
    """
    command = run.environment.get("command") or {}
    directory = str(command.get("directory") or "")
    dataset = os.path.normpath(os.path.join(directory, str(run.config.get("dataset") or "")))
    if not os.path.isabs(dataset) or dataset == os.path.dirname(dataset):
        return name
    return name.replace(dataset + os.sep, "").replace(dataset, os.path.basename(dataset))
