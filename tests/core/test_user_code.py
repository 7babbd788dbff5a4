"""Whose code raised an error, by the frames that it went through."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer.core.errors import ConfigError, ExitCode, PartFailed
from accel_trainer.core.user_code import (
    LIBRARIES,
    describe_error,
    exit_code_of,
    find_user_code,
    print_error,
)

ROOT = Path(__file__).parents[2]
OURS, USERS = "accel_trainer.training.trainer", "train"


def caller(module: str) -> Callable[..., Any]:
    """Return a function of `module` that calls what it is given."""
    code = compile(
        "def call(function):\n    return function()",
        f"/project/{module.replace('.', '/')}.py",
        "exec",
    )
    names: dict[str, Any] = {"__name__": module, "__package__": module.rpartition(".")[0]}
    exec(code, names)
    return names["call"]  # type: ignore[no-any-return]


def raised_through(*modules: str, error: Exception | None = None) -> Exception:
    """Return an error that the innermost of nested functions of `modules` raised."""

    def fail() -> None:
        raise error or ZeroDivisionError("by zero")

    action: Callable[[], Any] = fail
    for call in map(caller, reversed(modules)):
        action = lambda call=call, inner=action: call(inner)  # noqa: E731
    try:
        action()
    except Exception as caught:
        caught.__traceback__ = without_this_file(caught)
        return caught
    raise AssertionError


def without_this_file(error: BaseException) -> Any:
    """Return the traceback without the frames of this test, which would be the user's."""
    traceback, kept = error.__traceback__, None
    frames = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename != __file__:
            frames.append(traceback)
        traceback = traceback.tb_next
    for each in reversed(frames):
        kept = type(each)(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


@pytest.mark.parametrize(
    ("modules", "is_users"),
    [
        ((USERS,), True),
        ((USERS, OURS), False),
        ((USERS, OURS, USERS), True),
        ((USERS, OURS, USERS, "torch.nn.functional"), True),
        ((USERS, OURS, "torch.nn.functional"), False),
        ((USERS, OURS, USERS, "json.decoder"), True),
        ((USERS, OURS, "json.decoder"), False),
        ((USERS, OURS, "torchmetrics.metric", "torch.functional"), True),
        ((USERS, OURS, "datasets.builder", "httpx.client"), False),
        ((USERS, OURS, USERS, "httpx.client"), True),
        ((USERS, OURS, USERS, OURS), False),
    ],
)
def test_the_innermost_code_that_is_no_librarys_raised_it(
    modules: tuple[str, ...], is_users: bool
) -> None:
    error = raised_through(*modules)
    assert (find_user_code(error) is not None) == is_users
    assert exit_code_of(error) == (ExitCode.USER_CODE if is_users else ExitCode.INTERNAL)


def test_the_place_and_the_frames_are_those_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised_through(USERS, OURS, USERS, "torch.nn.functional")
    assert describe_error(error) == "ZeroDivisionError: by zero, at /project/train.py:2 in call"
    print_error(error)
    files = [
        line.split('"')[1]
        for line in capsys.readouterr().err.splitlines()
        if line.startswith('  File "')
    ]
    assert files == ["/project/train.py"] * 2


def test_a_bug_keeps_all_its_frames(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised_through(USERS, OURS, "torch.nn.functional")
    assert describe_error(error) == "ZeroDivisionError: by zero"
    print_error(error)
    assert capsys.readouterr().err.count('  File "') == 3


def test_a_part_that_takes_other_arguments_is_the_users() -> None:
    error = raised_through(
        USERS,
        OURS,
        error=TypeError("Mine.on_step_end() takes 2 positional arguments but 3 were given"),
    )
    assert describe_error(error).endswith("but 3 were given, as accel_trainer calls it")
    assert exit_code_of(error) == ExitCode.USER_CODE
    assert (
        exit_code_of(raised_through(OURS, error=TypeError("unsupported operand type(s) for +")))
        == ExitCode.INTERNAL
    )


def test_a_part_that_failed_is_judged_by_its_error() -> None:
    failed = PartFailed("metric F1 failed (ZeroDivisionError: by zero)")
    failed.__cause__ = raised_through(OURS, USERS)
    assert (
        describe_error(failed)
        == "metric F1 failed (ZeroDivisionError: by zero), at /project/train.py:2 in call"
    )
    failed.__cause__ = raised_through(OURS)
    assert exit_code_of(failed) == ExitCode.INTERNAL
    assert (
        exit_code_of(raised_through(USERS, error=ConfigError("CONFIG", "the fact: the fix")))
        == ExitCode.USAGE
    )


def test_a_lost_connection_in_a_forward_is_not_the_models_fault() -> None:
    lost, failed = RuntimeError("[gloo] Connection closed by peer"), RuntimeError("shapes")

    class Layer(nn.Module):
        def forward(self) -> None: ...

    def of_forward(error: Exception) -> Exception:
        layer = Layer()
        fail = lambda: (_ for _ in ()).throw(error)  # noqa: E731
        layer.forward = lambda: caller("torch.nn.functional")(fail)  # type: ignore[method-assign]
        try:
            caller(OURS)(layer)
        except RuntimeError as caught:
            caught.__traceback__ = without_this_file(caught)
            return caught
        raise AssertionError

    assert find_user_code(of_forward(lost)) is None
    assert find_user_code(of_forward(failed)) == "in Layer of the model"


def test_a_long_message_is_cut_and_one_line() -> None:
    error = raised_through(USERS, error=torch.OutOfMemoryError("many\nwords " * 100))
    assert len(describe_error(error)) < 400
    assert "\n" not in describe_error(error)


def test_every_package_that_this_one_imports_is_known() -> None:
    found = set[str]()
    for path in (ROOT / "accel_trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module).partition(".")[0])
    found.discard("accel_trainer")  # files of callbacks, which are loaded by their paths
    found.discard("typing_extensions")  # for mypy alone
    assert found - sys.stdlib_module_names <= LIBRARIES
