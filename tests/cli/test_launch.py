"""`accel-trainer launch`: what accelerate refuses is one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.cli.main import main
from tests.cli.conftest import run_command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nosuch", "train.py"], "unrecognized arguments: --nosuch"),
        (["--num_processes", "x", "train.py"], "invalid int value: 'x'"),
        (["--multi_gpu", "--num_processes", "1", "train.py"], "You need to use at least 2 process"),
        (["--config_file", "bad.yaml", "train.py"], "accelerate cannot launch: ParserError: while"),
        (["--config_file", "program.yaml", "train.py"], "could not determine a constructor for"),
    ],
)
def test_what_accelerate_refuses_is_one_line(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ACCEL_TRAINER_LAUNCHER", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    (tmp_path / "bad.yaml").write_text("num_processes: {a: [1\n")
    (tmp_path / "program.yaml").write_text("!!python/object/apply:os.mkdir [ran]\n")
    code, out, err = run_command(capsys, ["launch", *flags])
    assert (code, out, err.count("\n")) == (64, "", 1), err
    assert said in err
    assert not (tmp_path / "ran").exists()


def test_the_help_lists_the_flags_of_its_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    listed, _, example = capsys.readouterr().out.partition("example: ")
    flags = re.findall(r"--\w+", example.partition(".py")[0])
    assert flags
    assert all(f"  {flag}" in listed for flag in flags)


@pytest.mark.slow  # torchrun takes seconds to start
def test_what_torchrun_shows_last_is_the_line_of_the_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from accel_trainer import RecipeConfig, main\nmain(print, RecipeConfig)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(program), "--learning-rate", "1"]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, "torchrun's own"
    assert re.findall(r"traceback : (error.*)", ended.stderr) == [
        "error[CONFIG]: unknown flag --learning-rate: did you mean --lr?"
    ]


def test_several_processes_on_the_cpu_are_started(tmp_path: Path) -> None:
    """As accelerate's launcher says it does with these flags; it starts one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nopen(os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE'], 'w').close()\n"
    )
    launch = [sys.executable, "-m", "accel_trainer", "launch", "--cpu", "--num_processes", "2"]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([*launch, program], cwd=tmp_path, env=environment, check=True)
    assert {"0 of 2", "1 of 2"} <= {each.name for each in tmp_path.iterdir()}
