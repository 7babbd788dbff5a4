"""A campaign of numbered trials, logged one a line: the same command continues after the last."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Result = dict[str, Any]


def run_campaign(
    prepare: Callable[[Path], Callable[[int], Result]], *, number: int
) -> list[Result]:
    """Run the trials that the command line asks for (default: `number`); return JSON values.

    `prepare(scratch)` returns the trial, which gets its number.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=number)
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    results = (
        [json.loads(line) for line in options.log.read_text().splitlines()]
        if options.log.exists()
        else []
    )
    with TemporaryDirectory() as scratch:
        run_trial = prepare(Path(scratch))
        for trial in range(len(results), options.number):
            results.append(run_trial(trial))
            with options.log.open("a") as log:
                log.write(json.dumps(results[-1]) + "\n")
    return results
