"""Trackers of runs that were killed, each read back as its own users read it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from accel_trainer import Callback, CheckpointConfig, ConfigError, StepReport, Trainer
from accel_trainer.callbacks.metrics_file import MetricsFile
from accel_trainer.callbacks.trackers import Trackers, check_trackers
from tests.variants import slow_but

from .. import processes, workload

Point = tuple[str, int, float]


# --- killed runs, read back ---


class Dies(Callback):
    """Kills its process in the step after one that the tracker has in its files."""

    def __init__(self, name: str, step: int) -> None:
        self._step = step
        adapter = LOGGER_TYPE_TO_CLASS[name]
        log = adapter.log

        def log_and_finish(tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
            log(tracker, values, step=step)
            if step == self._step:
                # wandb, for one, holds rows back until then, so that a kill would leave none
                tracker.finish()

        adapter.log = log_and_finish

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        if self._step and report.optimizer_step == self._step + 1:  # its row is not written yet
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(folder: Path, name: str, dies_after: int) -> None:
    """Train 10 steps with a row for each and a checkpoint after every fourth, or die."""
    config = workload.make_config(folder, checkpoint=CheckpointConfig(every_n_steps=4))
    config = replace(
        config,
        trainer=replace(config.trainer, log_every_n_steps=1, ema_decay=None),
        run=replace(config.run, track=(name,)),
    )
    workload.train(config, callbacks=(Dies(name, dies_after),))


def recorded(run: Path) -> list[Point]:
    """Return what `metrics.jsonl` says, each number once; trackers get no digests."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sorted(
        (name, row["optimizer_step"], row[name])
        for row in rows
        for name in row
        if "/" in name and not name.startswith("digest/")
    )


def read_tensorboard(folder: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in events.Scalars(name))


def read_wandb(folder: Path) -> Iterator[Point]:
    """Read what `wandb sync` would send: its protobuf records, in the frames of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in folder.rglob("*.wandb"):
        data, position, payload = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:
                position += 32768 - position % 32768
            _, length, kind = struct.unpack_from("<IHB", data, position)
            payload += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record, payload = Record.FromString(payload), b""
                values = {
                    item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
                }
                step = values.get("_step")
                yield from ((name, step, value) for name, value in values.items() if name[0] != "_")


def read_mlflow(folder: Path) -> Iterator[Point]:
    from mlflow.tracking import MlflowClient

    warnings.simplefilter("ignore")  # its own use of SQLAlchemy is deprecated
    # it keeps open what it has read, also when that is removed
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(folder / "mlflow.db", copy)
        client = MlflowClient(f"sqlite:///{copy}/mlflow.db")
        experiment = client.get_experiment_by_name("project")
        for run in client.search_runs([experiment.experiment_id]):
            for name in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, name)
                yield from ((name, metric.step, metric.value) for metric in history)


def read_trackio(folder: Path) -> Iterator[Point]:
    # which it reads when it is imported, and here it never was
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio.sqlite_storage import SQLiteStorage

    for run in SQLiteStorage.get_runs("project"):
        for row in SQLiteStorage.get_logs("project", run):
            yield from ((name, row["step"], value) for name, value in row.items() if "/" in name)


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}
# What they import beside themselves where their rows are kept on this machine.
_NEEDED = {"mlflow": "sqlalchemy"}


@pytest.mark.parametrize("name", slow_but(["tensorboard"], READERS))
def test_a_run_killed_twice_has_each_row_once_in_its_tracker(tmp_path: Path, name: str) -> None:
    for package in (name, _NEEDED.get(name, name)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    run = tmp_path / "project" / "run"
    run.parent.mkdir()
    for dies_after in (3, 7):  # before the first checkpoint, and two rows after the second
        processes.run(
            attempt,
            run,
            name,
            dies_after,
            folder=tmp_path / f"logs-{dies_after}",
            codes=[-signal.SIGKILL],
        )
        left = {step for _, step, _ in READERS[name](run / "trackers" / name)}
        assert left == set(range(1, dies_after + 1)), (
            "rows that the next attempt takes another time"
        )
    done = processes.run(attempt, run, name, 0, folder=tmp_path / "logs")
    assert "WARNING" not in done.output()
    found = sorted(READERS[name](run / "trackers" / name))
    expected = recorded(run)
    assert [point[:2] for point in found] == [point[:2] for point in expected]
    assert [point[2] for point in found] == pytest.approx(
        [point[2] for point in expected], rel=1e-6
    )


# --- trackers that fail ---


class Broken(GeneralTracker):
    """A tracker whose calls do what `on_call` does."""

    name = "broken"
    requires_logging_directory = False
    on_call: Callable[[int], None]
    calls: list[int]

    def __init__(self, project: str) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert all(isinstance(value, bool | int | float | str) for value in values.values())

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        type(self).calls.append(step or 0)
        type(self).on_call(step or 0)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Broken]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "broken", Broken)
    Broken.calls = []
    return Broken


def train(folder: Path) -> None:
    config = workload.make_config(folder)
    config = replace(
        config,
        trainer=replace(config.trainer, log_every_n_steps=1, num_epochs=1),
        run=replace(config.run, track=("broken",)),
    )
    assert workload.train(config).state == "done"


def test_a_tracker_that_raises_is_warned_about_and_turned_off(
    tmp_path: Path, broken: type[Broken], caplog: pytest.LogCaptureFixture
) -> None:
    """Fault (Data, config and users' code): a tracker raises, is not installed, or has rows from
    after the resumed step; the hub does not answer -> a warning, and the tracker is off until
    the next start. Training waits for one that hangs. Its copy is rebuilt from `metrics.jsonl`
    at every start (an online run is continued by its id, and rows sent before a kill may be
    there twice). A missing package or dataset is an error before training
    """

    def fail(step: int) -> None:
        if step == 2:
            raise OSError("the server is on fire")

    broken.on_call = staticmethod(fail)
    train(tmp_path)
    assert broken.calls == [1, 2]
    said = (
        "broken failed (OSError: the server is on fire) and is ignored until the next start; "
        "training continues"
    )
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_run_has_one_id_for_trackers_that_are_online(
    tmp_path: Path, broken: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", broken)

    def note(self: Broken, project: str, **options: Any) -> None:
        seen.append({**options, "project": project, "timeout": os.environ["WANDB_INIT_TIMEOUT"]})

    monkeypatch.setattr(broken, "__init__", note)
    (tmp_path / "metrics.jsonl").touch()
    for _ in range(2):
        trackers = Trackers(("wandb",), run=tmp_path, config={})
        trackers.on_fit_start(None)
        trackers.on_fit_end(None, None)
    assert seen[0] == seen[1]
    assert (len(seen[0]["id"]), seen[0]["resume"]) == (32, "allow")
    assert (seen[0]["project"], seen[0]["timeout"]) == (tmp_path.parent.name, "60")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "300")
    Trackers(("wandb",), run=tmp_path, config={}).on_fit_start(None)
    assert (seen[2]["project"], seen[2]["timeout"]) == ("ours", "300")


def test_nan_reaches_a_tracker_as_a_number(
    tmp_path: Path, broken: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(broken, "log", lambda self, values, step: seen.append(values))
    history = MetricsFile(tmp_path / "metrics.jsonl")
    history.append({"optimizer_step": 1, "train/loss": float("nan")})
    trackers = Trackers(("broken",), run=tmp_path, config={})
    trackers.on_fit_start(None)
    trackers.on_fit_end(None, None)
    assert [(type(value), value != value) for value in seen[0].values()] == [(float, True)]


def test_trackers_get_the_numbers_that_callbacks_logged_and_no_more(
    tmp_path: Path, broken: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(broken, "log", lambda self, values, step: seen.append(values))
    history = MetricsFile(tmp_path / "metrics.jsonl")
    own = {"log/x": 0.5, "log/w": {"counts": [1]}, "log/p": {"picture": "pictures/p.png"}}
    history.append({"event": "train", "optimizer_step": 1, "epoch": 1, **own})
    trackers = Trackers(("broken",), run=tmp_path, config={})
    trackers.on_fit_start(None)
    trackers.on_fit_end(None, None)
    assert seen == [{"log/x": 0.5}]


def test_a_tracker_that_cannot_be_used_is_one_line_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--track tensorbord: accelerate has no such tracker"):
        check_trackers(["tensorbord"])
    missing = next(
        name
        for name in ("aim", "clearml", "dvclive", "swanlab")
        if not importlib.util.find_spec(name)
    )
    config = workload.make_config(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"pip install {missing}"):
        workload.train(replace(config, run=replace(config.run, track=(missing,))))
    assert not (tmp_path / "run").exists()
