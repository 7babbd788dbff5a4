"""A public name that is gone says what to use instead, as docs/releases.md does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from accel_trainer.cli.main import find_commands
from accel_trainer.core.errors import ConfigError
from accel_trainer.removed import REMOVED, refuse_removed_command
from tests.cli.conftest import run_command

NAMES = {old for old in REMOVED if old.startswith("accel_trainer.")}
PAGE = Path(__file__).parents[1] / "docs" / "releases.md"


def test_the_import_of_each_name_that_is_gone_names_what_to_use() -> None:
    for old in NAMES:
        module, name = old.rsplit(".", 1)
        with pytest.raises(ImportError, match=rf"^{old} is gone: use {REMOVED[old]}, see docs"):
            getattr(importlib.import_module(module), name)


def test_what_to_use_is_there() -> None:
    for new in REMOVED.values():
        if new.startswith("accel_trainer."):
            module, name = new.rsplit(".", 1)
            assert hasattr(importlib.import_module(module), name)
        elif new.startswith("recipes/"):
            assert (PAGE.parents[1] / new).is_file()
        elif new.startswith("accel-trainer "):
            assert new.split()[1] in find_commands()


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    for module in ("accel_trainer", "accel_trainer.vision"):
        assert not hasattr(importlib.import_module(module), "Lodaer")


def test_the_page_of_releases_has_the_same_table() -> None:
    section = PAGE.read_text().partition("## Removed names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", section, re.M)
    assert {old: new.replace("`", "") for old, new in rows} == REMOVED


def test_a_command_that_is_gone_names_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    for old in REMOVED.keys() - NAMES:
        _, command, *flags = old.split()
        if not flags:
            code, out, err = run_command(capsys, [command, "a", "b"])
            assert (code, out) == (64, "")
            assert f"{old} is gone: use {REMOVED[old]}, see docs" in err


def test_a_flag_that_is_gone_names_what_to_use() -> None:
    refuse_removed_command("plan", ["--seconds", "0.5"])
    for old in REMOVED.keys() - NAMES:
        _, command, *flags = old.split()
        for flag in flags:
            for spelling in (flag, f"{flag}=5"):
                with pytest.raises(ConfigError, match=f"{old} is gone: use {REMOVED[old]}, see"):
                    refuse_removed_command(command, ["--lr", spelling])


def test_a_flag_that_is_gone_is_named_before_arguments_that_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for old in REMOVED.keys() - NAMES - {"accel-trainer plan --hours"}:  # recipes have it
        _, command, *flags = old.split()
        for words in ([*flags], ["a", *flags], ["a", *flags, "b"], ["a", f"{''.join(flags)}=b"]):
            code, out, err = run_command(capsys, [command, *words])
            assert (code, out) == (64, "")
            assert f"{old} is gone: use {REMOVED[old]}, see docs" in err, words
