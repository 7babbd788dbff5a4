from __future__ import annotations

import itertools
import math
import re

import pytest

from accel_trainer.core.batch_plan import BatchConfig, BatchPlan
from accel_trainer.core.errors import ConfigError, DataError, ExitCode
from accel_trainer.core.wording import counted

PLANS = [
    BatchPlan(
        num_samples=num_samples,
        global_batch_size=global_batch,
        per_device_batch_size=micro,
        num_processes=num_processes,
        drop_last=drop_last,
    )
    for num_samples, global_batch, micro, num_processes, drop_last in itertools.product(
        (1, 7, 24, 25, 31), (1, 2, 6, 12, 24), (1, 3, 5, 64), (1, 2, 3, 4, 6), (False, True)
    )
    if global_batch <= num_samples and global_batch % num_processes == 0
]


def positions(plan: BatchPlan, step: int) -> list[int]:
    """What all processes together train in a step, in order of process and micro-batch."""
    return [
        p
        for rank in range(plan.num_processes)
        for micro in plan.micro_batches(step, rank)
        for p in micro
    ]


def test_a_step_batch_has_the_same_samples_for_every_split() -> None:
    for plan in PLANS:
        for step in range(plan.steps_per_epoch):
            first = step * plan.global_batch_size
            last = min(first + plan.global_batch_size, plan.num_samples)
            assert positions(plan, step) == list(range(first, last)), plan
            assert plan.step_batch_size(step) == last - first, plan


def test_an_epoch_has_all_samples_once_but_the_short_step_of_drop_last() -> None:
    for plan in PLANS:
        seen = [p for step in range(plan.steps_per_epoch) for p in positions(plan, step)]
        full = plan.num_samples // plan.global_batch_size * plan.global_batch_size
        assert seen == list(range(full if plan.drop_last else plan.num_samples)), plan


def test_all_processes_have_as_many_micro_batches_and_none_is_too_large() -> None:
    for plan in PLANS:
        for step in range(plan.steps_per_epoch):
            shares = [plan.micro_batches(step, rank) for rank in range(plan.num_processes)]
            assert {len(micros) for micros in shares} == {len(shares[0])}, plan
            assert all(map(len, shares[0])), plan
            for micros in shares:
                assert max(map(len, micros)) <= plan.per_device_batch_size, plan
                assert all(map(len, micros[:-1])), plan  # only the last may be empty


def test_an_exact_plan_has_the_same_micro_batches_for_any_processes() -> None:
    for num_samples, global_batch, micro in itertools.product(
        (65, 71, 100, 128), (16, 32, 64), (4, 8)
    ):
        plans = [
            BatchPlan(
                num_samples=num_samples,
                global_batch_size=global_batch,
                per_device_batch_size=micro,
                num_processes=number,
                reduce="exact",
            )
            for number in (1, 2, 4, 8, 16)
            if number <= global_batch // micro
        ]
        for step in range(plans[0].steps_per_epoch):
            whole = plans[0].micro_batches(step, 0)
            assert len(whole) == global_batch // micro
            assert [position for part in whole for position in part] == positions(plans[0], step)
            assert max(map(len, whole)) - min(map(len, whole)) <= 1
            for plan in plans[1:]:
                dealt = [plan.micro_batches(step, rank) for rank in range(plan.num_processes)]
                assert [part for parts in dealt for part in parts] == whole, plan
                assert {len(parts) for parts in dealt} == {plan.accumulation_steps}


def test_parts_of_a_step_batch_differ_by_at_most_one_sample() -> None:
    for plan in PLANS:
        for step in range(plan.steps_per_epoch):
            sizes = [
                sum(map(len, plan.micro_batches(step, rank))) for rank in range(plan.num_processes)
            ]
            assert max(sizes) - min(sizes) <= 1, plan


def test_accumulation_steps_are_the_micro_batches_of_a_full_step() -> None:
    for plan in PLANS:
        assert plan.accumulation_steps == len(plan.micro_batches(0, 0)), plan


def test_a_short_step_may_leave_some_processes_without_samples() -> None:
    plan = BatchPlan(num_samples=13, global_batch_size=12, per_device_batch_size=4, num_processes=3)
    assert [plan.micro_batches(1, rank) for rank in range(3)] == [
        [range(12, 13)],
        [range(13, 13)],
        [range(13, 13)],
    ]


@pytest.mark.parametrize(
    ("config", "num_processes", "expected"),
    [
        (BatchConfig(per_device_batch_size=8), 1, (8, 8, 1)),
        (BatchConfig(per_device_batch_size=8), 4, (32, 8, 1)),
        (BatchConfig(per_device_batch_size=8, accumulation_steps=3), 2, (48, 8, 3)),
        (BatchConfig(per_device_batch_size=8, global_batch_size=64), 2, (64, 8, 4)),
        (BatchConfig(per_device_batch_size=8, global_batch_size=20), 1, (20, 8, 3)),
        (BatchConfig(per_device_batch_size=8, global_batch_size=4), 2, (4, 2, 1)),
        (
            BatchConfig(per_device_batch_size=8, global_batch_size=64, accumulation_steps=2),
            2,
            (64, 16, 2),
        ),
        (
            BatchConfig(per_device_batch_size=8, global_batch_size=10, accumulation_steps=3),
            1,
            (10, 4, 3),
        ),
    ],
)
def test_the_config_gives_global_batch_micro_batch_and_accumulation(
    config: BatchConfig, num_processes: int, expected: tuple[int, int, int]
) -> None:
    plan = config.plan(100, num_processes=num_processes)
    assert (plan.global_batch_size, plan.per_device_batch_size, plan.accumulation_steps) == expected
    assert plan.steps_per_epoch == math.ceil(100 / plan.global_batch_size)


def test_the_product_in_the_description_of_a_plan_is_its_global_batch() -> None:
    num_products = 0
    for size, of_all, accumulation, processes in itertools.product(
        (1, 7, 8, 64), (None, 24, 50, 100), (1, 3), (1, 2, 4)
    ):
        config = BatchConfig(
            per_device_batch_size=size, global_batch_size=of_all, accumulation_steps=accumulation
        )
        if config.resolved_global_batch_size(processes) % processes:
            continue
        plan = config.plan(1000, num_processes=processes)
        described = plan.describe()
        assert described.startswith(f"{counted(plan.global_batch_size, 'sample')} per step")
        factors = re.search(r"\((\d+) per device x (\d+) process(?:es)? x (\d+) acc", described)
        if factors is not None:
            assert math.prod(map(int, factors.groups())) == plan.global_batch_size
            num_products += 1
        elif "(" in described:
            assert f"micro-batches of at most {plan.per_device_batch_size})" in described
        else:
            assert plan.per_device_batch_size == plan.global_batch_size
    assert num_products > 20


def test_what_there_is_one_of_is_described_in_the_singular() -> None:
    config = BatchConfig(per_device_batch_size=4, accumulation_steps=2)
    described = config.plan(8, num_processes=1).describe()
    assert "1 process " in described
    assert "1 step per epoch" in described


@pytest.mark.parametrize(
    ("config", "num_processes", "message"),
    [
        (BatchConfig(global_batch_size=250), 8, "global batch 250 is not divisible by 8 processes"),
        (BatchConfig(global_batch_size=2), 4, "global batch 2 is not divisible by 4 processes"),
        (BatchConfig(global_batch_size=1001), 1, "global batch 1001 is larger than the 1000"),
        (BatchConfig(per_device_batch_size=501), 2, "larger than the 1000 training samples"),
        (
            BatchConfig(per_device_batch_size=128, accumulation_steps=8),
            1,
            "set --batch-size to at most 125, or --global-batch-size to at most 1000",
        ),
        (BatchConfig(global_batch_size=1002), 3, "or --global-batch-size to at most 999$"),
    ],
)
def test_arithmetic_that_cannot_work_says_the_values_and_the_fix(
    config: BatchConfig, num_processes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config.plan(1000, num_processes=num_processes)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "field", ["per_device_batch_size", "global_batch_size", "accumulation_steps", "eval_batch_size"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"batch.{field} is {value}: set it to 1 or more"):
        BatchConfig(**{field: value})


@pytest.mark.parametrize("field", ["global_batch_size", "per_device_batch_size", "num_processes"])
def test_a_plan_of_nothing_is_refused(field: str) -> None:
    sizes = {
        "num_samples": 4,
        "global_batch_size": 2,
        "per_device_batch_size": 1,
        "num_processes": 1,
    }
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        BatchPlan(**{**sizes, field: 0})


@pytest.mark.parametrize(("num_samples", "num_processes"), [(0, 1), (0, 4), (1, 2), (3, 4)])
def test_fewer_samples_than_processes_are_refused_with_both_numbers(
    num_samples: int, num_processes: int
) -> None:
    """Fault (Data, config and users' code): no data, fewer samples than processes or than a step ->
    an error with the numbers before the first step; a run can train on a single sample. A
    BatchNorm that would at some step get only one value per channel is an error before the first
    step, also for a resume on a different number of processes; if your own loader causes it,
    `accel-trainer doctor` explains the error of that step
    """
    with pytest.raises(
        DataError,
        match=f"DATA_TOO_SMALL.*{num_samples} training samples? for {num_processes} process.*: add",
    ) as caught:
        BatchConfig(per_device_batch_size=1).plan(num_samples, num_processes=num_processes)
    assert caught.value.exit_code == ExitCode.DATA
    assert BatchConfig(per_device_batch_size=1).plan(4, num_processes=4).steps_per_epoch == 1


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [3, 4, 7, 100, 127, 128, 129, 383, 384, 385])
def test_only_the_default_batch_fits_itself_to_the_data(
    num_samples: int, num_processes: int
) -> None:
    plan = BatchConfig().plan(num_samples, num_processes=num_processes)
    assert plan.global_batch_size % num_processes == 0
    left_out = min(num_samples, 128 * num_processes) - plan.global_batch_size
    assert 0 <= left_out < num_processes
