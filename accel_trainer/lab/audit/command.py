"""`accel-trainer audit RUN`: check that a run happened as it was recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence

from accel_trainer.commands import (
    CommandParser,
    format_table,
    read_run,
    reading,
    say_unless,
    tell,
)

from ..replay.replay import replay_folder

_EXAMPLE = "example: accel-trainer audit runs/first --segments 1"
_DIFFERENT = 1


def main(argv: Sequence[str]) -> int:
    """Compare the files of a run with each other, then train stretches of it again.

    The stretches lie between checkpoints, and are drawn from `--seed`: their rows, digests and the
    checkpoints at their ends are compared. Nothing in the run's folder changes, and no program in
    it is run.

    Returns 0 if nothing differs, else 1, or 64 if the recipe first has to be named.
    """
    parser = CommandParser(__doc__, _EXAMPLE)
    parser.add_run()
    segments_help = "number of segments to retrain; 0 only compares files; default: 3"
    parser.add_number("--segments", segments_help, default=3, lowest=0)
    parser.add_argument("--seed", type=int, default=0, help="selects the segments; default: 0")
    parser.add_number("--max-steps", "retrain at most N steps of each segment", lowest=1)
    parser.add_recipe_option()
    parser.add_path("--keep", "FOLDER", "keep the retrained segments in this new folder")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    options = parser.parse_args(argv)

    from .audit import audit  # imports torch

    with reading(options.run), replay_folder(options.keep) as folder:
        verdicts, refused = audit(
            read_run(options.run),
            options.recipe,
            count=options.segments,
            seed=options.seed,
            max_steps=options.max_steps,
            folder=folder.resolve(),
            say=say_unless(options.json),
        )
    if options.json:
        tell(json.dumps([each._asdict() for each in verdicts]))
    else:
        tell(format_table(("what", "verdict", "compared, or the first difference"), verdicts))
    if any(each.outcome == "DIFFERS" for each in verdicts):
        return _DIFFERENT
    if refused is not None:
        raise refused
    return 0
