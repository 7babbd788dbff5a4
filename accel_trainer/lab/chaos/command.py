"""`accel-trainer chaos RECIPE [-- its flags]`: crash-test a recipe: kill it, resume it, compare.

It trains a few dozen steps of the recipe in a temporary folder, without interruption. It then
repeats them with faults, restarting each run until it is done: SIGKILL at any moment and in the
middle of a disk write, SIGTERM, a full disk, a damaged checkpoint, and different numbers of data
workers and processes. All runs must end with the same tensors, optimizer state, rows and export. If
one does not, the shortest plan of faults that makes it differ is found, and the first difference is
reported. The exit code is 1 if a run differs, or the recipe's own if it fails without any fault.

With `--script`, it tests any training program: two runs without interruption must end with the same
files; each further run is killed and resumed twice, alternately right after a checkpoint and at
random moments. Files are compared without unpickling. `{out}` stands for a new output folder, and
in `--resume`, `{newest}` stands for the newest checkpoint.

example: accel-trainer chaos recipes/minimal.py --runs 2
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from accel_trainer import ConfigError, ExitCode
from accel_trainer.commands import (
    CommandParser,
    JsonObject,
    available_cpus,
    checkpoints_in,
    counted,
    format_duration,
    say_unless,
    stops_noted,
    tell,
    tell_json,
    uses_cpu,
)

from ..kept import kept_folder
from .campaign import Undisturbed, Verdict, judge, run_undisturbed, shrink, try_plans
from .faults import Plan, draw_plans, parse_plan, show_plan
from .runs import Ending, said_by
from .script_command import crash_test
from .start import Recipe

_OF_RECIPES = {"steps": 24, "num_processes": 1, "faults": None}
_OF_SCRIPTS = {"resume": None, "saves": None, "compare": None}
_DIFFERENT = 1
_MIN_STEPS = 8
_START_S = 4.0  # of a small recipe
_NOT_TESTED = (
    "not tested: a disk that is really full (only writes to the run's own folder fail), and a "
    "power loss"
)


def main(argv: Sequence[str]) -> int:
    """Run the campaign; return 0 if the recipe survives, else 1, or the recipe's own exit code."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    options = _parser().parse_args(own)
    options.flags = argv[len(own) + 1 :]
    _check(options)
    plan = None if options.faults is None else parse_plan(options.faults)
    with kept_folder(options.keep) as folder, stops_noted() as stops:
        if options.script is not None:
            return crash_test(options, folder, stops)
        recipe = Recipe(
            path=str(options.recipe),
            flags=options.flags,
            num_steps=options.steps,
            num_processes=options.num_processes,
            folder=folder,
            at_once=max(1, available_cpus() // options.num_processes) if uses_cpu() else 1,
            stops=stops,
        )
        return _campaign(recipe, plan, options)


def _parser() -> CommandParser:
    parser = CommandParser(__doc__)
    recipe_help = "the recipe; its flags come after --"
    parser.add_argument("recipe", type=Path, nargs="?", help=recipe_help)
    add = parser.add_argument
    parser.add_number("--runs", "number of runs with faults; default: 4", default=4, lowest=1)
    parser.add_number("--steps", "steps per run; default: 24", default=24, lowest=_MIN_STEPS)
    add("--seed", type=int, default=0, help="selects the faults; default: 0")
    add("--faults", metavar="PLAN", help="one run with these faults, such as 'kill@7 term@12'")
    parser.add_number("--num-processes", "processes; default: 1", default=1, lowest=1)
    parser.add_json_option()
    parser.add_path("--keep", "FOLDER", "keep all runs in this new folder")
    add("--script", metavar="COMMAND", help="test this program: 'python train.py --to {out}'")
    add("--resume", metavar="ARGS", help="arguments that resume the script: '--from {newest}'")
    files = "files with tensors in {out}"
    saves_help = f"its checkpoints (files or folders): '{{out}}/step_*'; default: {files}"
    add("--saves", nargs="+", metavar="PATTERN", help=saves_help)
    compare_help = f"files that must be the same; default: {files}"
    add("--compare", nargs="+", metavar="PATTERN", help=compare_help)
    return parser


def _check(options: Namespace) -> None:
    """Raise ConfigError for options that cannot work."""
    if (options.recipe is None) == (options.script is None):
        raise ConfigError("CHAOS", "give either the path of a recipe, or a command with --script")
    is_script = options.script is not None
    others, where = (_OF_RECIPES, "a recipe") if is_script else (_OF_SCRIPTS, "--script")
    if useless := [name for name, default in others.items() if vars(options)[name] != default]:
        flag = f"--{useless[0].replace('_', '-')}"
        raise ConfigError("CHAOS", f"{flag} has no effect without {where}: leave it out")
    if options.recipe is not None and not options.recipe.is_file():
        raise ConfigError("RECIPE", f"{options.recipe} is not a file: give the path of your recipe")
    if options.recipe is not None and "exact_run(" in options.recipe.read_text(
        encoding="utf-8", errors="replace"
    ):
        command = f"--script 'python {options.recipe} ... {{out}}'"
        raise ConfigError("OWN_LOOP", f"{options.recipe} has a loop of its own: give {command}")
    if os.name != "posix":
        raise ConfigError("CHAOS", "Windows has no SIGKILL: use Linux or macOS")


def _campaign(recipe: Recipe, plan: Plan | None, options: Namespace) -> int:
    """Run the whole campaign, print its results, and return the exit code."""
    say = say_unless(options.json)
    say(_announcement(recipe, plan, options.runs))
    undisturbed = run_undisturbed(recipe)
    said = said_by(undisturbed.reference)
    if said:
        tell(said, file=sys.stderr)
    if code := _own_failure(recipe, undisturbed.reference):
        return code
    for name in sorted(undisturbed.left_out):
        say(f"note: {name} differs in each run, so it is not compared")
    verdicts = []
    for verdict in _verdicts(recipe, undisturbed, plan, options):
        verdicts.append(verdict)
        say(_line(verdict))
    failed = verdicts[-1] if verdicts[-1].has_failed else None
    if failed is not None and failed.ending.plan:
        say("looking for the shortest plan of faults that still fails")
        failed = shrink(failed, recipe, undisturbed)
    if options.json:
        tell_json(_as_json(recipe, undisturbed, verdicts, failed))
    elif failed is None:
        tell("\n".join(_survived(undisturbed, verdicts)))
    else:
        tell("\n".join(_failure(recipe, failed)))
    return ExitCode.DONE if failed is None else _DIFFERENT


def _announcement(recipe: Recipe, plan: Plan | None, num_runs: int) -> str:
    num_starts = 2 + (3 * num_runs if plan is None else len(plan) + 1)
    took = format_duration(_START_S * num_starts / recipe.at_once)
    processes = counted(recipe.num_processes, "process")
    return (
        f"chaos: {recipe.path}, {counted(recipe.num_steps, 'step')} on {processes}; "
        f"2 runs without faults, {num_runs if plan is None else 1} with, {recipe.at_once} at a "
        f"time: about {took} if it is small"
    )


def _line(verdict: Verdict) -> str:
    """Return one line about a run."""
    ending = verdict.ending
    line = f"{verdict.outcome:9} {show_plan(ending.plan) or 'no fault, in a new Python'}"
    if ending.refused:
        return f"{line}: {ending.refused}"
    if verdict.has_failed or len(ending.reached) == len(ending.plan):
        return line
    return f"{line} (it ended before {ending.plan[len(ending.reached)]})"


def _own_failure(recipe: Recipe, reference: Ending) -> int:
    """Return the exit code of a recipe that fails without any fault, else 0.

    Raises ConfigError if it does not end, or trains nothing that can be seen.
    """
    (code,) = reference.codes
    if code is None:
        raise ConfigError("CHAOS", f"{recipe.path} did not end: give fewer --steps")
    if code == 0 and not checkpoints_in(reference.run):
        fact = f"{recipe.path} does not train when it is run as a file"
        raise ConfigError("RECIPE", f"{fact}: call accel_trainer.main(train, Config) in it")
    return code if code >= 0 else 128 - code


def _verdicts(
    recipe: Recipe, undisturbed: Undisturbed, plan: Plan | None, options: Namespace
) -> Iterator[Verdict]:
    """Yield a verdict on the same again, and on each plan until one fails."""
    again = judge(undisturbed.again, undisturbed)
    yield again
    if again.has_failed:
        return
    plans = [plan] if plan is not None else _draw(recipe, undisturbed, options)
    on_others = [each for each in plans if any(fault.kind == "processes" for fault in each)]
    alone = replace(recipe, at_once=1)  # its starts on several processes need the cores
    for name, some, where in (
        ("run", [each for each in plans if each not in on_others], recipe),
        ("elsewhere", on_others, alone),
    ):
        for verdict in try_plans(where, undisturbed, some, name=name):
            yield verdict
            if verdict.has_failed:
                return


def _draw(recipe: Recipe, undisturbed: Undisturbed, options: Namespace) -> list[Plan]:
    num_devices = available_cpus() if uses_cpu() else torch.accelerator.device_count()
    other = 2 if recipe.num_processes == 1 else 1
    return draw_plans(
        options.runs,
        seed=options.seed,
        num_steps=undisturbed.num_steps,
        num_workers=0 if undisturbed.num_workers else 2,
        num_processes=other if other <= num_devices else None,
    )


# --- the last lines ---


def _survived(undisturbed: Undisturbed, verdicts: Sequence[Verdict]) -> Iterator[str]:
    num_faults = sum(len(each.ending.reached) for each in verdicts)
    equal = sum(each.outcome == "equal" for each in verdicts)
    yield (
        f"survived {counted(num_faults, 'fault')}: {counted(equal, 'run')} of "
        f"{counted(undisturbed.num_steps, 'step')} ended with the same tensors, optimizer state, "
        "rows and export"
    )
    if any(each.outcome == "resumed" for each in verdicts):
        yield (
            "on a different number of processes, the run continues but rounds differently: results "
            "can only be compared with --reduce exact"
        )
    yield _NOT_TESTED


def _failure(recipe: Recipe, failed: Verdict) -> Iterator[str]:
    """Yield the plan of a run that failed, what differs, and the command that repeats it."""
    plan = failed.ending.plan
    happened = "; ".join(fault.described for fault in plan) or "the same start, in a new Python"
    yield f"the shortest: {happened}"
    if failed.ending.problem:
        yield f"  it fails: {failed.ending.problem}"
    if difference := failed.difference:
        if difference.first:
            yield f"  first: {difference.first}"
        yield f"  in the end: {difference.where}"
        yield f"  cause: {difference.cause}"
    yield f"  again: {_command(recipe, plan)}"


def _command(recipe: Recipe, plan: Plan) -> str:
    words = ["accel-trainer", "chaos", recipe.path, "--steps", str(recipe.num_steps)]
    if recipe.num_processes > 1:
        words += ["--num-processes", str(recipe.num_processes)]
    words += ["--faults", show_plan(plan)]
    return shlex.join([*words, *(["--", *recipe.flags] if recipe.flags else [])])


def _as_json(
    recipe: Recipe,
    undisturbed: Undisturbed,
    verdicts: Sequence[Verdict],
    failed: Verdict | None,
) -> JsonObject:
    return {
        "recipe": recipe.path,
        "flags": list(recipe.flags),
        "num_processes": recipe.num_processes,
        "num_steps": undisturbed.num_steps,
        "survived": failed is None,
        "runs": [
            {
                "faults": show_plan(each.ending.plan),
                "exit_codes": each.ending.codes,
                "outcome": each.outcome,
            }
            for each in verdicts
        ],
        "failure": None
        if failed is None
        else {
            "faults": show_plan(failed.ending.plan),
            "problem": failed.ending.problem,
            "difference": None if failed.difference is None else asdict(failed.difference),
            "command": _command(recipe, failed.ending.plan),
        },
    }
