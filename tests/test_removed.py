"""A public name that is gone says what to use instead, as docs/releases.md does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from accel_trainer import ConfigError
from accel_trainer.removed import REMOVED, REMOVED_FLAGS, refuse_removed_flags

PAGE = Path(__file__).parents[1] / "docs" / "releases.md"


def test_the_import_of_each_name_that_is_gone_names_the_new_one() -> None:
    for old, new in REMOVED.items():
        module, name = f"accel_trainer.{old}".rsplit(".", 1)
        with pytest.raises(ImportError, match=rf"{re.escape(old)} is gone: use .*{new}, see docs"):
            getattr(importlib.import_module(module), name)
        module, name = f"accel_trainer.{new}".rsplit(".", 1)
        assert hasattr(importlib.import_module(module), name)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    for module in ("accel_trainer", "accel_trainer.vision"):
        assert not hasattr(importlib.import_module(module), "Lodaer")


def test_the_page_of_releases_has_the_same_table() -> None:
    section = PAGE.read_text().partition("## Removed names")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", section, re.M)) == REMOVED
    rows = re.findall(r"^\| `(\w+ --[\w-]+)` \| (.*) \|$", section, re.M)
    assert {old: new.replace("`", "") for old, new in rows} == REMOVED_FLAGS


def test_a_flag_that_is_gone_names_the_new_one() -> None:
    refuse_removed_flags("plan", ["--within", "0.5"])
    for old, new in REMOVED_FLAGS.items():
        command, flag = old.split()
        with pytest.raises(ConfigError, match=f"{old} is gone: use {new}, see docs"):
            refuse_removed_flags(command, ["--lr", flag])
