"""A campaign: a recipe, its undisturbed runs, runs with plans of faults, and what they showed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from accel_trainer.commands import checkpoints_in, filesystem, read_run

from .explain import Departure, explain, files_below, own_numbers_that_vary, touched_files
from .faults import Plan, shorter, simpler
from .runs import Ending, run_all, survive
from .start import Recipe

_MAX_TRIES = 24


@dataclass(frozen=True)
class Undisturbed:
    """Two runs without faults, of which `again` was in a new Python.

    `touched` are the files that they changed in the current folder.
    """

    reference: Ending
    again: Ending
    touched: Sequence[str]

    @property
    def num_steps(self) -> int:
        """The steps of the reference."""
        return checkpoints_in(self.reference.run)[-1].step

    @property
    def left_out(self) -> set[str]:
        """Numbers that callbacks log, such as times, which differ in each run."""
        return own_numbers_that_vary(self.reference, self.again)

    @property
    def is_exact(self) -> bool:
        """Whether the number of processes may change without changing the bits."""
        return bool(self._settings["batch.reduce"] == "exact")

    @property
    def num_workers(self) -> int:
        """The data workers of each process."""
        return int(self._settings["batch.num_workers"])

    @property
    def _settings(self) -> Mapping[str, Any]:
        return read_run(self.reference.run).settings


@dataclass(frozen=True)
class Verdict:
    """What a run with faults showed.

    `difference` is None if it ended as the reference did, or if `is_compared` is False.
    """

    ending: Ending
    difference: Departure | None = None
    is_compared: bool = True

    @property
    def has_failed(self) -> bool:
        """Whether the recipe did not survive."""
        return self.difference is not None or self.ending.problem is not None

    @property
    def outcome(self) -> str:
        """One word."""
        if self.ending.problem:
            return "FAILED"
        if self.ending.refused:
            return "refused"
        if self.difference:
            return "DIFFERENT"
        return "equal" if self.is_compared else "resumed"


def run_undisturbed(recipe: Recipe) -> Undisturbed:
    """Return two runs without faults, which may both have failed."""
    before = files_below(Path.cwd())
    again = replace(recipe.first("again"), is_in_new_python=True)
    endings = run_all(recipe, [survive(recipe.first("reference"), ()), survive(again, ())])
    by_name = {ending.folder.name: ending for ending in endings}
    touched = touched_files(before, files_below(Path.cwd()))
    return Undisturbed(by_name["reference"], by_name["again"], touched)


def judge(ending: Ending, undisturbed: Undisturbed) -> Verdict:
    """Compare how a run ended with the reference."""
    changes_processes = any(fault.kind == "processes" for fault in ending.plan)
    is_compared = undisturbed.is_exact or not changes_processes
    if ending.problem or ending.refused or not is_compared:
        return Verdict(ending, is_compared=is_compared)
    difference = explain(
        undisturbed.reference,
        ending,
        left_out=undisturbed.left_out,
        touched=undisturbed.touched,
    )
    return Verdict(ending, difference)


def try_plans(
    recipe: Recipe, undisturbed: Undisturbed, plans: Iterable[Plan], *, name: str
) -> Iterator[Verdict]:
    """Yield a verdict on each plan, as its run ends; runs that did not fail are deleted."""
    runs = (survive(recipe.first(f"{name}-{number}"), plan) for number, plan in enumerate(plans, 1))
    for ending in run_all(recipe, runs):
        verdict = judge(ending, undisturbed)
        if not verdict.has_failed:
            filesystem.remove_own([ending.folder], filesystem.files_in)  # this command has made it
        yield verdict


def shrink(failed: Verdict, recipe: Recipe, undisturbed: Undisturbed) -> Verdict:
    """Return the verdict on the shortest and simplest plan that is found to fail."""
    tries = 0
    while tries < _MAX_TRIES:
        plan = failed.ending.plan
        candidates = iter([*shorter(plan), *simpler(plan)])
        found: list[Verdict] = []
        while not found:
            some = list(islice(candidates, recipe.at_once))
            if not some:
                return failed
            verdicts = try_plans(recipe, undisturbed, some, name=f"try-{tries}")
            found = [each for each in verdicts if each.has_failed]
            tries += len(some)
        failed = min(found, key=lambda each: some.index(each.ending.plan))
    return failed
