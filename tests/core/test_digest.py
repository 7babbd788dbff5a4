"""Digests: equal if all bits are, whatever the memory format and the split into parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_trainer import read_history
from accel_trainer.checkpoint.format import list_checkpoints, step_of
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.checkpoint.sharded import load_all
from accel_trainer.core.digest import digest_of, samples_digest, sum_of_samples
from tests import processes
from tests.workload import make_config, replace, train

STATE: dict[str, Any] = {
    "weight": torch.arange(24.0).reshape(1, 2, 3, 4),
    "count": torch.tensor(3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "groups": [{"lr": 0.1, "betas": [0.9, 0.99]}],
}


def changed(name: str, value: object) -> dict[str, Any]:
    return {**STATE, name: value}


@pytest.mark.parametrize(
    "other",
    [
        changed("weight", torch.nextafter(STATE["weight"], torch.tensor(1e9))),
        changed("weight", STATE["weight"].reshape(2, 1, 3, 4)),
        changed("weight", STATE["weight"].double()),
        changed("count", torch.tensor(4)),
        changed("groups", [{"lr": 0.1000001, "betas": [0.9, 0.99]}]),
        {**STATE, "more": torch.zeros(0)},
        {"other": STATE["weight"], **{name: STATE[name] for name in ("count", "half", "groups")}},
    ],
)
def test_a_digest_changes_with_any_bit_shape_type_or_name(other: dict[str, Any]) -> None:
    assert digest_of(STATE) != digest_of(other)


def test_a_digest_does_not_depend_on_memory_or_order() -> None:
    weight = STATE["weight"].to(memory_format=torch.channels_last)
    assert weight.stride() != STATE["weight"].stride()
    other = dict(reversed(changed("weight", weight).items()))
    assert digest_of(other) == digest_of(STATE)


def digest_of_samples(*parts: list[tuple[int, Tensor]]) -> str:
    return samples_digest(sum(sum_of_samples(part) for part in parts))


def test_the_digest_of_samples_adds_up_over_parts_in_any_order() -> None:
    ids = torch.randperm(1000)
    steps = [(step, ids[100 * step : 100 * step + 100]) for step in range(10)]
    whole = digest_of_samples(steps)
    halves = [(step, half) for step, each in steps for half in each.split(37)]
    assert digest_of_samples(halves[20:], halves[:20]) == whole
    assert digest_of_samples([(0, steps[0][1].flip(0)), *steps[1:]]) == whole


def test_the_digest_of_samples_knows_which_step_they_were_in() -> None:
    first, second = torch.arange(8).split(4)
    assert digest_of_samples([(1, first), (2, second)]) != digest_of_samples(
        [(1, second), (2, first)]
    )


def job(folder: Path, reduce: str) -> None:
    config = make_config(folder)
    batch = replace(config.batch, global_batch_size=16, per_device_batch_size=4, reduce=reduce)
    trainer = replace(config.trainer, digest_every_n_steps=1, log_every_n_steps=2)
    train(replace(config, batch=batch, trainer=trainer))


def digests(folder: Path) -> list[tuple[int, dict[str, str]]]:
    return [
        (
            row["optimizer_step"],
            {name: row[name] for name in row if name.startswith("digest/")},
        )
        for row in read_history(folder)
        if row["event"] == "train"
    ]


def test_one_and_two_processes_have_the_same_digests(tmp_path: Path) -> None:
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        processes.run(
            job, folder / "run", "exact", num_processes=num_processes, folder=folder / "logs"
        )
    one, two = (digests(tmp_path / str(number) / "run") for number in (1, 2))
    assert one == two
    assert {"digest/model", "digest/optimizer", "digest/ema"} <= one[0][1].keys()
    assert len({row["digest/samples_so_far"] for _, row in one}) == len(one)
    assert len({row["digest/model"] for _, row in one}) == len(one) > 3


def test_a_row_has_the_digests_of_the_checkpoint_after_its_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    processes.run(job, folder, "float", folder=tmp_path / "logs")
    rows = dict(digests(folder))
    newest = list_checkpoints(folder / "checkpoints")[-1]
    loaded = load_checkpoint(newest.parent, newest.name)
    assert loaded is not None
    stored = load_all(loaded.pieces)
    parts = ("model", "optimizer", "ema")
    assert {f"digest/{part}": digest_of(stored[part]) for part in parts}.items() <= rows[
        step_of(newest)
    ].items()
