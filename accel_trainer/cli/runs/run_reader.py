"""Reads a run folder: config, logged rows, result and environment. Writes nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...core.config import flatten_config
from ...core.errors import CheckpointError, OutputError, UserError
from ...core.filesystem import read_lines
from ...core.history import is_number
from ...core.json_files import parse_json, read_json_object
from ...core.yaml_files import read_yaml
from ..common.output import Numbers
from .metric_groups import TEST_GROUP, preferred_groups
from .rows import Row
from .status import read_status

# A run has at least one of these beside its `config.yaml`, which a new project also has.
_RECORDS = ("environment.json", "status.json", "metrics.jsonl", "checkpoints")
_MAX_RECORD_BYTES = 1 << 26
_MAX_ROWS = 20_000
_TRAINING = b'{"event": "train"'  # a row of training begins so
Contents = Mapping[str, Any]
"""What a file of a run holds, by name."""
Series = tuple[list[int], list[float]]
"""Steps, and a number at each."""
_Parse = Callable[[], Row]
# The expected types of some entries of a run's files; None is always allowed.
_CONFIG = {
    **dict.fromkeys(
        ("batch", "trainer", "optimizer", "schedule", "checkpoint", "runtime", "run"), dict
    ),
    # Parts and values that the recipes of vision add.
    **dict.fromkeys(("augment", "model", "task"), dict),
    "dataset": str,
    "seed": int,
}
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
_NO_METRICS = {"event", "optimizer_step", "epoch"}
_BEST = {"name": str, "metric": str, "value": int | float, "mode": str}


@dataclass(frozen=True)
class RunReader:
    """The contents of a run folder; parts that are not written yet are empty."""

    folder: Path
    config: Contents
    metrics: MetricsReader
    result: Contents
    environment: Contents
    attempts: Sequence[Row] = ()

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The rows of `metrics.jsonl`, thinned out. Raises OutputError for a damaged file."""
        with _readable(self.folder):
            return self.metrics.read()

    @cached_property
    def logged(self) -> Mapping[str, Contents]:
        """The last picture of each name in the rows, as callbacks have logged them."""
        return dict(self.metrics.logged) if self.rows else {}

    @property
    def name(self) -> str:
        """The folder's name, with escapes for bytes that are no UTF-8, whatever the locale."""
        name = os.fsencode(self.folder.resolve().name)
        return name.decode("utf-8", errors="backslashreplace")

    @property
    def dataset(self) -> str:
        """The dataset's name, or its folder's name; empty if the recipe has no such setting."""
        return str(self.config.get("dataset") or "").rstrip("/").rpartition("/")[2]

    @cached_property
    def settings(self) -> Contents:
        """The values of the config by dotted name, with what `--hours` has decided."""
        return {**dict(flatten_config(self.config)), **self.decided}

    @cached_property
    def decided(self) -> Mapping[str, int | None]:
        """The settings that `--hours` has decided, which replace it; empty before that."""
        if (self.config.get("trainer") or {}).get("hours") is None:
            return {}
        match self.manifest.get("metadata"):
            case {"hours": {"decay_at": int(decay_at), "num_steps": int(num_steps)}}:
                length = {"trainer.hours": None, "trainer.num_steps": num_steps}
                return {**length, "schedule.decay_at": decay_at}
        return {}

    @cached_property
    def state(self) -> str:
        """`running`, `killed`, `done`, `failed` and so on."""
        try:
            return str(read_status(self.folder)["state"])
        except (OSError, ValueError):
            return str(self.result.get("state", "unknown"))

    @cached_property
    def manifest(self) -> Contents:
        """The manifest of the newest checkpoint whose manifest is readable; empty without one."""
        # It imports torch, which a table of runs does without.
        from ...checkpoint.format import list_checkpoints, read_manifest

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
                drops_last = self.settings.get("batch.drop_last") is True
                return (num_samples // size if drops_last else -(-num_samples // size)) or None
        return None

    @property
    def origin(self) -> list[str]:
        """Lines on where the initial weights came from, and on what else decided the training.

        That is what is frozen, and the hash of what the task holds besides its settings.
        """
        stored = self.manifest.get("origin")
        lines = [str(line) for line in stored] if isinstance(stored, list) else []
        if task := self.manifest.get("task_fingerprint"):
            lines.append(f"task, such as the teacher's weights: sha256 {task}")
        return lines

    @cached_property
    def training_clock(self) -> Series | None:
        """Steps, and the seconds of training until each; None if no speed was logged.

        Evaluations, saves and pauses are not counted.
        """
        samples = self.result.get("samples_seen")
        num_steps = self.result.get("optimizer_step")
        stored = self.settings.get("batch.global_batch_size")
        samples_per_step = samples / num_steps if samples and num_steps else stored
        if not isinstance(samples_per_step, int | float):
            return None
        steps = [0]
        seconds = [0.0]
        for step, samples_per_s in zip(*self.series("perf/samples_per_s"), strict=True):
            if step > steps[-1] and samples_per_s > 0:
                seconds.append(seconds[-1] + (step - steps[-1]) * samples_per_step / samples_per_s)
                steps.append(step)
        return (steps, seconds) if len(steps) > 1 else None

    @property
    def ending(self) -> Contents:
        """The contents of `result.json`; empty if the run goes on, or went on after it."""
        has_ended = not self.attempts or self.attempts[-1]["event"] == "end"
        return self.result if has_ended and self.state != "running" else {}

    @property
    def wall_s(self) -> float | None:
        """The seconds of all attempts that ended cleanly; None if the last one has not ended."""
        seconds: float | None = self.ending.get("wall_s")
        return seconds and (sum(self.phase_s.values()) or seconds)

    @property
    def began_from(self) -> str:
        """What `--resume` says in a start like the first one."""
        given = str(self.settings.get("run.resume", "auto"))
        return "never" if given == "auto" else given

    @property
    def begin(self) -> int:
        """The step at which the run itself began: not 0 if it branched off from a checkpoint."""
        return int(self.attempts[0]["optimizer_step"]) if self.attempts else 0

    @property
    def restarts(self) -> list[int]:
        """The steps from which the run was resumed, in order."""
        starts = [row["optimizer_step"] for row in self.attempts if row["event"] == "start"]
        return [step for step in starts if step]

    @cached_property
    def phase_s(self) -> Numbers:
        """The seconds of each phase, over the attempts that ended cleanly."""
        sums: Numbers = {}
        for row in self.attempts:
            phases = row["phase_s"] if row["event"] == "end" else {}
            for name, seconds in phases.items():
                sums[name] = sums.get(name, 0) + seconds
        return sums

    @property
    def num_killed(self) -> int:
        """How many attempts were killed: their `start` row is followed by another `start` row."""
        events = [row["event"] for row in self.attempts]
        return sum(pair == ("start", "start") for pair in pairwise(events))

    def series(self, name: str) -> Series:
        """Return the optimizer steps and the values of a metric, in the order of measurement."""
        return self._all_series.get(name, ([], []))

    def metric_names(self) -> list[str]:
        """Return the names of all recorded numbers, each once."""
        return [*self._all_series]

    @cached_property
    def _all_series(self) -> Mapping[str, Series]:
        found: dict[str, Series] = {}
        for row in self.rows:
            for name, value in row.items():
                if name not in _NO_METRICS:
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(row["optimizer_step"])
                    values.append(float(value))
        return found

    def evaluations(self) -> list[Row]:
        """Return the rows of evaluations."""
        return [row for row in self.rows if row["event"] == "eval"]

    def headline(self) -> str | None:
        """Return the metric to compare runs by; None without evaluations.

        It is the metric that chose the best checkpoint, else an accuracy, else a loss.
        """
        best = self.result.get("best") or {}
        names = dict.fromkeys(name for row in self.evaluations() for name in row)
        candidates = [best.get("metric"), self.settings.get("trainer.monitor")]
        for kind in ("accuracy", "loss"):
            candidates += [f"{group}/{kind}" for group in preferred_groups(names)]
        return next((name for name in candidates if isinstance(name, str) and name in names), None)

    def test_numbers(self) -> Numbers:
        """Return the numbers of the test set, as `test/...`; empty without one."""
        metrics = self.result.get("metrics") or {}
        return {
            name: value
            for name, value in metrics.items()
            if name.startswith(f"{TEST_GROUP}/") and is_number(value)
        }

    def is_lower_better(self, metric: str) -> bool:
        """Whether smaller values of `metric` are better, from the result, else from its name."""
        best = self.result.get("best") or {}
        if metric == best.get("metric") and "mode" in best:
            return bool(best["mode"] == "min")
        return metric.endswith("loss")

    def best_evaluation(self) -> Row:
        """Return the row of the best evaluation by the headline metric; empty without one."""
        metric = self.headline()
        if metric is None:
            return {}
        having = [row for row in self.evaluations() if metric in row]
        known = [row for row in having if not math.isnan(row[metric])]
        choose = min if self.is_lower_better(metric) else max
        return choose(known or having, key=lambda row: float(row[metric]))


Runs = Sequence[RunReader]


def is_run(folder: Path) -> bool:
    """Whether `folder` holds a run."""
    has_records = any(os.path.lexists(folder / name) for name in _RECORDS)
    return has_records and os.path.lexists(folder / "config.yaml")


def read_run(folder: Path, metrics: MetricsReader | None = None) -> RunReader:
    """Read a run folder; its rows only when they are asked for.

    With `metrics`, which has read some of them, only the rows since then are read, and now.

    Raises:
        OutputError: there is no run in it, or one of its files is damaged.
    """
    config = folder / "config.yaml"
    if not is_run(folder):
        fact = "only a config.yaml" if os.path.lexists(config) else "no config.yaml"
        within = sorted(path.parent for path in folder.glob("*/config.yaml") if is_run(path.parent))
        fix = f"give one of its runs, such as {within[0]}" if within else "check the path"
        raise OutputError("NOT_A_RUN", f"{folder} is not a run (there is {fact}): {fix}")
    with _readable(folder):
        result = _checked("result.json", _read_json(folder / "result.json"), _RESULT)
        _checked("result.json, best", result.get("best") or {}, _BEST)
        run = RunReader(
            folder,
            _checked("config.yaml", _read(config, read_yaml), _CONFIG),
            metrics or MetricsReader(folder / "metrics.jsonl"),
            result,
            _checked("environment.json", _read_json(folder / "environment.json"), {}),
            [parse() for _, parse in _read_rows(folder / "attempts.jsonl", _is_attempt)],
        )
    if metrics is not None:
        _ = run.logged
    return run


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn an error of a file into an OutputError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise OutputError(
            "NOT_A_RUN", f"{folder} cannot be read ({error}): restore or repair the file"
        ) from error


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """Turn any error from malformed contents of a run folder into one OutputError."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        where = ", ".join(map(str, folders))
        reason = f"{type(error).__name__}: {error}"
        raise OutputError(
            "NOT_A_RUN", f"{where}: malformed contents ({reason:.200}): check the folder"
        ) from error


def _checked(name: str, values: Contents, kinds: Contents) -> Contents:
    """Return `values` if each has its expected type or is None. Raises ValueError."""
    for key, kind in kinds.items():
        if not isinstance(values.get(key), kind | None):
            raise ValueError(f"{name}: {key} is {str(values[key])[:40]!r}")
    return values


def _read_json(path: Path) -> Contents:
    read = partial(read_json_object, max_bytes=_MAX_RECORD_BYTES)
    return _read(path, read) if os.path.lexists(path) else {}


def _read(path: Path, read: Callable[[Path], Contents]) -> Contents:
    """Return what `read` finds in a file. Raises OSError, or ValueError that names the file."""
    try:
        return read(path)
    except ValueError as error:
        if path.name in str(error):
            raise
        raise ValueError(f"{path.name}: {error}") from error


def _read_rows(
    path: Path, is_valid: Callable[[Any], bool], *, start: int = 0
) -> Iterator[tuple[bytes, _Parse]]:
    """Yield the lines of a JSON-lines file from byte `start` on, if it exists, and their rows.

    A row is parsed by a call, which raises ValueError for an invalid one.
    """

    def parse(number: int, line: bytes) -> Any:
        row: Any = None
        with suppress(ValueError):
            row = parse_json(line)
        if not is_valid(row):
            after = f" after byte {start}" if start else ""
            raise ValueError(f"line {number}{after} of {path.name} is not a row")
        return row

    if os.path.lexists(path):
        for number, line in enumerate(read_lines(path, start=start), start=1):
            yield line, partial(parse, number, line)


class MetricsReader:
    """Reads the rows of `metrics.jsonl`, and later the rows that were added since.

    Rows of training are thinned out evenly if there are very many, all but the last, and those that
    are left out are not parsed. `logged` has the last value of each name that is no number but an
    object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_again()

    def _start_again(self) -> None:
        self._end = 0
        self._last_line = b""
        self._training = _ThinnedRows()
        self._others: list[Row] = []
        self.logged: dict[str, Contents] = {}

    def read(self) -> list[Row]:
        """Return the rows of numbers in order of steps. Raises OSError or ValueError."""
        if not self._is_continued():
            self._start_again()
        for line, parse in _read_rows(self._path, _is_metrics, start=self._end):
            has_only_numbers = line.count(b"{") == 1
            if line.startswith(_TRAINING) and has_only_numbers:
                self._training.add(parse)
            else:
                self._add(parse())
            self._end += len(line)
            self._last_line = line
        rows = [*self._training.kept, *self._others]
        return sorted(rows, key=lambda row: int(row["optimizer_step"]))

    def _add(self, row: Row) -> None:
        if row["event"] == "train":
            self._training.add(lambda: row)
        else:
            self._others.append(_with_numbers(row))
        self.logged |= {
            name: value
            for name, value in row.items()
            if isinstance(value, dict) and name.isprintable()
        }

    def _is_continued(self) -> bool:
        """Whether the last line is where it was: a resume removes rows, and writes others."""
        if not os.path.lexists(self._path):
            return False
        lines = read_lines(self._path, start=self._end - len(self._last_line))
        return next(lines, b"") == self._last_line or not self._end


class _ThinnedRows:
    """Keeps the last row and every n-th, and doubles n when more than `_MAX_ROWS` are kept."""

    def __init__(self) -> None:
        self._every_nth: list[Row] = []
        self._last: list[_Parse] = []
        self._num_seen = 0
        self._every = 1

    @property
    def kept(self) -> list[Row]:
        """The numbers of the rows, in their order."""
        return [*self._every_nth, *(_with_numbers(parse()) for parse in self._last)]

    def add(self, parse: _Parse) -> None:
        """Keep the row that `parse` returns, perhaps until the next one."""
        self._last = [parse]
        if self._num_seen % self._every == 0:
            self._every_nth.append(_with_numbers(parse()))
            self._last = []
        self._num_seen += 1
        if len(self._every_nth) > _MAX_ROWS:
            del self._every_nth[1::2]
            self._every *= 2


def _with_numbers(row: Row) -> Row:
    """Return the event of a row and its numbers."""
    numbers = {name: _number(value) for name, value in row.items() if name != "event"}
    known = {name: value for name, value in numbers.items() if value is not None}
    return {"event": row["event"], **known}


def _number(value: Any) -> float | None:
    """Return a value of a row as a number; None if it is none, or an integer beyond 64 bits."""
    if isinstance(value, str):  # JSON has no NaN and no infinity
        return float(value) if value in ("nan", "inf", "-inf") else None
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
