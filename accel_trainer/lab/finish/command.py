"""`accel-trainer finish RUN --at STEP`: decay the learning rate from any step, to finish a model.

A trunk is a run with `--schedule.shape trunk`: its learning rate is constant after the warmup. For
each STEP, a branch continues the trunk from there in a folder beside it, while its learning rate
decays. The weights, their average and the optimizer state are bit-identical to a run that was
started with this `--schedule.decay-at` and `--steps`. If the trunk has no checkpoint of STEP, the
steps since the previous one are retrained. The trunk may still be training. After Ctrl-C, the same
command continues. At the end, a table lists all branches of the trunk with their results,
followed by the command that draws them in one chart.

example: accel-trainer finish runs/trunk --at 6 --over 50%
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from accel_trainer import ExitCode
from accel_trainer.commands import (
    CommandParser,
    JsonObject,
    RunReader,
    Say,
    counted,
    format_duration,
    format_number,
    format_table,
    read_run,
    reading,
    say_unless,
    tell,
    tell_json,
)

from ..replay.replay import Replay, note_changes
from .ending import Ending, check_trunk, endings_of

_LENGTH = re.compile(r"(?P<percent>\d+(?:\.\d+)?)%|(?P<steps>\d+) ?(?:steps?)?")


def main(argv: Sequence[str]) -> int:
    """Train the branches that are missing, and print the table; without `--at`, print it only.

    If the training of a branch fails, the exit code is that of its recipe.
    """
    options = _options(argv)
    trunk = read_run(options.run)
    with reading(options.run):
        check_trunk(trunk)
        endings = [Ending(trunk, at, at + options.over(at)) for at in options.at]
        for each in endings:
            each.check()
        _train(trunk, endings, options.recipe, say_unless(options.json))
        rows = [_row(each) for each in endings_of(trunk)]
    if options.json:
        tell_json(rows)
    elif rows:
        tell(_table(rows))
        folder = shlex.quote(str(trunk.folder))
        tell(f"next: accel-trainer report {folder} {folder}-finish-* --open")
    else:
        tell(f"{trunk.folder} has no endings yet: give --at STEP")
    return ExitCode.DONE


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_run()
    at_help = "the steps after which to decay, one branch each"
    parser.add_argument("--at", type=int, nargs="+", default=[], metavar="STEP", help=at_help)
    over_help = "length of the decay: 600 steps, or a fraction of STEP; default: 10%%"
    parser.add_argument("--over", type=_length, default="10%", metavar="LENGTH", help=over_help)
    parser.add_recipe_option()
    parser.add_json_option()
    return parser.parse_args(argv)


def _length(text: str) -> Callable[[int], int]:
    """Return a function from the step at which a decay begins to its length, as `text` asks."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None or not float(found["percent"] or found["steps"]):
        fix = "give one or more steps, such as 600, or a fraction of STEP, such as 10%"
        raise argparse.ArgumentTypeError(f"it is {text}; {fix}")
    if found["steps"]:
        return lambda at: int(found["steps"])
    return lambda at: max(1, round(at * float(found["percent"]) / 100))


def _train(trunk: RunReader, endings: Sequence[Ending], recipe: Path | None, say: Say) -> None:
    """Train the endings that are not done."""
    missing = []
    for each in endings:
        if each.is_begun:
            each.check_origin()
        if each.is_done:
            say(f"{each.folder.name}: finished before")
        else:
            missing.append(each)
    if not missing:
        return
    replay = Replay.of(trunk, recipe)
    note_changes(trunk)
    for each in missing:
        if each.is_begun:
            say(f"{each.folder.name}: continuing")
        else:
            say(_intention(each, replay))
            if (proof := each.begin(replay)) is not None:
                say(str(proof))
        each.train(replay)


def _intention(ending: Ending, replay: Replay) -> str:
    """Return what is trained for an ending, and how long it takes."""
    num_steps = ending.end - ending.at
    again = ending.at - replay.begin_after(ending.at)
    rebuilt = f", and {again} before them again to rebuild step {ending.at}" * bool(again)
    clock = ending.trunk.training_clock
    seconds = clock[1][-1] / clock[0][-1] * (num_steps + again) if clock else 0
    time = f", about {format_duration(seconds)} without evaluations" * (seconds >= 1)
    return f"{ending.folder.name}: training {counted(num_steps, 'step')}{rebuilt}{time}"


def _row(ending: Ending) -> JsonObject:
    """Return where an ending begins and ends, and the metric of its last evaluation."""
    run = read_run(ending.folder)
    metric = run.headline()
    steps, values = run.series(metric) if metric is not None else ([], [])
    is_evaluated = bool(steps) and steps[-1] == ending.end
    return {
        "run": str(ending.folder),
        "at": ending.at,
        "steps": ending.end,
        "state": run.state,
        "metric": metric if is_evaluated else None,
        "value": values[-1] if is_evaluated else None,
    }


def _table(rows: Sequence[JsonObject]) -> str:
    cells = [
        [
            Path(row["run"]).name,
            f"{row['at']:,}",
            f"{row['steps']:,}",
            row["state"],
            row["metric"] or "",
            "" if row["metric"] is None else format_number(row["metric"], row["value"]),
        ]
        for row in rows
    ]
    return format_table(("run", "decays from", "steps", "state", "metric", "last"), cells)
