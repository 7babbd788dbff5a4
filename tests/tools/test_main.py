from __future__ import annotations

import subprocess
import sys

import pytest

from accel_trainer.tools.main import main


def test_without_a_command_each_is_listed_with_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("convert SOURCE --to FILE", "inspect RUN_OR_CHECKPOINT", "launch", "status RUN"):
        assert f"\n  {name}\n      " in shown


@pytest.mark.parametrize(
    ("typed", "said"),
    [("inspct", "did you mean inspect?"), ("lunch", "did you mean launch?"), ("zzz", "choose one of ")],
)
def test_an_unknown_command_is_one_line_that_names_the_nearest(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed]) == 64
    error = capsys.readouterr().err
    assert error.startswith(f"accel_trainer: error[USAGE]: {typed!r} is not a command: {said}")
    assert error.count("\n") == 1


def test_only_the_command_that_is_called_is_imported() -> None:
    probe = (
        "import sys; from accel_trainer.tools.main import main; main(['status', '/nowhere'])\n"
        "print([name for name in sys.modules if name.startswith('accel_trainer.tools.')])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['accel_trainer.tools.main', 'accel_trainer.tools.status']"
