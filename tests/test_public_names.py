"""Public names are imported one by one, when they are first used."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

import accel_trainer.commands

PACKAGES = (accel_trainer, accel_trainer.commands)


def test_a_package_has_the_names_that_its_list_imports_and_no_others() -> None:
    for package in PACKAGES:
        api = importlib.import_module(f"{package.__name__}.api")
        assert package.__all__ == dir(package) == sorted(api.__all__)
        for name in package.__all__:
            assert getattr(package, name) is getattr(api, name), name
        with pytest.raises(AttributeError, match=f"{package.__name__}.*Lodaer"):
            _ = package.Lodaer


def test_an_import_of_an_unknown_name_lists_the_close_ones() -> None:
    for package, name, facts in (
        ("accel_trainer", "train", ("Trainer", "accel_trainer.__all__")),
        ("accel_trainer", "EarlyStopping", (r"TrainerConfig(patience=)",)),
        ("accel_trainer", "LightningModule", ("a task",)),
        ("accel_trainer", "Zzz", ("accel_trainer has no", "accel_trainer.__all__")),
        ("accel_trainer.commands", "read_runs", ("read_run", "accel_trainer.commands.__all__")),
        ("accel_trainer.vision", "load_image", ("load_images", "accel_trainer.vision.__all__")),
    ):
        with pytest.raises(ImportError) as caught:
            exec(f"from {package} import {name}", {})
        assert all(fact in str(caught.value) for fact in (name, *facts))
        assert not hasattr(importlib.import_module(package), name)


def test_the_version_of_the_package_is_an_attribute() -> None:
    assert accel_trainer.__version__ == importlib.metadata.version("accel-trainer")


def test_modules_are_imported_from_a_package_as_its_names_are() -> None:
    exec("from accel_trainer import build_trainer, lab, vision", {})


def test_what_needs_no_torch_is_imported_without_it() -> None:
    probe = (
        "import sys\n"
        "from accel_trainer import ConfigError, ExitCode\n"
        "from accel_trainer.commands import CommandParser, filesystem, read_run, tell\n"
        "print('torch' in sys.modules)\n"
        "from accel_trainer import Trainer\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


_WAITING = """
import os, sys, accel_trainer
print("torch" in sys.modules, os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize(
    ("given", "found"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")]
)
def test_threads_that_wait_sleep_before_torch_is_imported(
    given: Mapping[str, str], found: str
) -> None:
    """In a program that imports this package first; what the user has set stays."""
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    run = subprocess.run(
        [sys.executable, "-c", _WAITING], env=others | given, capture_output=True, text=True
    )
    assert run.stdout.split() == ["False", found]
