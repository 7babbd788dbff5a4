"""`accel-trainer probe RUN CALLBACKS.py`: log values that you forgot to log in a past run.

example: accel-trainer probe runs/first weight_norms.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from accel_trainer import ConfigError
from accel_trainer.commands import (
    CommandParser,
    Row,
    RunReader,
    counted,
    filesystem,
    format_table,
    read_run,
    reading,
    say_unless,
    show,
    tell,
    tell_json,
    writes_to,
)

from .replay import Replay
from .whole_run import add_job_options, folder_beside, train_again

_DIFFERENT = 1
_PLACE = ("event", "optimizer_step", "epoch")
_ENGINE = ("train/", "optim/", "perf/", "digest/", "test/", "eval")
_MAX_NAMES = 20


def main(argv: Sequence[str]) -> int:
    """The run is trained again with the callbacks of a file, which log with `trainer.log`.

    Their rows are equal to those that they would have logged in the run, and go to `probe.jsonl` in
    the folder `--to`. The run's own folder is only read, and its rows and digests are compared on
    the way. The stretches between the checkpoints are stored one by one: after Ctrl-C or a kill,
    the same command continues.

    Returns 0, or 1 if a row or a digest differs from the run's.
    """
    options = _options(argv)
    if not options.callbacks.is_file():
        fix = "give the path of a Python file"
        raise ConfigError("CALLBACKS", f"{options.callbacks} is not a file: {fix}")
    run = read_run(options.run)
    with reading(options.run):
        found = train_again(
            Replay.of(run, options.recipe),
            callbacks=[options.callbacks],
            every=options.every,
            folder=options.to or folder_beside(run, options.callbacks.stem),
            first=options.first,
            last=options.until,
            jobs=options.jobs,
            keep=options.keep,
            say=say_unless(options.json),
        )
        names = _names(run, found.rows)
        if not names:
            fact = f"{options.callbacks} has logged nothing that {run.folder} does not have"
            raise ConfigError("CALLBACKS", f"{fact}: call trainer.log in on_step_end, with a name")
        path = found.folder / "probe.jsonl"
        rows = [
            {name: row[name] for name in (*_PLACE, *names) if name in row}
            for row in found.rows
            if any(name in row for name in names)
        ]
    with writes_to(found.folder):
        filesystem.write_file_atomic(
            path, b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        )
    if options.json:
        facts = {"file": str(path), "num_rows": len(rows), "names": names}
        tell_json({**facts, "num_steps": found.num_steps, "proof": vars(found.proof)})
    else:
        tell(format_table(*_summary(names, rows)))
        show(str(found.proof))
        show(f"{counted(len(rows), 'row')}: {path}")
    return _DIFFERENT if found.proof.first_difference else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_run()
    parser.add_argument("callbacks", type=Path, help="a Python file with callbacks")
    parser.add_number(
        "--every",
        "log a row every N steps; default: as often as the run, whose rows are means since the "
        "previous row",
        lowest=1,
    )
    parser.add_argument(
        "--from", type=int, dest="first", metavar="STEP", help="the first step; default: 1"
    )
    parser.add_number("--until", "the last step; default: the end of the run", metavar="STEP")
    parser.add_path("--to", "FOLDER", "the folder for the rows; default: RUN-CALLBACKS")
    add_job_options(parser)
    parser.add_recipe_option()
    parser.add_json_option()
    return parser.parse_args(argv)


def _names(run: RunReader, rows: Iterable[Row]) -> list[str]:
    """Return the names that only the callbacks have logged, in the order of their first row."""
    known = {*run.metric_names(), *run.logged, *_PLACE}
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name not in known and not name.startswith(_ENGINE)]


def _summary(names: Sequence[str], rows: Sequence[Row]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the heads and the lines of a table of the numbers."""
    lines = []
    for name in names:
        values = [float(row[name]) for row in rows if isinstance(row.get(name), float | int | str)]
        if values:
            shown = (values[0], values[-1], min(values), max(values))
            lines.append([name, *(f"{value:.4g}" for value in shown)])
    if len(lines) > _MAX_NAMES:
        rest = len(lines) - _MAX_NAMES
        lines = [*lines[:_MAX_NAMES], [f"and {rest} more", "", "", "", ""]]
    return ("name", "first", "last", "lowest", "highest"), lines
