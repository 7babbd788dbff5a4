"""All checks of an audit, in their order: files first, then what has to be trained again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from accel_trainer import OneLineError
from accel_trainer.commands import (
    RunReader,
    UnknownRecipeError,
    counted,
    filesystem,
    prepare_directory,
)

from ..replay.replay import Replay, environment_changes
from . import records, weights
from .evidence import Evidence
from .stretches import check_stretch, choose, find_stretches
from .verdict import Verdict


def audit(
    run: RunReader,
    recipe: Path | None,
    *,
    count: int,
    seed: int,
    max_steps: int | None,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[list[Verdict], UnknownRecipeError | None]:
    """Return a verdict on each file of `run`, and on `count` stretches trained again in `folder`.

    The error says why no stretch was trained, if the user first has to name the recipe.

    Raises:
        OneLineError: files cannot be read.
    """
    evidence = Evidence(run)
    checks = {**weights.CHECKS, **records.CHECKS}
    verdicts = [Verdict(what, *check(evidence)) for what, check in checks.items()]
    if count == 0:
        return verdicts, None
    stretches = find_stretches(evidence)
    chosen = choose(stretches, count=count, seed=seed, max_steps=max_steps)
    if not chosen:
        fact = "the run has neither two checkpoints of one attempt nor its start"
        fix = "next time, keep more with --checkpoint.keep-for-replay 5"
        return [*verdicts, Verdict("training", "not checked", f"{fact}: {fix}")], None
    try:
        replay = Replay.of(run, recipe)
    except OneLineError as error:
        refused = error if isinstance(error, UnknownRecipeError) else None
        return [*verdicts, Verdict("training", "not checked", error.message)], refused
    doubts = _find_doubts(run, replay.recipe)
    if doubts:
        say(f"the same bits cannot be expected: {', '.join(doubts)}")
    num_steps = sum(each.until - each.after for each in chosen)
    say(
        f"training {counted(num_steps, 'step')} again, {len(chosen)} of "
        f"{counted(len(stretches), 'segment')}, with {replay.recipe}"
    )
    filesystem.make_directory(folder)
    for stretch in chosen:
        what = f"steps {stretch.after + 1} to {stretch.until}"
        place = prepare_directory(folder / f"steps-{stretch.after}-{stretch.until}")
        found = check_stretch(evidence, replay, stretch, place, doubts=doubts)
        verdicts.append(Verdict(what, *found))
    return verdicts, None


def _find_doubts(run: RunReader, recipe: Path) -> list[str]:
    """Return the reasons why the bits may differ here from the run's."""
    doubts = environment_changes(run)
    code = run.environment.get("code")
    recorded = code.get("sha256") if isinstance(code, dict) else None
    if recorded != filesystem.sha256_of(recipe):
        doubts.append(f"{recipe.name} is not the recipe that the run recorded")
    if operations := run.result.get("nondeterministic_operations"):
        doubts.append(f"without deterministic kernels: {', '.join(map(str, operations))}")
    return doubts
