"""A program: one part of each kind, some settings, and how it is interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from .data import DATA, EVALUATIONS
from .draft import Draft, new_draft
from .faults import AT_THE_END, Fault, as_python, draw_fault
from .mistakes import MISTAKES
from .models import MODELS
from .training import OBSERVERS, OPTIMIZERS, SETTINGS, STATES, STEPS, TASKS

Parts = dict[str, Callable[[Draft], None]]

# Later parts may change what earlier ones have set.
ONE_OF: dict[str, Parts] = {
    "model": MODELS,
    "task": TASKS,
    "data": DATA,
    "evaluation": EVALUATIONS,
    "optimizer": OPTIMIZERS,
    "step": STEPS,
}
SOME_OF: dict[str, Parts] = {"states": STATES, "observers": OBSERVERS, "settings": SETTINGS}
NUM_FAULTS = 2
SHARDED = {"shards", "gathered shards"}


@dataclass(frozen=True)
class Program:
    """The names of its parts. `processes` are those of its attempts, by turns."""

    model: str = "plain"
    task: str = "classes"
    data: str = "dataset"
    evaluation: str = "one set"
    optimizer: str = "sgd"
    step: str = "plain"
    states: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    processes: tuple[int, ...] = (1,)
    faults: tuple[Fault, ...] = ()
    mistake: str = ""

    def __str__(self) -> str:
        """Return it as Python, without what the simplest program has."""
        return as_python(self)

    def draft(self, folder: Path) -> Draft:
        """Return what this process of the program hands to `build_trainer`."""
        torch.manual_seed(0)
        draft = new_draft(folder)
        for kind, parts in ONE_OF.items():
            parts[getattr(self, kind)](draft)
        for kind, parts in SOME_OF.items():
            for name in getattr(self, kind):
                parts[name](draft)
        if self.mistake:
            MISTAKES[self.mistake](draft)
        return draft

    def simpler(self) -> Iterator[Program]:
        """Yield programs with one part less."""
        for each in fields(self):
            if each.name in SOME_OF or each.name == "faults":
                parts = getattr(self, each.name)
                for index in range(len(parts)):
                    yield replace(self, **{each.name: parts[:index] + parts[index + 1 :]})
            elif each.name in ONE_OF and getattr(self, each.name) != each.default:
                yield replace(self, **{each.name: each.default})
        if len(self.processes) > 1 or (self.processes == (2,) and not SHARDED & {*self.settings}):
            yield replace(self, processes=(1,))

    @property
    def refusal(self) -> str | None:
        """The code of the error with which the documentation says that it is refused."""
        return next((code for code, is_refused in REFUSALS if is_refused(self)), None)

    @property
    def keeps_all(self) -> bool:
        """Whether a run that is killed keeps all checkpoints of one that is not.

        What a callback asks for comes a step later on several processes, and not after a kill.
        """
        return "few checkpoints" not in self.settings and "asks for saves" not in self.observers

    def says(self, line: str) -> bool:
        """Whether it prints such a line although it is quiet."""
        return "skips NaN" in self.settings and "the gradient is NaN or inf, so it was not" in line


REFUSALS: list[tuple[str, Callable[[Program], bool]]] = [
    # docs/step.md
    ("BATCH_SIZE", lambda each: each.task == "pairs" and _accumulates(each)),
    # docs/fsdp.md
    ("FSDP", lambda each: bool(SHARDED & {*each.settings}) and _cannot_be_sharded(each)),
]


def _cannot_be_sharded(program: Program) -> bool:
    return (
        program.model == "odd weights"
        or program.optimizer in ("two together", "turns", "updates")
        or bool({"exact", "check"} & {*program.settings})
    )


def _accumulates(program: Program) -> bool:
    return bool({"accumulation", "exact"} & {*program.settings})


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    chosen = random.Random(seed)
    parts = {kind: chosen.choice([*parts]) for kind, parts in ONE_OF.items()}
    some = {
        kind: _some(chosen, [*parts], most=4 if kind == "settings" else 2)
        for kind, parts in SOME_OF.items()
    }
    settings = {*some["settings"]}
    processes = chosen.choice([(1,), (2,)])
    if "exact" in settings:
        counts = [(1, 2), (2, 1), (4, 2, 1)]
        if parts["task"] == "pairs":  # on 4 processes, its step has no micro-batches
            counts.remove((4, 2, 1))
        processes = chosen.choice(counts)
    if SHARDED & settings:
        processes = (2,)
    faults = sorted(
        (draw_fault(chosen, max(processes)) for _ in range(NUM_FAULTS)),
        key=lambda fault: fault.moment in AT_THE_END,  # what comes after it finds a finished run
    )
    return Program(**parts, **some, processes=processes, faults=tuple(faults))


def _some(chosen: random.Random, names: list[str], *, most: int) -> tuple[str, ...]:
    """Return up to `most` of the names, in their order."""
    kept = chosen.sample(names, chosen.randint(0, most))
    if {*kept} >= SHARDED:
        kept.remove("shards")
    return tuple(name for name in names if name in kept)
