"""Links, headings, paths, flags and names in README and docs exist."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from types import ModuleType

import pytest

import accel_trainer
import accel_trainer.commands
import accel_trainer.vision
from accel_trainer import ConfigError, parse_config
from accel_trainer.cli.main import find_commands
from accel_trainer.removed import REMOVED
from recipes import cifar, images

from .commands import command_flags, launcher_flags, recipe_flags
from .pages import PAGES, ROOT, anchors_of, links_of, page_name, prose_of

# Paths of the repository, from its root or from the package, with wildcards.
_PATH = re.compile(
    r"(?<![\w/.<])(?:accel_trainer|accelerate_configs|benchmarks|docs|recipes|tests)/[\w./*-]*[\w*/]"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")

_PLACEHOLDER = re.compile(r"[A-Z][A-Z/_]*|\.\.\.")  # placeholders for the reader's own values

# Flags of docker, sbatch, mypy, pytest, timm, accelerate's examples, trackers and benchmarks, and
# the doctor's `--json`.
OF_OTHERS = {
    "--part",
    "--number",
    "--simplify",
    "--shm-size",
    "--ipc",
    "--signal",
    "--gpus-per-node",
    "--gpus-per-task",
    "--strict",
    "--effort",
    "--json",
    "--device",
    "--amp-dtype",
    "--photos",
    "--record",
    "--minutes",
    "--cifar",
    "--logdir",
    "--backend-store-uri",
    "--checkpointing_steps",
}


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for page in {*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").rglob("*.md")}:
        for target in links_of(page):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            if not linked.exists():
                wrong.append(f"{page_name(page)}: {target}: no such file")
            elif anchor and anchor not in anchors_of(linked):
                wrong.append(f"{page_name(page)}: {target}: no such heading")
    assert wrong == []


def test_every_path_of_the_repository_exists() -> None:
    assert [
        f"{page_name(page)}: {path}: no such file"
        for page in PAGES
        for path in _PATH.findall(page.read_text())
        if not list(ROOT.glob(path))
    ] == []


def test_every_flag_exists() -> None:
    known = (
        recipe_flags("recipes/cifar.py")
        | recipe_flags("recipes/images.py")
        | launcher_flags()
        | OF_OTHERS
    )
    known = known.union(*map(command_flags, find_commands()))
    known |= {old.rpartition(" ")[2] for old in REMOVED}  # they are in a table of their own
    assert [
        f"{page_name(page)}: {flag}"
        for page in PAGES
        for flag in _FLAG.findall(prose_of(page))
        if flag not in known
    ] == []


def test_every_flag_that_is_shown_with_a_value_takes_it() -> None:
    shown = {
        (recipe, words): page_name(page)
        for page, recipe in itertools.product(PAGES, (cifar, images))
        for words in flags_with_values(prose_of(page), recipe)
    }
    refused = []
    for (recipe, words), page in shown.items():
        try:
            check_values(words, recipe)
        except ConfigError as error:
            refused.append(f"{page}: {error}")
    assert refused == []


def flags_with_values(prose: str, recipe: ModuleType) -> list[tuple[str, ...]]:
    """Return a recipe's flags that a text gives values: `--lr 0.1`, `--resume {auto,never}`."""
    known = recipe_flags(f"recipes/{recipe.__name__.rpartition('.')[2]}.py")
    found = []
    for span in re.findall(r"`(--[^`]+)`", prose):
        words = shlex.split(span)
        if len(words) > 1 and words[0] in known and not any(map(_PLACEHOLDER.fullmatch, words)):
            found.append(tuple(words))
    return found


def check_values(words: Sequence[str], recipe: ModuleType) -> None:
    """Raise ConfigError unless the recipe takes the flags, for each of `{several,values}`."""
    choices = [word[1:-1].split(",") if word.startswith("{") else [word] for word in words]
    for chosen in itertools.product(*choices):
        if not any(map(_PLACEHOLDER.fullmatch, chosen)):
            parse_config(recipe.Config, chosen, description="")


def test_a_value_that_a_flag_does_not_take_is_found() -> None:
    for wrong in (
        "--runtime.find-unused-parameters True",
        "--lr fast",
        "--mixed-precision {bf16,fp17}",
    ):
        (words,) = flags_with_values(f"use `{wrong}` for it", cifar)
        with pytest.raises(ConfigError):
            check_values(words, cifar)
    assert flags_with_values("`--lr`, `--track NAME ...`, `--hub ORG/NAME`, `lr 3`", cifar) == []


def test_every_command_of_ours_exists() -> None:
    named = re.compile(r"`accel-trainer ([a-z-]+)")
    for name in sorted({name for page in PAGES for name in named.findall(prose_of(page))}):
        assert f"accel-trainer {name}" in REMOVED or command_flags(name), name


def test_the_reference_has_every_public_name_once() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    listed = [
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    wanted = [f"accel_trainer.{name}" for name in accel_trainer.__all__]
    wanted += [f"accel_trainer.vision.{name}" for name in accel_trainer.vision.__all__]
    wanted += [f"accel_trainer.commands.{name}" for name in accel_trainer.commands.__all__]
    assert sorted(listed) == sorted(wanted)
