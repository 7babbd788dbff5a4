"""Some programs of `tests.programs`, and mistakes that they must notice."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.variants import slow_but

from .campaign import interrupted, tried, try_program
from .faults import Fault
from .mistakes import MISTAKES
from .program import ONE_OF, SHARDED, SOME_OF, Program, draw

SECONDS_OF_A_DAY = 86_400
NUM_A_DAY = 12
# The fewest parts with which each of these once fell.
FELL = [
    Program(step="SAM", observers=("counts",)),
    Program(model="folding", settings=("average",), faults=(Fault("update", 8),)),
    Program(model="frozen base", states=("anchor", "frozen"), faults=(Fault("update", 8),)),
    Program(model="momentum encoder", faults=(Fault("update", 5, "TERM"),)),
    Program(settings=("average", "shards"), processes=(2,)),
    Program(
        optimizer="schedule-free",
        observers=("stops",),
        settings=("average", "shards"),
        processes=(2,),
        faults=(Fault("update", 3, "TERM"),),
    ),
]


def alone() -> dict[str, Program]:
    """Return a program for each part, which has that one beside the simplest ones."""
    programs = {
        f"{kind}: {name}": Program(**{kind: name}) for kind in ONE_OF for name in ONE_OF[kind]
    }
    programs |= {name: Program(**{kind: (name,)}) for kind in SOME_OF for name in SOME_OF[kind]}
    for name, program in programs.items():
        counts = (2, 1) if name == "exact" else (2,) if name in SHARDED | {"task: pairs"} else (1,)
        programs[name] = replace(program, processes=counts, faults=(Fault("update", 5),))
    buffers = Program(model="buffers", settings=("shards",))
    programs["buffers in shards"] = replace(buffers, processes=(2,), faults=(Fault("update", 5),))
    return programs


ALONE = alone()
SHOWN = (
    "task: curriculum",
    "data: stream",
    "data: endless stream",
    "data: balanced",
    "evaluation: own",
    "optimizer: updates",
    "step: SAM",
    "centre",
    "skips NaN",
    "shards",
)


@pytest.mark.parametrize("name", slow_but(SHOWN, ALONE))
def test_a_program_of_one_part_leaves_the_same_bytes_after_a_kill(
    name: str, tmp_path: Path
) -> None:
    outcome = tried(ALONE[name], tmp_path / "program")
    assert not outcome.wrong, f"{outcome} {outcome.program}"
    assert outcome.num_kills == 1 or outcome.refused


@pytest.mark.parametrize("seed", slow_but([71], [*range(30), 71]))
def test_a_killed_program_leaves_the_bytes_of_an_unkilled_one(seed: int, tmp_path: Path) -> None:
    """Fault (Crash during a save): SIGKILL, or any signal, at any moment of each phase -> the
    newest committed checkpoint loads; the final weights are identical to those of an
    uninterrupted run
    """
    outcome = tried(draw(seed), tmp_path / "program")
    assert not outcome.wrong, f"{outcome} {outcome.program}"


@pytest.mark.parametrize("program", slow_but(FELL[:4], FELL), ids=str)
def test_a_program_that_once_fell_leaves_the_bytes_of_an_unkilled_one(
    program: Program, tmp_path: Path
) -> None:
    outcome = tried(program, tmp_path / "program")
    assert not outcome.wrong, str(outcome)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_a_kill_at_any_change_of_the_disk_leaves_the_same_bytes(
    tmp_path: Path, effort: int
) -> None:
    """Fault (Crash during a save): SIGKILL before, during or after any write to disk -> the newest
    committed checkpoint loads; the final weights are identical to those of an uninterrupted run

    Fault (Crash during a save): crash in a save, then in the resume, then again -> the newest
    committed checkpoint loads; the final weights are identical to those of an uninterrupted run

    Fault (Crash during a save): SIGKILL of a different process while the main one saves -> the
    checkpoint is either committed or absent; only the main process writes, so no file can be
    missing

    Fault (Resume): part of the state is not restored -> ruled out by tests that compare weights,
    EMA, optimizer, best checkpoint, counters and rows byte by byte
    """
    settings = ("average", "clipping", "accumulation", "patience", "few checkpoints")
    program = Program(model="norms", data="workers", observers=("watches",), settings=settings)
    assert not try_program(program, tmp_path).wrong
    changes = itertools.count(1, max(1, 40 // effort))
    for at, when in zip(changes, itertools.cycle(("before", "half", "after")), strict=False):
        killed = replace(program, faults=(Fault("disk", at, when=when),))
        outcome = interrupted(killed, tmp_path)
        assert not outcome.wrong, f"{outcome} {outcome.program}"
        if outcome.num_kills == 0:
            break  # the run makes no more changes
    assert at > 200


@pytest.mark.slow
@pytest.mark.daily
def test_the_programs_of_today_leave_the_bytes_of_unkilled_ones(tmp_path: Path) -> None:
    first = 1000 + NUM_A_DAY * int(time.time() // SECONDS_OF_A_DAY)
    outcomes = {
        seed: tried(draw(seed), tmp_path / str(seed)) for seed in range(first, first + NUM_A_DAY)
    }
    wrong = [
        f"python -m tests.programs --seed {seed} --simplify: {outcome} {outcome.program}"
        for seed, outcome in outcomes.items()
        if outcome.wrong
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mistake", slow_but(["a count in a pipe"], MISTAKES))
def test_a_program_with_a_mistake_does_not_pass(mistake: str, tmp_path: Path) -> None:
    honest = Program(processes=(2,), faults=(Fault("update", 8),))
    assert tried(replace(honest, mistake=mistake), tmp_path / "program").wrong


def test_a_program_prints_as_the_python_that_makes_it() -> None:
    assert all(eval(str(draw(seed))) == draw(seed) for seed in range(50))
