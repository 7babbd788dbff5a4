"""`accel-trainer why RUN [RUN]`: find where and why two runs start to differ.

example: accel-trainer why runs/first runs/second
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from accel_trainer.commands import (
    CommandParser,
    reading,
    say_unless,
    tell_json,
)

_DIFFERENT = 1


def main(argv: Sequence[str]) -> int:
    """Compare the files of two runs, then train again the steps in which they begin to differ.

    The first step, part, operator and number that differ are named, and their cause by
    experiments. With one run: does it repeat itself? Nothing in the runs' folders changes.

    Returns 0 if they are equal, 1 if they differ.
    """
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="one or two run folders")
    parser.add_argument(
        "--recipe",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="the recipe to run, once for both runs or once for each; "
        "default: the one you started it with here",
    )
    parser.add_number("--until", "the last step to compare", lowest=1, metavar="STEP")
    parser.add_path("--keep", "FOLDER", "keep the replays in this new folder")
    parser.add_json_option("print the finding as JSON")
    options = parser.parse_args(argv)
    if len(options.run) > 2:
        parser.error(f"{len(options.run)} runs are given, but only two can be compared")

    from .why import why  # imports torch

    with reading(*options.run):
        found = why(
            *options.run,
            recipes=options.recipe,
            until=options.until,
            keep=options.keep,
            say=say_unless(options.json),
        )
    if options.json:
        tell_json(asdict(found))
    return 0 if found.is_equal else _DIFFERENT
