"""Reads a run folder: config, logged rows, result and environment. Writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...checkpoint.format import list_checkpoints, read_manifest
from ...checkpoint.serialization import parse_json, read_json_object
from ...core.errors import CheckpointError, OutputError, UserError
from ...core.filesystem import read_lines
from ...run.plain_yaml import read_plain_yaml
from .status import read_status

_MAX_RECORD_BYTES = 1 << 26
_MAX_ROWS = 20_000
_GROUPS = (
    "augment",
    "batch",
    "model",
    "optimizer",
    "run",
    "runtime",
    "schedule",
    "task",
    "trainer",
)
_CONFIG = dict.fromkeys(_GROUPS, dict) | {"dataset": str, "seed": int}
_RESULT = {
    "state": str,
    "stop_reason": str,
    "optimizer_step": int,
    "epoch": int,
    "samples_seen": int,
    "metrics": dict,
    "best": dict,
    "samples_per_s": int | float,
    "wall_s": int | float,
    "peak_memory_bytes": int | float,
}


@dataclass(frozen=True)
class RunReader:
    """The contents of a run folder; parts that are not written yet are empty."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    environment: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def dataset(self) -> str:
        """The dataset's name, or that of its folder; empty if the recipe has no such setting."""
        return str(self.config.get("dataset") or "").rstrip("/").rpartition("/")[2]

    @cached_property
    def state(self) -> str:
        """`running`, `killed`, `done`, `failed` and so on."""
        try:
            return str(read_status(self.folder)["state"])
        except (OSError, ValueError):
            return str(self.result.get("state", "unknown"))

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the newest checkpoint that has a readable one; else empty."""
        for path in reversed(list_checkpoints(self.folder / "checkpoints")):
            with suppress(CheckpointError):
                return read_manifest(path)[1]
        return {}

    @property
    def data_fingerprint(self) -> str | None:
        """The SHA-256 of the training data, from the newest checkpoint."""
        return str(self.manifest.get("data_fingerprint") or "") or None

    @property
    def steps_per_epoch(self) -> int | None:
        """The optimizer steps of an epoch, None if the run has no checkpoint yet."""
        match self.manifest:
            case {"num_samples": [int(num_samples), *_], "global_batch_size": int(size)} if (
                size > 0
            ):
                drops_last = (self.config.get("batch") or {}).get("drop_last") is True
                return (num_samples // size if drops_last else -(-num_samples // size)) or None
        return None

    @property
    def origin(self) -> list[str]:
        """Where the initial weights came from, what is frozen, and what the task has beside its settings, in lines."""
        lines = self.manifest.get("origin")
        task = self.manifest.get("task_fingerprint")
        shown = [str(line) for line in lines] if isinstance(lines, list) else []
        return [*shown, *([f"task, such as the teacher's weights: sha256 {task}"] if task else [])]

    def training_clock(self) -> tuple[list[int], list[float]] | None:
        """Return steps, and the seconds of training until each: without evaluations, saves and pauses.

        None if the run has logged no speed.
        """
        samples, done = self.result.get("samples_seen"), self.result.get("optimizer_step")
        stored = (self.config.get("batch") or {}).get("global_batch_size")
        samples_per_step = samples / done if samples and done else stored
        if not isinstance(samples_per_step, int | float):
            return None
        steps, seconds = [0], [0.0]
        for step, samples_per_s in zip(*self.series("perf/samples_per_s"), strict=True):
            if step > steps[-1] and samples_per_s > 0:
                seconds.append(seconds[-1] + (step - steps[-1]) * samples_per_step / samples_per_s)
                steps.append(step)
        return (steps, seconds) if len(steps) > 1 else None

    @property
    def restarts(self) -> list[int]:
        """The steps from which the run was resumed, in order."""
        starts = [row["optimizer_step"] for row in self.attempts if row["event"] == "start"]
        return [step for step in starts if step]

    @cached_property
    def phase_s(self) -> dict[str, float]:
        """The seconds of each phase, over the attempts that ended cleanly."""
        phases = [row["phase_s"] for row in self.attempts if row["event"] == "end"]
        return {
            name: sum(phase.get(name, 0.0) for phase in phases)
            for phase in phases
            for name in phase
        }

    @property
    def num_killed(self) -> int:
        """How many attempts were killed; their time is not known."""
        starts = [number for number, row in enumerate(self.attempts) if row["event"] == "start"]
        return sum(self.attempts[after - 1]["event"] == "start" for after in starts[1:])

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the optimizer steps and the values of a metric, in the order in which they were measured."""
        found = [(row["optimizer_step"], float(row[name])) for row in self.rows if name in row]
        return [step for step, _ in found], [value for _, value in found]

    def metric_names(self) -> list[str]:
        """Return the names of all recorded numbers, each once."""
        ignored = {"event", "optimizer_step", "epoch"}
        return [
            name
            for name in dict.fromkeys(key for row in self.rows for key in row)
            if name not in ignored
        ]

    def evaluations(self) -> list[Mapping[str, Any]]:
        """Return the rows of evaluations."""
        return [row for row in self.rows if row["event"] == "eval"]

    def headline(self) -> str | None:
        """Return the metric to judge the run by: the one that chose its best, else an accuracy, else a loss."""
        best = self.result.get("best") or {}
        names = [name for row in self.evaluations() for name in row if name.startswith("eval")]
        candidates = [best.get("metric"), (self.config.get("trainer") or {}).get("monitor")]
        candidates += [
            f"{group}/{kind}" for kind in ("accuracy", "loss") for group in ("eval_ema", "eval")
        ]
        return next((name for name in candidates if name in names), None)

    def is_lower_better(self, metric: str) -> bool:
        """Whether smaller values of `metric` are better, from the result, else from its name."""
        best = self.result.get("best") or {}
        if metric == best.get("metric") and "mode" in best:
            return bool(best["mode"] == "min")
        return metric.endswith("loss")

    def best_evaluation(self) -> Mapping[str, Any]:
        """Return the row of the best evaluation by the headline metric."""
        evaluations, metric = self.evaluations(), self.headline()
        if not evaluations or metric is None:
            return {}
        having = [row for row in evaluations if metric in row]
        choose = min if self.is_lower_better(metric) else max
        return choose(having, key=lambda row: float(row[metric]))


def read_run(folder: Path) -> RunReader:
    """Read a run folder.

    Raises:
        OutputError: there is no run in it.
    """
    try:
        if not os.path.lexists(folder / "config.yaml"):
            raise ValueError("there is no config.yaml")
        return RunReader(
            folder,
            _checked("config.yaml", read_plain_yaml(folder / "config.yaml"), _CONFIG),
            _read_metrics(folder / "metrics.jsonl"),
            _checked("result.json", _read_json(folder / "result.json"), _RESULT),
            _checked("environment.json", _read_json(folder / "environment.json"), {}),
            list(_read_rows(folder / "attempts.jsonl", _is_attempt)),
        )
    except (OSError, ValueError) as error:
        raise OutputError(
            "NOT_A_RUN", f"{folder} is not a run ({error}): check the path"
        ) from error


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """Turn any error from malformed contents of a run folder into one OutputError."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        where, reason = ", ".join(map(str, folders)), f"{type(error).__name__}: {error}"
        raise OutputError(
            "NOT_A_RUN", f"{where}: malformed contents ({reason:.200}): check the folder"
        ) from error


def _checked(name: str, values: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` if each has its expected type or is None. Raises ValueError."""
    for key, kind in kinds.items():
        if not isinstance(values.get(key), kind | None):
            raise ValueError(f"{name}: {key} is {str(values[key])[:40]!r}")
    return values


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, max_bytes=_MAX_RECORD_BYTES) if os.path.lexists(path) else {}


def _read_rows(path: Path, is_sound: Callable[[Any], bool]) -> Iterator[dict[str, Any]]:
    if os.path.lexists(path):
        for number, line in enumerate(read_lines(path), start=1):
            row = parse_json(line)
            if not is_sound(row):
                raise ValueError(f"line {number} of {path.name} is not a row")
            yield row


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of numbers, thinned out evenly if there are very many."""
    kept: dict[bool, list[dict[str, Any]]] = {False: [], True: []}  # training rows, evaluation rows
    every, seen = {False: 1, True: 1}, {False: 0, True: 0}
    for row in _read_rows(path, _is_metrics):
        kind = row["event"] == "eval"
        if seen[kind] % every[kind] == 0:
            numbers = {name: _number(value) for name, value in row.items() if name != "event"}
            kept[kind].append(
                {"event": row["event"], **{n: v for n, v in numbers.items() if v is not None}}
            )
        seen[kind] += 1
        if len(kept[kind]) > _MAX_ROWS:
            del kept[kind][1::2]
            every[kind] *= 2
    return sorted(kept[False] + kept[True], key=lambda row: int(row["optimizer_step"]))


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None  # not numbers in JSON
    is_small = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
    return value if is_small else None


def _is_metrics(row: Any) -> bool:
    match row:
        case {"event": str(), "optimizer_step": int(step), "epoch": int(epoch)}:
            return 0 <= step < 2**63 and 0 <= epoch < 2**63
    return False


def _is_attempt(row: Any) -> bool:
    match row:
        case {"event": "start", "optimizer_step": int()}:
            return True
        case {"event": "end", "phase_s": {**seconds}}:
            return all(isinstance(value, int | float) for value in seconds.values())
    return False
