from __future__ import annotations

import pickle

import pytest

from accel_trainer.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ExitCode,
    OutOfMemoryError,
    OutputError,
    Preempted,
    PreemptedScript,
    ProcessError,
    UserError,
)


def test_a_user_error_is_one_line_whatever_a_name_contains() -> None:
    error = DataError("DATA_FILE", "a\nname\x1b[2J with\u202econ\u200btrol: rename it")
    assert str(error) == "error[DATA_FILE]: a name [2J with con trol: rename it"


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (ConfigError, 64),
        (OutOfMemoryError, 64),
        (DataError, 65),
        (UserError, 70),
        (OutputError, 73),
        (CheckpointError, 74),
        (Preempted, 75),
        (DivergedError, 79),
    ],
)
def test_the_exit_code_of_an_error_is_what_job_scripts_know(
    kind: type[UserError], exit_code: int
) -> None:
    assert kind("CODE", "text").exit_code == exit_code


def test_an_error_that_crosses_processes_is_the_same() -> None:
    error = pickle.loads(
        pickle.dumps(CheckpointError("CKPT_NONE_VALID", "none is valid: restore one"))
    )
    assert (type(error), error.code) == (CheckpointError, "CKPT_NONE_VALID")
    assert str(error) == "error[CKPT_NONE_VALID]: none is valid: restore one"


def test_a_preemption_crosses_processes_with_its_result() -> None:
    error = pickle.loads(pickle.dumps(PreemptedScript("PREEMPTED", "SIGTERM: saved step 4", 4)))
    assert (error.message, error.result, error.code) == ("SIGTERM: saved step 4", 4, 75)


def test_a_process_error_crosses_processes_with_its_rank_and_exit_code() -> None:
    error = pickle.loads(pickle.dumps(ProcessError("PEER", "process 3 failed", 3, 80)))
    assert (error.code, error.rank, error.exit_code) == ("PEER", 3, ExitCode.USER_CODE)
