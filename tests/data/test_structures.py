"""Samples of any structure: what is target, what is input, and what a start says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Batch, StepOutput, build_trainer, start_run

from ..training import planted

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
KINDS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a pair": (lambda index: (X[index], index % 3), ""),
    "three parts": (
        lambda index: (X[index], X[index], index % 3),
        "3 parts: the last is its target",
    ),
    "alone": (lambda index: X[index], "no target"),
    "one part": (lambda index: (X[index],), "no target"),
    "a dict": (lambda index: {"x": X[index]}, "no target"),
    "a dict with labels": (lambda index: {"x": X[index], "labels": index % 3}, ""),
}


class Samples:
    def __init__(self, make: Callable[[int], Any], start: int, size: int) -> None:
        self.make, self.start, self.size = make, start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(self.start + index)


class Any3:
    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        inputs = batch.inputs["x"] if isinstance(batch.inputs, dict) else batch.inputs
        if isinstance(inputs, tuple):
            assert torch.equal(*inputs)
            inputs = inputs[0]
        losses = model(inputs).square().mean(1)
        if batch.targets is not None:
            losses = losses + batch.targets
        return StepOutput(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_may_have_any_structure_which_the_start_names(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = KINDS[kind]
    config = planted.make_config(tmp_path)
    config = replace(config, run=replace(config.run, quiet=False))
    with start_run(config, recipe="structures") as run:
        build_trainer(
            run,
            model=nn.Linear(6, 3),
            task=Any3(),
            train_set=Samples(make, 0, 32),
            eval_sets=Samples(make, 32, 16),
        ).fit()
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a sample")]
    assert len(found) == bool(said)
    assert all(said in line for line in found)
