"""`accel-trainer bisect` finds the first step for which a condition holds, and its samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import run_command

from .conftest import NAMED
from .poisoned import POISON

pytestmark = pytest.mark.usefixtures("python_is_forked")


def test_the_step_and_the_sample_behind_a_mean_are_found(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "optim/grad_norm > 10 and epoch == 1"
    argv = ["bisect", poisoned, "--where", where]
    code, out, err = run_command(capsys, [*argv, "--json"])
    assert (code, err) == (0, NAMED)
    found = json.loads(out)
    assert (found["row"], found["step"] < 4) == (4, True)
    # Its mean over the four steps of the row is 12.3.
    assert found["values"]["optim/grad_norm"] > 40
    assert found["later"] == {}
    assert len(found["samples"]) == 8
    assert found["samples"][0]["id"] == POISON
    assert found["samples"][0]["high"] > 100
    assert found["proof"]["first_difference"] is None


def test_a_condition_that_never_holds_is_said(
    poisoned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where, is_of_means in (("isnan(train/loss)", True), ("isnan(eval/loss)", False)):
        code, out, err = run_command(capsys, ["bisect", poisoned, "--where", where])
        assert (code, err) == (1, "")
        assert f"{where} holds in none of 18 rows" in out
        assert ("--every-step" in out) is is_of_means


def test_a_condition_may_read_what_a_probe_logs(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "ids.py"
    probe.write_text(
        "from accel_trainer import Callback\n"
        "class Ids(Callback):\n"
        "    def on_step_end(self, trainer, report):\n"
        "        trainer.log('lowest_id', report.sample_ids[0].min())\n"
        "    def state_dict(self):\n"
        "        return {'trained': 'in one stretch'}\n"
    )
    argv = ["bisect", poisoned, "--where", "log/lowest_id == 0", "--probe", probe, "--every-step"]
    code, out, err = run_command(capsys, [*argv, "--to", tmp_path / "rows", "--json"])
    assert (code, err) == (0, NAMED)
    found = json.loads(out)
    assert found["step"] == found["row"] <= 20
    assert min(sample["id"] for sample in found["samples"]) == 0


def test_an_unknown_column_is_one_line(poisoned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(capsys, ["bisect", poisoned, "--where", "train/grad_norm > 1"])
    assert (code, out, len(err.splitlines())) == (64, "", 1)
    assert "error[WHERE]: --where 'train/grad_norm > 1', character 1 (train/grad_norm)" in err
