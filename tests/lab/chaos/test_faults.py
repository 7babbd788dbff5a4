"""Plans of faults: their words, how they are drawn, and how they are made simpler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest

from accel_trainer import ConfigError, TrainerView
from accel_trainer.checkpoint.loading import load_checkpoint
from accel_trainer.commands import filesystem
from accel_trainer.lab.chaos.disk import FaultyDisk
from accel_trainer.lab.chaos.fault_bringer import FaultBringer
from accel_trainer.lab.chaos.faults import (
    KINDS,
    Fault,
    draw_plans,
    parse_plan,
    shorter,
    show_plan,
    simpler,
)
from accel_trainer.lab.chaos.runs import damage_newest
from tests.faults.disks import installed
from tests.faults.tiny_run import continue_run, name_at, valid_steps


def test_a_plan_is_read_from_the_words_that_show_it() -> None:
    plans = draw_plans(100, seed=1, num_steps=24, num_workers=2, num_processes=2)
    assert [parse_plan(show_plan(plan)) for plan in plans] == plans
    assert parse_plan("") == ()


@pytest.mark.parametrize("text", ["kill", "kill@x", "boom@3", "kill@3 term@3", "term@5 kill@2"])
def test_words_that_are_no_plan_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="--faults "):
        parse_plan(text)


def test_a_seed_decides_the_plans_and_four_have_every_kind() -> None:
    def draw(seed: int) -> list[tuple[Fault, ...]]:
        return draw_plans(4, seed=seed, num_steps=24, num_workers=2, num_processes=2)

    assert draw(3) == draw(3) != draw(4)
    for seed in range(20):
        assert {fault.kind for plan in draw(seed) for fault in plan} == {*KINDS}


def test_where_processes_cannot_change_no_plan_changes_them() -> None:
    plans = draw_plans(50, seed=0, num_steps=9, num_workers=0, num_processes=None)
    assert "processes" not in {fault.kind for plan in plans for fault in plan}


def test_a_run_that_is_too_short_for_two_faults_is_one_line() -> None:
    for num_steps, steps in {1: "1 step:", 2: "2 steps:"}.items():
        with pytest.raises(ConfigError, match=steps):
            draw_plans(4, seed=0, num_steps=num_steps, num_workers=2, num_processes=2)
    assert draw_plans(4, seed=0, num_steps=3, num_workers=2, num_processes=2)


@pytest.mark.parametrize(
    ("culprits", "left"),
    [
        ({"kill", "write", "term", "damage", "full", "workers"}, "term@1"),
        ({"workers"}, "workers@1:2"),
        ({"damage"}, "damage@1:5"),
    ],
)
def test_a_plan_shrinks_to_one_early_fault(culprits: set[str], left: str) -> None:
    plan = parse_plan("write@3:9 damage@8:5 workers@15:2 full@20")
    while found := [
        each
        for each in [*shorter(plan), *simpler(plan)]
        if culprits & {fault.kind for fault in each}
    ]:
        plan = found[0]
    assert show_plan(plan) == left


def test_a_fault_that_needs_another_before_it_keeps_both() -> None:
    plan = parse_plan("kill@2 full@5 term@9")
    while found := [each for each in [*shorter(plan), *simpler(plan)] if len(each) > 1]:
        plan = found[0]
    assert show_plan(plan) == "term@1 term@4"


def test_a_kill_among_the_first_changes_counts_them_from_the_start_once(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path, "write", 0, 5)
    with installed(disk):
        filesystem.write_file_atomic(tmp_path / "run.json", b"{}")
        left = disk.num_left
        FaultBringer().on_fit_start(cast(TrainerView, None))
    assert disk.num_left == left != 5


def test_a_flipped_byte_makes_the_newest_checkpoint_invalid(tmp_path: Path) -> None:
    for seed in range(3):
        run = tmp_path / str(seed)
        run.mkdir()
        continue_run(run, last_step=3)
        damage_newest(run, random.Random(seed))
        loaded = load_checkpoint(run / "checkpoints")
        assert loaded is not None
        assert loaded.name < name_at(3)


def test_the_only_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    continue_run(tmp_path, last_step=1)
    damage_newest(tmp_path, random.Random(0))
    assert valid_steps(tmp_path) == [1]
