from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_accepts_every_key(path: Path) -> None:
    assert load_config_from_file(str(path)).num_processes >= 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_head_says_how_to_launch_it_and_what_to_edit(path: Path) -> None:
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(
        f"accelerate launch --config_file accelerate_configs/{path.name} " in line for line in head
    )
    assert any(line.startswith("# Edit:") for line in head)


def test_accelerate_refuses_an_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text((FOLDER / "cpu.yaml").read_text() + "max_restarts: 3\n")
    with pytest.raises(ValueError, match="max_restarts"):
        load_config_from_file(str(tmp_path / "x.yaml"))
