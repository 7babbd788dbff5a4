"""`accel-trainer sweep RECIPE.py --seed 0 1 2 [flags]`: train and compare all combinations.

It prints the mean and spread over the seeds for each combination. With `--print`, it trains nothing
and prints one command per line for `xargs` or a job array; afterwards, the same sweep without
`--print` prints the table.

example: accel-trainer sweep recipes/cifar.py --dataset digits --seed 0 1 2 --lr 0.05 0.1
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...core import filesystem
from ...core.config import config_to_dict, diff_config
from ...core.errors import ExitCode, OutputError
from ...core.filesystem import writes_to
from ...core.json_files import parse_json
from ...core.run_dir import prepare_directory
from ...run.config import with_defaults
from ...vision.rules import open_settings
from ..common.output import JsonObject, format_number, format_table, tell
from ..common.parser import CommandParser
from ..common.processes import command_of, forward_signals, start_recipe
from ..common.recipes import find_config_class
from ..recipe.start import Start
from ..runs.run_reader import RunReader, Runs, read_run
from .trials import Trial, plan_trials

_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Train the runs that are not finished and print the table.

    Run the same command again to continue.
    """
    swept = "A flag that takes one value and is given several is swept, in all combinations."
    parser = CommandParser(__doc__)
    parser.description = f"{parser.description} {swept}"
    parser.add_path("--output-dir", "DIR", "the folder of the sweep; default: runs/sweep-RECIPE")
    parser.add_number("--num-processes", "processes per run; default: 1", default=1, lowest=1)
    parser.add_switch(
        "--print", "only print the command of each unfinished run, for xargs or a job array"
    )
    options, recipe, flags = parser.require_recipe(argv)
    wanted = options.output_dir or Path("runs") / f"sweep-{recipe.stem}"
    folder = Path(os.path.realpath(wanted))
    trials = plan_trials(find_config_class(recipe), flags, folder=folder)
    if options.print:
        _print_commands(recipe, trials, num_processes=options.num_processes)
        return ExitCode.DONE
    prepare_directory(folder)
    _refuse_other_table(folder / "sweep.json")
    codes = _train(recipe, trials, num_processes=options.num_processes)
    if ExitCode.PREEMPTED in codes:
        tell("stopped by a signal: run the same command again to continue")
    runs = [run for trial in trials if (run := _finished_run(trial)) is not None]
    rows = summarize(trials, runs)
    with writes_to(folder):
        filesystem.write_file_atomic(folder / "sweep.json", json.dumps(rows, indent=1).encode())
    _show(rows)
    if ExitCode.PREEMPTED in codes:
        return ExitCode.PREEMPTED
    return _FAILED if any(codes) or len(runs) < len(trials) else ExitCode.DONE


def _print_commands(recipe: Path, trials: Sequence[Trial], *, num_processes: int) -> None:
    """Print a line for each run that is not finished; its words are quoted for a shell."""
    for trial in trials:
        if _finished_run(trial) is None:
            start = Start(
                recipe=str(recipe.resolve()), flags=trial.flags, num_processes=num_processes
            )
            tell(shlex.join(command_of(start, os.environ)))


def _train(recipe: Path, trials: Sequence[Trial], *, num_processes: int) -> list[int]:
    """Train the runs that are not finished, until a signal arrives; return their exit codes."""
    codes: list[int] = []
    with forward_signals() as received:
        for number, trial in enumerate(trials, 1):
            where = f"[{number}/{len(trials)}] {trial.folder.name}"
            if _finished_run(trial) is not None:
                tell(f"{where}: finished before", flush=True)
                continue
            log = trial.folder.with_name(f"{trial.folder.name}.log")
            tell(f"{where}: training, its output is in {log}", flush=True)
            start = Start(recipe=str(recipe), flags=trial.flags, num_processes=num_processes)
            with writes_to(log):  # which may be a link, or a pipe that would make it wait
                output = filesystem.open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with open(output, "ab") as file, start_recipe(start, output=file) as process:
                if received:  # perhaps before the process existed, so it was not forwarded
                    process.terminate()
                code = process.wait()
            if received:
                return [*codes, ExitCode.PREEMPTED]
            if code:
                tell(f"{where}: exit code {code}", flush=True)
            codes.append(code)
    return codes


def _refuse_other_table(path: Path) -> None:
    """Raise OutputError if the table of a sweep would replace a file of something else."""
    if not os.path.lexists(path):
        return
    with suppress(OSError, ValueError, TypeError):
        if all("values" in row for row in parse_json(filesystem.read_file(path, max_bytes=2**26))):
            return
    fact = f"{path} would be overwritten, and was not written by a sweep"
    raise OutputError("SWEEP", f"{fact}: move it away, or choose a different --output-dir")


def _finished_run(trial: Trial) -> RunReader | None:
    """Return the run if it is finished and has the config of this trial."""
    try:
        run = read_run(trial.folder)
    except OutputError:
        return None
    # A run fills in the settings that are left open.
    filled_in = open_settings(trial.config)
    if trial.config.batch.global_batch_size is None:
        filled_in.add("batch.global_batch_size")
    changes = [
        name
        for name, _, _ in diff_config(run.config, config_to_dict(with_defaults(trial.config)))
        if not name.startswith("run.") and name not in filled_in
    ]
    return run if not changes and run.result.get("state") == "done" else None


def summarize(trials: Sequence[Trial], runs: Runs) -> list[JsonObject]:
    """Return a row per combination: the best and the last headline metric over its seeds.

    The spread is the sample standard deviation, None for a single run.
    """
    by_folder = {run.folder: run for run in runs}
    groups: dict[tuple[tuple[str, str], ...], list[RunReader]] = {}
    for trial in trials:
        if trial.folder in by_folder:
            others = [each for each in trial.choices if each.name != "seed"]
            key = tuple((each.name, each.value) for each in others)
            groups.setdefault(key, []).append(by_folder[trial.folder])
    rows = []
    for key, members in groups.items():
        metric = members[0].headline()
        if metric is not None:
            best = [float(run.best_evaluation()[metric]) for run in members]
            last = [float(run.result["metrics"][metric]) for run in members]
            rows.append(
                {
                    "values": dict(key),
                    "metric": metric,
                    "is_lower_better": members[0].is_lower_better(metric),
                    "runs": [run.name for run in members],
                    "best": _statistics(best),
                    "last": _statistics(last),
                }
            )
    return rows


def _statistics(values: Sequence[float]) -> JsonObject:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.fmean(values), "spread": spread}


def _show(rows: Sequence[JsonObject]) -> None:
    if not rows:
        tell("no run has finished with an evaluation")
        return
    names = list(rows[0]["values"])
    ranked = sorted(
        rows, key=lambda row: row["best"]["mean"] * (1 if row["is_lower_better"] else -1)
    )
    cells = [
        [
            "*" if len(rows) > 1 and row is ranked[0] else " ",
            *row["values"].values(),
            str(len(row["runs"])),
            row["metric"],
            _spread(row, "best"),
            _spread(row, "last"),
        ]
        for row in rows
    ]
    tell(format_table([" ", *names, "n", "metric", "best", "last"], cells))


def _spread(row: JsonObject, kind: str) -> str:
    """Return mean and spread as `97.87% +- 0.12%`, without a spread only the mean."""
    numbers = [row[kind]["mean"]]
    if row[kind]["spread"] is not None:
        numbers.append(row[kind]["spread"])
    return " +- ".join(format_number(row["metric"], value) for value in numbers)
