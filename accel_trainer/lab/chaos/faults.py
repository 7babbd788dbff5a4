"""The faults of a run, in words such as `kill@7`, and seeded plans of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from accel_trainer import ConfigError
from accel_trainer.commands import counted

SAVE_EVERY = 3
"""Steps from one checkpoint to the next, as in a dry run."""

KINDS = {
    "kill": "SIGKILL {value:g} s after step {step}",
    "write": "SIGKILL in the middle of a change of the disk, {value:g} changes after step {step}",
    "term": "SIGTERM after step {step}",
    "damage": "SIGKILL after step {step}, and a flipped byte in the newest checkpoint",
    "full": "a full disk from step {step} on, until the run has ended",
    "workers": "SIGTERM after step {step}, then with --batch.num-workers {value:g}",
    "processes": "SIGTERM after step {step}, then with --num-processes {value:g}",
}
_WORD = re.compile(r"(?P<kind>[a-z]+)@(?P<step>\d+)(:(?P<value>\d+(\.\d+)?))?")
_MAX_DELAY_S = 0.05
_MAX_CHANGES = 60  # a save makes about half of them
_FIRST_SAVED = SAVE_EVERY + 1
_MIN_STEPS = 3  # a plan has two faults, each after a step but the last


@dataclass(frozen=True)
class Fault:
    """What ends one start of a run, after `step` steps; 0: before the first.

    `value` depends on the kind: seconds, a number of changes, of data workers or of processes, or
    the seed that decides the byte.
    """

    kind: str
    step: int
    value: float = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + (f":{self.value:g}" if self.value else "")

    @property
    def described(self) -> str:
        """The fault in plain words."""
        return KINDS[self.kind].format(step=self.step, value=self.value)


Plan = tuple[Fault, ...]
"""Faults in the order of their steps: each ends a start, and the last start has none."""


def parse_plan(text: str) -> Plan:
    """Return the plan that `show_plan` has written. Raises ConfigError for anything else."""
    faults = []
    for word in text.split():
        found = _WORD.fullmatch(word)
        if found is None or found["kind"] not in KINDS:
            fix = f"write KIND@STEP or KIND@STEP:VALUE; the kinds are {', '.join(KINDS)}"
            raise ConfigError("CHAOS", f"--faults {word!r}: {fix}")
        faults.append(Fault(found["kind"], int(found["step"]), float(found["value"] or 0)))
    steps = [fault.step for fault in faults]
    if steps != sorted(set(steps)):
        fact = f"--faults has the steps {steps}"
        raise ConfigError("CHAOS", f"{fact}: put them in ascending order, each once")
    return tuple(faults)


def show_plan(plan: Plan) -> str:
    """Return the plan as text."""
    return " ".join(map(str, plan))


def draw_plans(
    num_plans: int, *, seed: int, num_steps: int, num_workers: int, num_processes: int | None
) -> list[Plan]:
    """Return plans for a run of `num_steps`, of which the first few cover all kinds of faults.

    `num_workers` and `num_processes` are what the run is changed to; None: its processes stay. A
    plan with a change of processes has no other fault but the change back.

    Raises ConfigError if the run is too short.
    """
    if num_steps < _MIN_STEPS:
        fact = f"the recipe trains only {counted(num_steps, 'step')}"
        raise ConfigError("CHAOS", f"{fact}: let it train {_MIN_STEPS} or more")
    draw = random.Random(seed)
    others = [kind for kind in KINDS if kind != "processes"]
    deck: list[str] = []
    plans: list[Plan] = []
    for number in range(num_plans):
        if num_processes is not None and number % 4 == 3:
            first, second = sorted(draw.sample(range(1, num_steps), 2))
            plans.append((Fault("processes", first, num_processes), Fault("term", second)))
            continue
        count = 2 if number < 4 else draw.randint(1, 4)
        while len(deck) < count:
            deck += draw.sample(others, len(others))
        kinds = [deck.pop(0) for _ in range(count)]
        steps = sorted(draw.sample(range(1, num_steps), min(count, num_steps - 1)))
        plans.append(
            tuple(
                _draw_fault(kind, step, draw, num_workers)
                for kind, step in zip(kinds, steps, strict=False)
            )
        )
    return plans


def _draw_fault(kind: str, step: int, draw: random.Random, num_workers: int) -> Fault:
    values = {
        "kill": round(draw.uniform(0, _MAX_DELAY_S), 3),
        "write": draw.randrange(_MAX_CHANGES),
        "damage": draw.randrange(1000),
        "workers": num_workers,
    }
    return Fault(kind, step, values.get(kind, 0))


def shorter(plan: Plan) -> list[Plan]:
    """Return the plans with one fault fewer, but not the empty one."""
    if len(plan) < 2:
        return []
    return [plan[:left_out] + plan[left_out + 1 :] for left_out in range(len(plan))]


def simpler(plan: Plan) -> Iterator[Plan]:
    """Yield plans with one fault made simpler, the simplest first: a stop after step 1."""
    for number, fault in enumerate(plan):
        earliest = plan[number - 1].step + 1 if number else 1
        for simple in _simpler(fault):
            if simple.step >= earliest:
                yield (*plan[:number], simple, *plan[number + 1 :])


def _simpler(fault: Fault) -> Iterator[Fault]:
    steps = [step for step in (1, _FIRST_SAVED) if step < fault.step]
    if fault.kind != "term":
        yield from (Fault("term", step) for step in (*steps, fault.step))
    if fault.kind == "kill" and fault.value:
        yield replace(fault, value=0)
    yield from (replace(fault, step=step) for step in steps)
