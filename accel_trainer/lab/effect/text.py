"""Tells which settings change the result of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accel_trainer.commands import RunReader, counted

from ..story import short
from .effect import Effect, Effects

_MAX_VALUE = 30


def lines_of(found: Effects, first: RunReader, second: RunReader) -> Iterator[str]:
    """Yield the lines of an answer about two runs."""
    values = [run.settings for run in (first, second)]

    def table(effects: Sequence[Effect]) -> Iterator[str]:
        rows = [
            (
                name,
                " -> ".join(short(each.get(name), _MAX_VALUE) for each in values),
                _where(effect),
            )
            for effect in effects
            for name in effect.names
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, change, where in rows:
            yield f"  {name:{widths[0]}}  {change:{widths[1]}}  {where}"

    num_all = len(found.nothing) + sum(len(each.names) for each in found.effects)
    if not num_all:
        yield "no setting that affects the training differs"
    now = [each for each in found.effects if each.step <= found.until]
    if now:
        yield f"of {counted(num_all, 'setting')}, these change the result:"
        yield from table(now)
    if later := [each for each in found.effects if each.step > found.until]:
        yield f"changes nothing up to step {found.until}, but later:"
        yield from table(later)
    if found.nothing:
        end = f", nor in steps {found.tail[0] + 1} to {found.tail[1]}" if found.tail else ""
        yield f"changes nothing up to step {found.until}{end}: {', '.join(found.nothing)}"
    if found.no_part:
        yield f"does not affect training: {', '.join(found.no_part)}"
    yield from _others(found)
    yield f"trained: {counted(found.num_trainings, 'time')}, {found.num_steps:,} steps"


def _where(effect: Effect) -> str:
    together = f"together with {', '.join(effect.names)}; " if len(effect.names) > 1 else ""
    others = "" if effect.is_alone else ", with B's values of others"
    return f"{together}from step {effect.step}: {', '.join(effect.parts)}{others}"


def _others(found: Effects) -> Iterator[str]:
    """Yield what is known about what no training has tried."""
    names = ", ".join(found.not_tried)
    if found.repeats_second:
        also = f", so the rest changes nothing: {names}" if names else ""
        yield f"with all of B's settings, A gives the numbers that B recorded{also}"
    elif found.repeats_second is False:
        rest = f"not tried: {names}" if names else "no other difference is known"
        yield f"with all of B's settings, A still differs from what B recorded; {rest}"
    elif names:
        yield f"not tried: {names}"
