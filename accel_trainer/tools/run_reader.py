"""A run folder as the commands see it: what was asked, what was recorded, how it ended. Reads only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint_files import list_checkpoints, read_manifest
from ..errors import CheckpointError, OutputError
from .status import read_status


@dataclass(frozen=True)
class RunReader:
    """What lies in a run folder; whatever a run has not written yet is empty."""

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

    @cached_property
    def state(self) -> str:
        """`running`, `killed`, `done`, `failed` and so on."""
        try:
            return str(read_status(self.folder)["state"])
        except (OSError, ValueError, KeyError):
            return str(self.result.get("state", "unknown"))

    @cached_property
    def data_fingerprint(self) -> str | None:
        """The SHA-256 of the training data, as the newest checkpoint has it."""
        for path in reversed(list_checkpoints(self.folder / "checkpoints")):
            try:
                return str(read_manifest(path)[1].get("data_fingerprint") or "") or None
            except CheckpointError:
                continue
        return None

    @property
    def restarts(self) -> list[int]:
        """The steps after which it went on from a checkpoint, in order."""
        starts = [row["optimizer_step"] for row in self.attempts if row["event"] == "start"]
        return [step for step in starts if step]

    @cached_property
    def phase_s(self) -> dict[str, float]:
        """The seconds of each phase, over the attempts that ended in good order."""
        phases = [row["phase_s"] for row in self.attempts if row["event"] == "end"]
        return {name: sum(phase.get(name, 0.0) for phase in phases) for phase in phases for name in phase}

    @property
    def num_killed(self) -> int:
        """How many attempts were killed, so that nothing is known of their time."""
        starts = [number for number, row in enumerate(self.attempts) if row["event"] == "start"]
        return sum(self.attempts[after - 1]["event"] == "start" for after in starts[1:])

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the optimizer steps and the values of a metric, in the order in which they were measured."""
        found = [(row["optimizer_step"], float(row[name])) for row in self.rows if name in row]
        return [step for step, _ in found], [value for _, value in found]

    def metric_names(self) -> list[str]:
        """Return the names of all recorded numbers, each once."""
        ignored = {"event", "optimizer_step", "epoch"}
        return [name for name in dict.fromkeys(key for row in self.rows for key in row) if name not in ignored]

    def evaluations(self) -> list[Mapping[str, Any]]:
        """Return the rows of evaluations."""
        return [row for row in self.rows if row["event"] == "eval"]

    def headline(self) -> str | None:
        """Return the metric to judge the run by: what it chose its best by, else an accuracy, else a loss."""
        best = self.result.get("best") or {}
        names = [name for row in self.evaluations() for name in row if name.startswith("eval")]
        candidates = [best.get("metric"), self.config.get("trainer", {}).get("monitor")]
        candidates += [f"{group}/{kind}" for kind in ("accuracy", "loss") for group in ("eval_ema", "eval")]
        return next((name for name in candidates if name in names), None)

    def is_lower_better(self, metric: str) -> bool:
        """Whether smaller values of `metric` are better: as the run was told, else as its name says."""
        best = self.result.get("best") or {}
        if metric == best.get("metric") and "mode" in best:
            return bool(best["mode"] == "min")
        return metric.endswith("loss")

    def best_evaluation(self) -> Mapping[str, Any]:
        """Return the row of the best evaluation by the headline; the last one if the run chose none."""
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
        config = yaml.safe_load((folder / "config.yaml").read_text())
        rows, attempts = (_read_rows(folder / name) for name in ("metrics.jsonl", "attempts.jsonl"))
        result, environment = (_read_json(folder / name) for name in ("result.json", "environment.json"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = "there is no config.yaml" if isinstance(error, FileNotFoundError) else error
        raise OutputError("NOT_A_RUN", f"{folder} is not a run ({reason}): check the path") from error
    return RunReader(folder, dict(config or {}), rows, result, environment, attempts)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.exists() else {}
