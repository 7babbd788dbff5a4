"""Where a loop runs: a folder that is in use, a disk that fills, processes with uneven data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_trainer import CheckpointError, ConfigError, OutputError, exact_run
from tests import processes
from tests.faults.disks import can_mount, fill, mount_small_disk
from tests.own_loop.kills import left_by

NUM_SAMPLES = 12


def parts_of(accelerator: Accelerator, num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(num_samples, 3)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return {"model": model, "optimizer": optimizer, "loader": loader}


def fit(folder: Path, filler: Path | None = None) -> None:
    accelerator = Accelerator(cpu=True)
    parts = parts_of(accelerator)
    # All checkpoints stay: one that is deleted after the disk was filled makes room again.
    with exact_run(accelerator, folder, **parts, save_every=1, keep_last=100) as run:
        for _ in run.epochs(3):
            for (inputs,) in run.batches():
                if filler is not None and run.step == 4:
                    fill(filler)
                accelerator.backward(parts["model"](inputs).sum())
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()
                run.row(step=run.step)


def test_a_folder_has_one_start_at_a_time(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    folder = tmp_path / "run"
    with exact_run(accelerator, folder, **parts_of(accelerator)):
        second = processes.start(fit, folder, folder=tmp_path / "logs")
        assert second.wait() != [0]
    assert "locked by" in second.output()
    fit(folder)


def fill_and_go_on(mount: Path) -> None:
    mount_small_disk(mount, "size=8m")
    fit(mount / "whole")
    with pytest.raises((CheckpointError, OutputError)):
        fit(mount / "run", mount / "filler")
    (mount / "filler").unlink()
    fit(mount / "run")
    assert left_by(mount / "run") == left_by(mount / "whole")


@pytest.mark.skipif(not can_mount(), reason="needs a user namespace")
def test_a_loop_goes_on_after_its_disk_was_full(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    processes.run(fill_and_go_on, tmp_path / "disk", folder=tmp_path / "logs")


def start_with_uneven_rounds(folder: Path) -> None:
    uneven = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=uneven)
    parts = parts_of(accelerator, NUM_SAMPLES - 2)
    with (
        pytest.raises(ConfigError, match="the processes have 3, 2 batches"),
        exact_run(accelerator, folder, **parts),
    ):
        pass


def start_with_the_same_batches(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    parts = parts_of(accelerator)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3))
    parts["loader"] = DataLoader(data, batch_size=2, shuffle=True)
    with (
        pytest.raises(ConfigError, match="all 2 processes read the same batches"),
        exact_run(accelerator, folder, **parts),
    ):
        pass
    sampler = DistributedSampler(data)
    parts["loader"] = DataLoader(data, batch_size=2, sampler=sampler)
    with exact_run(accelerator, folder, **parts):
        pass


def test_a_loader_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    processes.run(
        start_with_the_same_batches,
        tmp_path / "run",
        num_processes=2,
        folder=tmp_path / "logs",
    )


def test_processes_with_other_numbers_of_rounds_are_refused(tmp_path: Path) -> None:
    processes.run(
        start_with_uneven_rounds, tmp_path / "run", num_processes=2, folder=tmp_path / "logs"
    )


def test_a_launch_that_has_started_one_process_of_several_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    for name in ("MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"):  # as accelerate's launcher sets them
        monkeypatch.setenv(name, "no")
    with (
        pytest.raises(ConfigError, match="announced several processes but started one"),
        exact_run(accelerator, tmp_path / "run", **parts_of(accelerator)),
    ):
        pass
    assert not (tmp_path / "run").exists()


class Centre:
    """A mean over the samples of this process."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def fit_what_differs(folder: Path, differs: str, num_steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    parts = parts_of(accelerator)
    model, centre = parts["model"], Centre()
    if differs == "model":
        model = parts["model"] = accelerator.unwrap_model(model)
    with exact_run(accelerator, folder, **parts, states={"centre": centre}) as run:
        for (inputs,) in run.steps(num_steps):
            print("a round")
            accelerator.backward(model(inputs).square().sum())
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            if differs == "centre":
                centre.value = centre.value.lerp(inputs.mean(), 0.1)


@pytest.mark.parametrize(("differs", "name"), [("centre", "centre.value"), ("model", "weight")])
@pytest.mark.parametrize("num_before", [0, 1])
def test_what_differs_between_processes_is_refused_after_a_step(
    differs: str, name: str, num_before: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_processes": 2, "folder": tmp_path / "logs"}
    if num_before:
        processes.run(fit_what_differs, tmp_path / "run", "nothing", num_before, **options)
    job = processes.start(fit_what_differs, tmp_path / "run", differs, 100, **options)
    assert 0 not in job.wait()
    assert "CKPT_INEXACT" in job.output()
    assert name in job.output()
    assert job.output().count("a round") == 1 + num_before
    assert len([*(tmp_path / "run" / "checkpoints").glob("step-*")]) == num_before
