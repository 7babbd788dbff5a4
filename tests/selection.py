"""Which tests run together, and which part of them runs today."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pytest

NUM_PARTS = 9  # of the tests that `make test` leaves out: the workflow of a change runs one a day
# There is one in each process, and it starts in no time.
_CHEAP = ("one_that_forks",)


def part_of_today(*, num_parts: int = NUM_PARTS) -> str:
    """Return the part of a day as `--part` takes it: each follows the one before, by UTC."""
    return f"{int(time.time() // 86400) % num_parts + 1}/{num_parts}"


def is_of_today(item: Any, part: str) -> bool:
    """Whether a test runs with a part: that it belongs to it, or is marked `daily`."""
    return item.get_closest_marker("daily") is not None or is_in_part(item.nodeid, part)


def is_in_part(name: str, part: str) -> bool:
    """Whether a test belongs to a part, such as 1/3. Each test belongs to exactly one.

    A name keeps its part when others are added, and neighbours are in different parts.
    """
    number, num_parts = map(int, part.split("/"))
    return zlib.crc32(plain_name(name).encode()) % num_parts == number - 1


def plain_name(name: str) -> str:
    """Return the name of a test without the group that pytest-xdist has added."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


def mark_groups(items: list[Any]) -> None:
    """Let tests run in one process that share a fixture of a module or of the session.

    They share it also if only a third test uses what each of them uses.
    """
    used = [_shared_fixtures(item) for item in items]
    groups: dict[str, str] = {}  # by fixture: the first name of all that are used together
    for names in used:
        joined = {groups.get(name, name) for name in names}
        for name in [*names, *[name for name, group in groups.items() if group in joined]]:
            groups[name] = min(joined)
    for item, names in zip(items, used, strict=True):
        if names:
            item.add_marker(pytest.mark.xdist_group(groups[names[0]]))


def name_groups(items: list[Any]) -> None:
    """Let the names of tests end with the groups that pytest-xdist reads from them.

    It appends them to `_nodeid` itself, which pytest does not read from 9.2 on.
    """
    for item in items:
        name = getattr(item, "_nodeid", item.nodeid)
        if name != item.nodeid:
            item._id = type(item.id).parse(name)


def _shared_fixtures(item: Any) -> list[str]:
    """Return the names of the fixtures of a wide scope that a test uses, itself or indirectly."""
    definitions = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
    return [
        f"{PurePath(definition.baseid).stem}.{definition.argname}"
        for definition in definitions
        if definition.scope in ("session", "module")
        and definition.baseid  # else it is pytest's own
        and definition.argname not in _CHEAP
    ]


Names = Mapping[str, Sequence[str]]  # of tests by their file, from the folder of all tests


def mark_slow(items: list[Any], in_make_test: Names, not_in_make_test: Names) -> None:
    """Mark the tests as `slow` that only `make test-all` runs: see `whole_runs.py`.

    `name` is the first case of a test that is not slow in the first list, and all cases in the
    second; `name[*]` is all of them, `name[1:]` all but the first, and `name[case]` that one.
    """
    seen = set()
    for item in items:
        path = item.nodeid.partition("::")[0].removeprefix("tests/")
        if item.get_closest_marker("slow"):
            continue
        name = item.originalname
        is_first = (path, name) not in seen
        seen.add((path, name))
        kept = {item.name, f"{name}[*]", *[name] * is_first}
        left_out = {item.name, name, *[f"{name}[1:]"] * (not is_first)}
        if kept.isdisjoint(in_make_test.get(path, kept)) or not left_out.isdisjoint(
            not_in_make_test.get(path, ())
        ):
            item.add_marker(pytest.mark.slow)


def keep(config: pytest.Config, items: list[Any], is_kept: Callable[[Any], bool]) -> None:
    """Deselect all other items."""
    kept = [item for item in items if is_kept(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
