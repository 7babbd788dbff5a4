"""What a loop over plain accelerate does on other numbers of processes, as our pages say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .. import processes

NUM_SAMPLES = 42
GLOBAL_BATCH = 8


def train(folder: Path, is_seedable: bool) -> None:
    """Train one epoch; rank 0 writes the samples of each step and the weights."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=is_seedable)
    )
    set_seed(0)
    ids = torch.arange(NUM_SAMPLES)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(ids, inputs, (inputs.sum(1) > 0).long())
    loader: Any = DataLoader(data, GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = []
    for sample_ids, batch, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(sorted(accelerator.gather(sample_ids).tolist()))
    if accelerator.is_main_process:
        weights = [parameter.tolist() for parameter in model.parameters()]
        found = {"steps": steps, "weights": weights}
        (folder / f"{accelerator.num_processes}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("is_seedable", [False, True])
def test_plain_accelerate_has_other_bits_on_two_processes(
    tmp_path: Path, is_seedable: bool
) -> None:
    for number in (1, 2):
        processes.run(
            train, tmp_path, is_seedable, num_processes=number, folder=tmp_path / str(number)
        )
    one, two = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (1, 2))
    assert one["weights"] != two["weights"]
    assert [sum(map(len, each["steps"])) for each in (one, two)] == [NUM_SAMPLES, 48], "repeated"
    is_same = [ours == theirs for ours, theirs in zip(one["steps"], two["steps"], strict=True)]
    assert is_same == [is_seedable] * 5 + [False]
