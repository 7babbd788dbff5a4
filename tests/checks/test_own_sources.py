"""Code that is edited between two starts of a run is named at the second."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from accel_trainer.checks.own_sources import own_sources
from tests import workload

SAID = "edited since the last start of this run: "


def test_a_run_that_continues_names_what_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, net = tmp_path / "recipe.py", tmp_path / "net_of_somebody.py"
    for path in (recipe, net):
        path.write_text("activation = 'relu'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(recipe)])
    # The workers of xdist have no file, as a notebook has none.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(recipe), raising=False)
    importlib.import_module(net.stem)
    config = workload.make_config(tmp_path / "run")
    found = []
    for max_steps, edited in ((1, ()), (2, ()), (3, [net]), (4, [recipe, net]), (5, ())):
        for path in edited:
            path.write_text(path.read_text() + "  # tanh")
        workload.train(replace(config, trainer=replace(config.trainer, max_steps=max_steps)))
        lines = capsys.readouterr().out.splitlines()
        found.append([line.partition(SAID)[2] for line in lines if SAID in line])
    assert found == [[], [], [net.name], [f"{net.name}, {recipe.name}"], []]


def test_the_sources_of_a_notebook_are_its_classes_and_functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hashes(source: str) -> dict[str, str]:
        cell = tmp_path / f"cell-{len([*tmp_path.iterdir()])}"
        cell.write_text(source)  # where inspect looks it up
        notebook = types.ModuleType("__main__")
        exec(compile(source, str(cell), "exec"), vars(notebook))
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "__main__", notebook)
            return own_sources()

    net = "import torch\nclass Net:\n    def forward(self, x): return x.relu()\n"
    loss = "def loss(x): return x.mean()\n"
    before, after = hashes(net + loss), hashes(net.replace("relu", "tanh") + loss)
    assert before.keys() == after.keys() == {"Net", "loss"}
    assert [name for name in before if before[name] != after[name]] == ["Net"]
