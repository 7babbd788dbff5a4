"""Callbacks that a run gets from a file, without a change of the recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_trainer import ConfigError
from accel_trainer.run.extra_callbacks import VARIABLE, extra_callbacks
from tests.workload import make_config, replace, train

PROBE = """
from accel_trainer import Callback

class Norms(Callback):
    def on_step_end(self, trainer, report):
        trainer.log("probe/bias", trainer.model.layers[-1].bias.detach().norm())
"""


def test_a_file_adds_callbacks_and_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    rows = {}
    for name, file in (("plain", ""), ("probed", str(tmp_path / "probe.py"))):
        monkeypatch.setenv(VARIABLE, file)
        config = make_config(tmp_path / name)
        train(replace(config, trainer=replace(config.trainer, max_steps=4, digest_every_n_steps=1)))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    assert all("probe/bias" in row for row in rows["probed"] if row["event"] == "train")
    for row in (*rows["plain"], *rows["probed"]):
        for name in [key for key in row if key.startswith(("perf/", "probe/"))]:
            del row[name]
    assert rows["plain"] == rows["probed"]
    environment = json.loads((tmp_path / "probed" / "environment.json").read_bytes())
    assert environment["variables"][VARIABLE] == str(tmp_path / "probe.py")


@pytest.mark.parametrize(
    ("content", "fact"),
    [(None, "give the path of a Python file"), ("x = 1", "defines no subclass")],
)
def test_a_file_without_callbacks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, fact: str
) -> None:
    path = tmp_path / "probe.py"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(ConfigError, match=fact):
        extra_callbacks()
