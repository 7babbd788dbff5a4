"""`accel-trainer doctor`: in one process, in several, and on a failed run."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_trainer import RuntimeConfig
from accel_trainer.cli.doctor import together
from accel_trainer.cli.doctor.command import CHECKS
from accel_trainer.cli.doctor.symptoms import SYMPTOMS, diagnose
from accel_trainer.cli.main import main
from accel_trainer.cli.runs.status import read_status
from accel_trainer.core.errors import ExitCode
from tests import processes, workload
from tests.cli.conftest import run_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
CIFAR = str(ROOT / "recipes" / "cifar.py")

Shown = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test machine may have problems too: only those that a test causes are checked."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_launch_without_errors_exits_with_0_and_lists_what_is_ok(
    tmp_path: Path, capsys: Shown
) -> None:
    code, shown, _ = run_command(capsys, ["doctor", CIFAR, "--output-dir", tmp_path / "run"])
    assert code == 0
    (passed,) = [line for line in shown.splitlines() if line.startswith("ok ")]
    assert "MASTER_ADDR, " in passed
    assert list(tmp_path.iterdir()) == []


def test_an_error_exits_with_64_and_each_finding_has_its_line(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth77")
    code, shown, _ = run_command(capsys, ["doctor", CIFAR])
    assert code == 64
    assert "\nerror   INTERFACE: NCCL_SOCKET_IFNAME=eth77 matches no interface (" in shown
    assert shown.splitlines()[-1].startswith("1 error, ")
    code, shown, _ = run_command(capsys, ["doctor", CIFAR, "--json"])
    found = {finding["code"]: finding for finding in json.loads(shown)}
    assert (code, found["INTERFACE"]["severity"], found["INTERFACE"]["rank"]) == (64, "error", 0)


def test_a_path_that_is_not_a_recipe_is_one_line(capsys: Shown) -> None:
    code, _, error = run_command(capsys, ["doctor", "nowhere.py"])
    assert (code, error.count("\n")) == (64, 1)


def test_a_launch_that_contradicts_itself_is_one_line(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, error = run_command(capsys, ["doctor"])
    assert (code, error.count("\n")) == (64, 1)
    assert error.startswith("accel_trainer: error[LAUNCH]: ")


def test_processes_are_compared_and_the_network_between_them_is_measured(tmp_path: Path) -> None:
    job = processes.run(look_together, num_processes=2, folder=tmp_path)
    shown = job.output(0)
    assert re.search(
        r"^all_reduce over 2 processes: \S+ GB/s \(16 MiB\), \S+ ms for one number$", shown, re.M
    )
    assert "warning CLOCKS: the clocks of the machines differ by 9" in shown
    assert re.search(r"^warning THREADS: .* \(on processes 1\)$", shown, re.M), (
        "found only by process 1"
    )
    assert job.output(1) == "", "one process speaks"


def look_together() -> None:
    flags = ["--runtime.num-threads", "1"]
    if os.environ["RANK"] == "1":
        flags = ["--runtime.num-threads", "999"]
        now = time.time
        time.time = lambda: now() + 99  # type: ignore[assignment]
    raise SystemExit(main(["doctor", CIFAR, *flags]))


def test_a_process_that_cannot_connect_reports_it_within_the_timeout(tmp_path: Path) -> None:
    job = processes.start(look_alone, num_processes=2, folder=tmp_path)
    assert job.wait()[0] == 64
    assert "error   RENDEZVOUS: " in job.output(0)


def look_alone() -> None:
    if os.environ["RANK"] == "0":
        raise SystemExit(main(["doctor", "--runtime.timeout-s", "1"]))


def test_a_slow_network_is_reported_with_its_cost() -> None:
    assert together._find_slow(1e9) == []
    (finding,) = together._find_slow(45e6)
    assert (finding.code, finding.severity) == ("SLOW_NETWORK", "warning")
    assert "at 45 MB/s, which takes 1.0 s per step for a ResNet-18" in finding.message


# --- a run that failed ---


def test_a_failed_run_is_explained_by_its_last_error(tmp_path: Path, capsys: Shown) -> None:
    """For real: a parameter that takes no part in the loss, which stops torch's reduction of two
    processes."""
    job = processes.start(
        train_with_an_idle_layer, tmp_path / "run", num_processes=2, folder=tmp_path / "logs"
    )
    assert 0 not in job.wait()
    code, shown, _ = run_command(capsys, ["doctor", tmp_path / "run"])
    assert code == ExitCode.USAGE
    assert shown.startswith("state: failed\nerror: rank ")
    (line,) = [line for line in shown.splitlines() if "UNUSED_PARAMETERS" in line]
    assert "freeze it (requires_grad=False)" in line


def test_a_killed_run_is_explained_and_says_how_to_continue(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    code, shown, _ = run_command(capsys, ["doctor", tmp_path])
    assert code == ExitCode.USAGE
    assert shown.startswith("state: killed\nerror   KILLED: ")
    assert "run the same command to continue" in " ".join(shown.split())


def test_every_failure_has_its_cause_and_the_next_command(tmp_path: Path, capsys: Shown) -> None:
    """With every exit code, and records that are not what a run writes."""
    for code in [*ExitCode, None, 5]:
        for error in ("ValueError: mine", "", None):
            for state in ("failed", "diverged"):
                for commit in ("step-0000000004-epoch-00001", None):
                    status = {"state": state, "exit_code": code, "error": error}
                    text = json.dumps({**status, "last_commit": commit})
                    (tmp_path / "status.json").write_text(text)
                    ended, shown, err = run_command(capsys, ["doctor", tmp_path])
                    assert (ended, err) == (ExitCode.USAGE, ""), text
                    assert "no problems found" not in shown
                    assert "error   FAILED: the last attempt ended with an error: " in shown
                    words = " ".join(shown.split())
                    assert ("error: ValueError: mine" in words) == bool(error)
                    assert ("was not recorded" in words) == (not error)
                    assert "again" in words or "accel-trainer " in words


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys: Shown) -> None:
    code, shown, error = run_command(capsys, ["doctor", tmp_path])
    assert (code, shown, error.count("\n")) == (64, "", 1)
    assert "is not a run" in error


class IdleNet(workload.SmallNet):
    def __init__(self, *, norm: str, dropout: float = 0.0) -> None:
        super().__init__(norm=norm, dropout=dropout)
        self.idle = nn.Linear(2, 2)


def train_with_an_idle_layer(folder: Path) -> None:
    workload.SmallNet = IdleNet  # type: ignore[misc]
    config = workload.make_config(folder)
    workload.train(replace(config, runtime=RuntimeConfig(num_threads=1, timeout_s=20)))


def out_of_memory() -> str:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60)
    return str(error.value)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (out_of_memory(), "OUT_OF_MEMORY"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "OUT_OF_MEMORY"),
        (f"OSError: [Errno 98] {os.strerror(errno.EADDRINUSE)}", "PORT_IN_USE"),
        ("DistNetworkError: ... code: -98, name: EADDRINUSE, message: ...", "PORT_IN_USE"),
        (
            "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, unhandled system error",
            "NCCL_ERROR",
        ),
        (
            "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error.",
            "SHARED_MEMORY",
        ),
        (f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}", "DISK_SPACE"),
        (f"OSError: [Errno 24] {os.strerror(errno.EMFILE)}", "OPEN_FILES"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "CUDA_TOUCHED"),
        ("rank 1, step 3, data: stuck, no progress for 600 s", "STUCK"),
        ("rank 1, step 3, training: exited without an error report: killed, perhaps", "KILLED"),
        ("rank 0, step 3, training: no answer from another machine: once machines", "NO_ANSWER"),
        ("ValueError: something of the user's own", None),
    ],
)
def test_the_last_lines_of_a_failed_run_are_explained(
    tmp_path: Path, said: str, code: str | None
) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "error": said}))
    assert [finding.code for finding in diagnose(read_status(tmp_path))] == ([code] if code else [])
    (tmp_path / "status.json").write_text(json.dumps({"state": "done", "error": None}))
    assert diagnose(read_status(tmp_path)) == []


# --- the page ---


def test_the_page_has_every_code_and_no_other() -> None:
    of_a_start = {"LAUNCH", "MPS_PROCESSES", "NCCL_MISSING", "CUBLAS_LATE", "UNTRAINED"}
    of_a_start |= {"IDLE_GPUS", "LEARNING_RATE"}
    of_all_processes = {"RENDEZVOUS", "CLOCKS", "SLOW_NETWORK"}
    codes = (
        of_a_start
        | {check.code for check in CHECKS}
        | {symptom.code for symptom in SYMPTOMS}
        | of_all_processes
    )
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", PAGE)) == codes


def test_every_rule_says_what_should_hold() -> None:
    assert len({check.code for check in CHECKS}) == len(CHECKS)
    assert all((check.run.__doc__ or "").endswith(".") for check in CHECKS)
