"""What README and docs point at exists: links, headings, paths, flags and names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import accel_trainer
import accel_trainer.vision

from .commands import command_flags, launcher_flags, recipe_flags
from .pages import PAGES, ROOT, anchors_of, links_of, page_name, prose_of

# Paths of the repository, from its root or from the package, with wildcards.
_PATH = re.compile(r"(?<![\w/.<])(?:accel_trainer|accelerate_configs|benchmarks|docs|recipes|tests)/[\w./*-]*[\w*/]")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")

# Of docker, sbatch, mypy and pytest; the doctor's `--json` stands beside the flags of the recipe that it looks at.
OF_OTHERS = {
    "--shm-size",
    "--ipc",
    "--signal",
    "--gpus-per-node",
    "--gpus-per-task",
    "--strict",
    "--effort",
    "--json",
}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors_of(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_path_of_the_repository_exists(page: Path) -> None:
    for path in _PATH.findall(page.read_text()):
        assert list(ROOT.glob(path)), f"{path}: no such file"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_flag_exists(page: Path) -> None:
    commands = ("doctor", "export", "plan", "predict", "replay", "report", "runs", "verify")
    known = recipe_flags("recipes/cifar.py") | launcher_flags() | OF_OTHERS
    known = known.union(*map(command_flags, commands))
    named = _FLAG.findall(prose_of(page))
    assert [flag for flag in named if flag not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_of_ours_exists(page: Path) -> None:
    for name in re.findall(r"`accel-trainer ([a-z-]+)", prose_of(page)):
        assert command_flags(name)


def test_the_reference_has_every_public_name_once() -> None:
    page = ROOT / "docs" / "reference.md"
    listed = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    wanted = [f"accel_trainer.{name}" for name in accel_trainer.__all__]
    wanted += [f"accel_trainer.vision.{name}" for name in accel_trainer.vision.__all__]
    assert sorted(listed) == sorted(wanted)
