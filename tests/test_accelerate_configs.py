from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).parents[1] / "accelerate_configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_accepts_every_key(path: Path) -> None:
    assert load_config_from_file(str(path)).num_processes >= 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_head_says_how_to_launch_it_and_what_to_edit(path: Path) -> None:
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"accelerate launch --config_file accelerate_configs/{path.name} " in line for line in head)
    assert any(line.startswith("# Edit:") for line in head)


def test_accelerate_refuses_an_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text((FOLDER / "cpu.yaml").read_text() + "max_restarts: 3\n")
    with pytest.raises(ValueError, match="max_restarts"):
        load_config_from_file(str(tmp_path / "x.yaml"))


def start(name: str, script: Path, *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *options, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch_all(tmp_path: Path, name: str, *options_of_each: list[str]) -> set[str]:
    """Return `rank/processes` of every process that the launches start."""
    script = tmp_path / "probe.py"
    # One write per process, so that lines do not mix.
    script.write_text(
        "import os; e = os.environ; os.write(1, f\"{e.get('RANK', 0)}/{e.get('WORLD_SIZE', 1)}\\n\".encode())"
    )
    launches = [start(name, script, *options) for options in options_of_each]
    outputs = [launch.communicate(timeout=100)[0] for launch in launches]
    assert [launch.returncode for launch in launches] == [0] * len(launches)
    return set("".join(outputs).split())


@pytest.mark.parametrize(
    ("name", "started"), [("cpu.yaml", {"0/1"}), ("mps.yaml", {"0/1"}), ("multi_cpu.yaml", {"0/2", "1/2"})]
)
def test_a_launch_starts_the_processes_it_promises(tmp_path: Path, name: str, started: set[str]) -> None:
    assert launch_all(tmp_path, name, []) == started


def test_two_launches_make_a_multi_node_run(tmp_path: Path) -> None:
    port = ["--main_process_port", free_port()]
    ranks = [[*port, "--machine_rank", rank] for rank in "01"]
    assert launch_all(tmp_path, "multi_node_cpu.yaml", *ranks) == {"0/2", "1/2"}
