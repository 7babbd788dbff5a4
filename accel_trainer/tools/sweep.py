"""`accel-trainer sweep RECIPE.py --seed 0 1 2 [flags]`: a run for each value; mean and spread of the results."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .. import storage
from ..config import config_to_dict, diff_config
from ..errors import ConfigError, ExitCode, OutputError
from ..run_folder import prepare_directory, writes_to
from .launch import signals_handed_on
from .parser import CommandParser
from .plan import find_config_class
from .processes import Place, divide_machine, start_recipe
from .run_reader import RunReader, read_run
from .tables import format_number, print_table
from .trials import Trial, plan_trials

_EXAMPLE = "example: accel-trainer sweep recipes/cifar.py --dataset digits --seed 0 1 2 --lr 0.05 0.1"
_FAILED = 1
_SIGNAL_CHECK_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not trained yet, and print the table. Start it again to go on."""
    argv = list(sys.argv[1:] if argv is None else argv)
    recipe = Path(argv.pop(0)) if argv and not argv[0].startswith("-") else None
    parser = CommandParser(
        prog="accel-trainer sweep RECIPE.py",
        description=f"{__doc__} A flag that takes one value and is given several is swept, all combinations.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("--values", type=Path, help="a YAML file: a list of values for each name to sweep")
    parser.add_argument("--output-dir", type=Path, help="the sweep's folder; default: runs/sweep-RECIPE")
    parser.add_argument("--num-processes", type=int, default=1, help="processes of each run; default: 1")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each on its share; default: 1")
    options, flags = parser.parse_known_args(argv)
    if options.at_once < 1:
        raise ConfigError("SWEEP", f"--at-once is {options.at_once}: set it to 1 or more")
    if recipe is None:
        raise ConfigError("SWEEP", f"name the recipe first; {_EXAMPLE}")
    folder = (options.output_dir or Path("runs") / f"sweep-{recipe.stem}").resolve()
    trials = plan_trials(find_config_class(recipe), flags, values=options.values, folder=folder)
    prepare_directory(folder)
    codes = _train(recipe, trials, num_processes=options.num_processes, at_once=options.at_once)
    if ExitCode.PREEMPTED in codes:
        _say("stopped by a signal: start the same command again to go on")
    runs = [run for trial in trials if (run := _finished_run(trial)) is not None]
    rows = summarize(trials, runs)
    with writes_to(folder):
        storage.write_file_atomic(folder / "sweep.json", json.dumps(rows, indent=1).encode())
    _show(rows)
    if ExitCode.PREEMPTED in codes:
        return ExitCode.PREEMPTED
    return _FAILED if any(codes) else ExitCode.DONE


def _train(recipe: Path, trials: Sequence[Trial], *, num_processes: int, at_once: int) -> list[int]:
    """Train the runs that are not finished; return the exit code of each. None starts after a signal."""
    places: SimpleQueue[Place] = SimpleQueue()
    for place in divide_machine(at_once):
        places.put(place)

    def train(number: int, trial: Trial) -> int:
        where = f"[{number}/{len(trials)}] {trial.folder.name}"
        if received:
            return ExitCode.PREEMPTED
        if _finished_run(trial) is not None:
            _say(f"{where}: finished before")
            return ExitCode.DONE
        log = trial.folder.with_name(f"{trial.folder.name}.log")
        _say(f"{where}: training, its lines are in {log}")
        place = places.get()
        if place.cores:
            os.sched_setaffinity(0, place.cores)  # of this thread alone, and of what it starts
        command = [str(recipe), *trial.flags]
        try:
            with (
                log.open("wb") as output,
                start_recipe(command, num_processes=num_processes, variables=place.variables, output=output) as process,
            ):
                if received:  # while it was started, and so not handed on
                    process.terminate()
                code = process.wait()
        finally:
            places.put(place)
        if received:
            return ExitCode.PREEMPTED
        if code:
            _say(f"{where}: exit code {code}")
        return code

    with signals_handed_on() as received, ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(train, number, trial) for number, trial in enumerate(trials, 1)]
        while wait(futures, timeout=_SIGNAL_CHECK_S).not_done:
            pass  # a signal that comes as a wait for a lock begins is handled after it alone (Python 3.11)
        return [future.result() for future in futures]


def _say(line: str) -> None:
    """Print a line at one go: those of several threads do not mix."""
    print(f"{line}\n", end="", flush=True)


def _finished_run(trial: Trial) -> RunReader | None:
    """Return the run if it is done and was made with the config that is asked for now."""
    try:
        run = read_run(trial.folder)
    except OutputError:
        return None
    changes = diff_config(run.config, config_to_dict(trial.config))
    # Where it lies, and its global batch, which a run fills in, do not matter.
    is_same = all(name.startswith("run.") or name == "batch.global_batch_size" for name, _, _ in changes)
    return run if is_same and run.result.get("state") == "done" else None


def summarize(trials: Sequence[Trial], runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Return a row for each combination but for its seed: the metric that its runs are judged by, at best and at last.

    `best` and `last` are the values of its runs; the spread is the sample standard deviation, None for one run.
    """
    by_folder = {run.folder: run for run in runs}
    groups: dict[tuple[tuple[str, str], ...], list[RunReader]] = {}
    for trial in trials:
        if trial.folder in by_folder:
            key = tuple((choice.name, choice.value) for choice in trial.choices if choice.name != "seed")
            groups.setdefault(key, []).append(by_folder[trial.folder])
    rows = []
    for key, members in groups.items():
        metric = members[0].headline()
        if metric is not None:
            best = [float(run.best_evaluation()[metric]) for run in members]
            last = [float(run.result["metrics"][metric]) for run in members]
            rows.append(
                {
                    "values": dict(key), "metric": metric, "is_lower_better": members[0].is_lower_better(metric),
                    "runs": [run.name for run in members], "best": _statistics(best), "last": _statistics(last),
                }
            )  # fmt: skip
    return rows


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.fmean(values), "spread": spread}


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        print("no run has finished with an evaluation")
        return
    names = list(rows[0]["values"])
    ranked = sorted(rows, key=lambda row: row["best"]["mean"] * (1 if row["is_lower_better"] else -1))
    cells = [
        [
            *row["values"].values(),
            str(len(row["runs"])),
            row["metric"],
            _spread(row, "best"),
            _spread(row, "last"),
        ]
        for row in rows
    ]
    is_marked = [len(rows) > 1 and row is ranked[0] for row in rows]
    print_table([*names, "n", "metric", "best", "last"], cells, is_marked=is_marked)


def _spread(row: Mapping[str, Any], kind: str) -> str:
    """Return mean and spread as `97.87% +- 0.12%`."""
    numbers = [value for value in (row[kind]["mean"], row[kind]["spread"]) if value is not None]
    return " +- ".join(format_number(row["metric"], value) for value in numbers)
