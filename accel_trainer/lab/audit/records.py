"""Compares the records of a run with each other: config, rows, result and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from accel_trainer import TrainerConfig, TrainState
from accel_trainer.commands import StoredCheckpoint, counted, filesystem, is_number

from ..rows import as_in_rows
from .evidence import Evidence, step_named
from .verdict import Found, judge

_INTERVALS = ("num_epochs", "num_steps", "log_every_n_steps", "evaluate_every")


def _check_config(evidence: Evidence) -> Found:
    """Compare config.yaml with the settings that the newest checkpoint was trained with."""
    if evidence.newest is None:
        return "not checked", "no checkpoint contains the settings"
    settings = evidence.settings_of(evidence.manifests[evidence.newest])
    if not settings:
        fact = f"{evidence.newest} is from an older version, and contains no settings"
        return "not checked", fact
    config = evidence.run.settings
    changed = [
        f"{name} is {config[name]}, but {evidence.newest} was trained with {value}"
        for name, value in settings.items()
        if name in config and config[name] != value
    ]
    compared = f"{len(settings)} settings of {evidence.newest}"
    return judge(next(iter(changed), None), compared=compared)


def _check_rows(evidence: Evidence) -> Found:
    """Compare the order of the rows with the steps after which the config logs and evaluates."""
    rows = evidence.rows
    problems = _find_disorder(evidence) if not has_changed(evidence) else _find_repeats(evidence)
    last = rows[-1]["optimizer_step"] if rows else 0
    return judge(next(problems, None), compared=f"{len(rows)} rows to step {last}")


def _find_repeats(evidence: Evidence) -> Iterator[str]:
    """Yield what is wrong with the order of rows, whatever the config."""
    step = 0
    seen = set()
    for number, row in enumerate(evidence.rows, start=1):
        place = f"row {number} ({row['event']}, step {row['optimizer_step']})"
        if row["optimizer_step"] < step:
            yield f"{place} comes after step {step}"
        step = row["optimizer_step"]
        if (row["event"], step) in seen:
            yield f"{place} occurs twice"
        seen.add((row["event"], step))


def _find_disorder(evidence: Evidence) -> Iterator[str]:
    """Yield what is wrong with the rows of a run whose config was never changed."""
    yield from _find_repeats(evidence)
    per_epoch = evidence.run.steps_per_epoch
    rows = evidence.rows
    if per_epoch is None:
        return
    stored = evidence.run.config.get("trainer") or {}
    config = TrainerConfig(**{name: stored[name] for name in _INTERVALS if name in stored})
    seen = {(row["event"], row["optimizer_step"]) for row in rows}
    for row in rows:
        if row["optimizer_step"] and row["epoch"] != -(-row["optimizer_step"] // per_epoch):
            step = row["optimizer_step"]
            yield f"the row {row['event']} of step {step} has epoch {row['epoch']}"
    last = rows[-1]["optimizer_step"] if rows else 0
    if evidence.newest is not None:
        last = max(last, step_named(evidence.newest))
    for step in range(1, last + 1):
        epoch, before = divmod(step - 1, per_epoch)
        position = TrainState(step, epoch, before + 1)
        is_logged = step % config.log_every_n_steps == 0 or before + 1 == per_epoch
        if is_logged and ("train", step) not in seen:
            yield f"there is no train row of step {step}"
        # A run that was killed may not have evaluated its last step.
        is_evaluated = step < last and config.evaluates_after(position, per_epoch)
        if is_evaluated and ("eval", step) not in seen:
            yield f"there is no eval row of step {step}"


def _check_ends_of_rows(evidence: Evidence) -> Found:
    """Compare the rows with the length that each checkpoint records of them."""
    path = evidence.run.folder / "metrics.jsonl"
    lines = filesystem.read_lines(path) if path.exists() else ()
    ends = {size: number for number, size in enumerate(accumulate(map(len, lines), initial=0))}
    compared = 0
    for name in evidence.manifests:
        state = evidence.load(name).pieces["trainer"]["callbacks"].get("MetricLogger")
        if state is None:
            continue
        compared += 1
        size = state["history_bytes"]
        if size not in ends:
            fact = f"at {name}, the rows had {size} bytes, but no row ends there"
            return "DIFFERS", f"{fact} now: rows before it were changed"
        before, after = evidence.rows[: ends[size]], evidence.rows[ends[size] :]
        step = step_named(name)
        if before and before[-1]["optimizer_step"] > step:
            return "DIFFERS", f"at {name}, there was a row of a later step"
        if after and after[0]["optimizer_step"] < step:
            return "DIFFERS", f"after {name}, there is a row of an earlier step"
    if not compared:
        return "not checked", "no checkpoint records their length"
    return "equal", f"their length at {counted(compared, 'checkpoint')}"


def _check_evaluations(evidence: Evidence) -> Found:
    """Compare the last evaluation that each checkpoint holds with its row."""
    compared = 0
    for name in evidence.manifests:
        stored = evidence.load(name).pieces["trainer"]
        row = evidence.evaluation_until(stored["evaluated_step"] or 0)
        if difference := _differing(stored["metrics"], row, "its row"):
            return "DIFFERS", f"{name}: {difference}"
        compared += bool(row)
    if not compared:
        return "not checked", "no checkpoint is from after an evaluation"
    return "equal", f"the numbers in {counted(compared, 'checkpoint')} and their rows"


def _check_best(evidence: Evidence) -> Found:
    best = evidence.best
    if best is None:
        return "not checked", "there is none"
    difference = _find_better(evidence, best)
    return judge(difference, compared=f"the evaluation of {best.get('name')}")


def _check_result(evidence: Evidence) -> Found:
    """Compare result.json with the last evaluation and the best one."""
    result = evidence.run.result
    if not result:
        return "not checked", "there is none: the run has not ended"
    if not evidence.is_result_current:
        return "not checked", "it is from an earlier end: the run was continued"
    step = result["optimizer_step"]
    row = {**evidence.evaluation_until(step)}
    for each in evidence.rows:
        if (each["event"], each["optimizer_step"]) == ("test", step):
            row |= each
    metrics = result.get("metrics") or {}
    difference = _differing(metrics, row, f"the rows to step {step}")
    best = result.get("best")
    if difference is None and best is not None:
        difference = _find_better(evidence, best)
        kept = evidence.best
        if kept is not None and kept != best and best.get("name") in evidence.manifests:
            name = next(each for each in best | kept if best.get(each) != kept.get(each))
            values = best.get(name), kept.get(name)
            difference = f"the {name} of its best is {{}}, but {{}} in best.json".format(*values)
    return judge(difference, compared=f"{len(metrics)} numbers and the best, to step {step}")


def _find_better(evidence: Evidence, best: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the record of the best evaluation."""
    name, metric = str(best.get("name")), str(best.get("metric"))
    value = best.get("value")
    if StoredCheckpoint.of(Path(name)) is None:
        return f"it refers to {name[:40]!r}, which is not a checkpoint"
    values = {
        row["optimizer_step"]: row[metric]
        for row in evidence.rows
        if row["event"] == "eval" and is_number(row.get(metric))
    }
    step = step_named(name)
    if value is None or values.get(step) != value:
        return f"{metric} of {name} is {value}, but {values.get(step)} in its row"
    sign = -1 if best.get("mode") == "min" else 1
    better = [each for each in values if sign * values[each] > sign * values[step]]
    if better and not has_changed(evidence):
        return f"{metric} is better at step {better[0]} ({values[better[0]]}) than at {name}"
    return None


def _differing(metrics: Mapping[str, Any], row: Mapping[str, Any], where: str) -> str | None:
    """Return the first number that is not the one in a row."""
    for name, value in metrics.items():
        if is_number(value) and as_in_rows(value) != row.get(name):
            return f"{name} is {value}, but {row.get(name)} in {where}"
    return None


def has_changed(evidence: Evidence) -> bool:
    """Whether settings or data were changed on purpose as the run went on."""
    allowed = evidence.run.settings.get("run.allow_change")
    settings = [manifest.get("settings") for manifest in evidence.manifests.values()]
    return bool(allowed) or any(each != settings[0] for each in settings)


CHECKS: Mapping[str, Callable[[Evidence], Found]] = {
    "config.yaml": _check_config,
    "metrics.jsonl": _check_rows,
    "rows at checkpoints": _check_ends_of_rows,
    "evaluations": _check_evaluations,
    "best.json": _check_best,
    "result.json": _check_result,
}
"""The checks of the records, by what they are about; nothing is trained."""
