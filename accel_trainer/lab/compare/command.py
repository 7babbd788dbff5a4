"""`accel-trainer compare RECIPE.py [its flags] --b FLAGS`: compare two settings over several seeds.

A is the recipe with its flags, and B adds the flags of `--b`. For each seed, the beginning of the
run is trained once, as A, up to `--at`; both arms then continue from that checkpoint. They are
compared by their last evaluation, with averaged weights if an arm has them. The number of steps is
printed before anything is trained. Finished runs are kept: with more pairs or a different B, the
same command trains only what is missing.

The exit code is 0 if B is better, 10 if it is worse, and 11 if it is undecided.

example: accel-trainer compare recipes/images.py --dataset photos --b '--ema 0.999'
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from accel_trainer import ConfigError
from accel_trainer.commands import (
    CommandParser,
    TrialFailed,
    prepare_directory,
    run_lock,
    say_unless,
    tell,
    tell_json,
)

from .question import At, Question

_CODES = {"better": 0, "worse": 10, "undecided": 11}


def main(argv: Sequence[str]) -> int:
    """Train the pairs and print which arm is better."""
    if argv and (Path(argv[0]) / "config.yaml").is_file():
        raise ConfigError(
            "COMPARE", f"{argv[0]} is a run, not a recipe; for two runs: accel-trainer report"
        )
    options, recipe, flags = _parser().require_recipe(_with_b_in_one_word(argv))
    question = Question.parse(
        recipe.resolve(), flags, options.b, num_processes=options.num_processes
    )
    output_dir = options.output_dir or Path("runs") / f"compare-{recipe.stem}"
    output_dir = Path(os.path.realpath(output_dir))
    try:
        is_optional = not question.a.config.run.lock
        lock = prepare_directory(output_dir) / "compare.lock"
        with run_lock(lock, is_optional=is_optional):
            return _answer(question, options, output_dir)
    except TrialFailed as failure:
        return failure.exit_code
    except KeyboardInterrupt:
        fact = f"stopped: finished runs are kept in {output_dir}; the same command continues"
        tell(fact, file=sys.stderr)
        raise


def _parser() -> CommandParser:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--b", metavar="FLAGS", required=True, help="the flags to add for B, in quotes")
    at_help = "where the arms part, rounded to the end of an epoch: 75%%, a step, or 0 for whole "
    add("--at", type=At.parse, default=At.parse("75%"), help=f"{at_help}runs; default: 75%%")
    parser.add_number("--pairs", "pairs (seeds); default: 8", default=8, lowest=2)
    parser.add_number("--jobs", "pairs at a time; default: 1", default=1, lowest=1)
    processes_help = "processes per run; default: 1"
    parser.add_number("--num-processes", processes_help, default=1, lowest=1)
    dir_help = "the folder for the runs; default: runs/compare-RECIPE"
    parser.add_path("--output-dir", "DIR", dir_help)
    parser.add_json_option()
    return parser


def _with_b_in_one_word(words: Sequence[str]) -> list[str]:
    """Return the words with `--b=FLAGS`: argparse would take flags after `--b` for its own."""
    if "--b" not in words[:-1]:
        return [*words]
    place = words.index("--b")
    return [*words[:place], f"--b={words[place + 1]}", *words[place + 2 :]]


def _answer(question: Question, options: Namespace, output_dir: Path) -> int:
    from .compare import compare, make_plan  # imports torch
    from .text import json_of, lines_of, setup_lines

    say = say_unless(options.json)
    plan = make_plan(question, options.at, options.pairs, output_dir, say=say)
    for line in setup_lines(plan):
        say(line)
    found = compare(plan, jobs=options.jobs, say=say)
    for line in lines_of(found):
        say(line)
    if options.json:
        tell_json(json_of(found))
    return _CODES[found.paired.verdict]
