"""`accel-trainer bisect RUN --where CONDITION`: find the first step that meets a condition.

example: accel-trainer bisect runs/first --where 'train/loss > 0.1'
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_trainer.commands import (
    CommandParser,
    Row,
    Say,
    counted,
    last_step,
    read_rows,
    read_run,
    reading,
    say_unless,
    shortened,
    tell_json,
)

from ..kept import kept_folder
from .again import interval_of
from .at import check_step
from .condition import parse_condition
from .first_step import FirstStep, find_first_step, numbers_by_step
from .first_step import tell as tell_numbers
from .proof import Proof
from .replay import Replay
from .samples import samples_of, tell_samples
from .whole_run import add_job_options, folder_beside, has_state, train_again

_NOWHERE = 1
_DIFFERENT = 1
_MAX_SHOWN = 8


def main(argv: Sequence[str]) -> int:
    """CONDITION is about the columns of the run's rows, such as 'optim/grad_norm > 10'.

    It may join several with and, or, not and parentheses, and ask isnan(...) and isfinite(...). The
    rows are means over several steps: those before the first row in which the condition holds are
    trained again with a row for each step, and the step is trained once more to list its samples,
    ordered by their losses. Nothing in the run's folder changes.

    Returns 0 if there is such a step, and 1 if there is none or the run could not be repeated.
    """
    options = _options(argv)
    run = read_run(options.run)
    say = say_unless(options.json)
    with reading(options.run), kept_folder(options.keep) as folder:
        replay = Replay.of(run, options.recipe)
        found = _find(replay, options, folder, say)
        if found is None:
            if options.json:
                tell_json({"where": options.where, "step": None})
            return _NOWHERE
        samples, proof = samples_of(replay, found.step, folder / "samples", until=found.row)
        proof = found.proof + proof
        say(tell_samples(samples))
        say(str(proof))
    if options.json:
        facts = {"where": options.where, **vars(found), "proof": vars(proof)}
        tell_json({**facts, "samples": samples})
    return _DIFFERENT if proof.first_difference else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_run()
    parser.add_argument(
        "--where",
        required=True,
        metavar="CONDITION",
        help="an expression over the columns of the run's rows",
    )
    probe_help = "callbacks that log columns for CONDITION; retrains the whole run"
    parser.add_path("--probe", "FILE", probe_help)
    parser.add_switch("--every-step", "check a row for every step; retrains the whole run")
    to_help = "the folder for the rows of the whole run; default: RUN-FILE, or RUN-steps"
    parser.add_path("--to", "FOLDER", to_help)
    add_job_options(parser)
    parser.add_recipe_option()
    parser.add_json_option()
    return parser.parse_args(argv)


def _find(replay: Replay, options: argparse.Namespace, folder: Path, say: Say) -> FirstStep | None:
    """Return the first step for which the condition holds, after telling how it was found."""
    # A branch's rows start with those of the run it branched off from.
    rows: Sequence[Row] = read_rows(replay.run.folder, after=replay.begin or -1)
    if not rows:
        check_step(replay.run, last_step(replay.run))
    callbacks = [] if options.probe is None else [options.probe]
    proof = Proof()
    is_every_step = options.every_step or interval_of(replay) == 1
    if callbacks or options.every_step:
        parse_condition(options.where, None)  # before any work
        name = "steps" if options.probe is None else options.probe.stem
        retrained = train_again(
            replay,
            callbacks=callbacks,
            every=1 if options.every_step else None,
            folder=options.to or folder_beside(replay.run, name),
            jobs=options.jobs,
            keep=folder / "run",
            say=say,
        )
        rows, proof = retrained.rows, retrained.proof
    columns = {name for numbers in numbers_by_step(rows).values() for name in numbers}
    condition = parse_condition(options.where, columns)
    found = find_first_step(
        replay,
        condition,
        rows,
        callbacks=[path.resolve() for path in callbacks],
        from_start=any([has_state(path) for path in callbacks]),
        folder=folder / "steps",
        say=say,
    )
    if found is None:
        means = ", which are means over several steps; --every-step checks each step"
        averaged = {name for row in rows if row["event"] in ("train", "log") for name in row}
        more = "" if is_every_step or not condition.names & averaged else means
        say(f"{options.where} holds in none of {counted(len(rows), 'row')}{more}")
        return None
    say(f"{options.where} holds first at step {found.step}: {tell_numbers(found.values)}")
    if found.later:
        later = [f"{step} ({tell_numbers(values)})" for step, values in found.later.items()]
        say(f"and up to step {found.row} at {shortened(later, most=_MAX_SHOWN)}")
    return replace(found, proof=proof + found.proof)
