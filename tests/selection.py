"""Which tests run together, and which part of them runs today."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

NUM_PARTS = 3  # of the tests that `make test` leaves out: the workflow of a change runs one a day
# There is one in each process, and it starts in no time.
_CHEAP = ("one_that_forks",)


def part_of_today(*, num_parts: int = NUM_PARTS) -> str:
    """Return the part of a day as `--part` takes it: each follows the one before, by UTC."""
    return f"{int(time.time() // 86400) % num_parts + 1}/{num_parts}"


def is_in_part(name: str, part: str) -> bool:
    """Whether a test belongs to a part, such as 1/3. Each test belongs to exactly one.

    A name keeps its part when others are added, and neighbours are in different parts.
    """
    number, num_parts = map(int, part.split("/"))
    return zlib.crc32(plain_name(name).encode()) % num_parts == number - 1


def plain_name(name: str) -> str:
    """Return the name of a test without the group that pytest-xdist has added."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


def group_of(item: Any) -> str | None:
    """Return the name of the tests that must run in one process, because they share a training.

    That is the fixture of the widest scope which the test uses, itself or by way of others.
    """
    definitions = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
    shared = {
        scope: [
            f"{definition.baseid}:{definition.argname}"
            for definition in definitions
            if definition.scope == scope and definition.baseid and definition.argname not in _CHEAP
        ]
        for scope in ("session", "module")
    }
    if shared["session"]:
        return min(shared["session"]).partition(":")[2]
    return item.nodeid.partition("::")[0] if shared["module"] else None


def mark_whole_runs(items: list[Any], in_make_test: Mapping[str, Sequence[str]]) -> None:
    """Mark as `slow` what a file of whole runs has beside the tests that are named for it."""
    seen = set()
    for item in items:
        path = item.nodeid.partition("::")[0].removeprefix("tests/")
        names = in_make_test.get(path)
        if names is None or item.get_closest_marker("slow"):
            continue
        is_first = (path, item.originalname) not in seen
        seen.add((path, item.originalname))
        named = {item.name, f"{item.originalname}[*]", *[item.originalname] * is_first}
        if named.isdisjoint(names):
            item.add_marker(pytest.mark.slow)


def keep(config: pytest.Config, items: list[Any], is_kept: Callable[[Any], bool]) -> None:
    """Deselect all other items."""
    kept = [item for item in items if is_kept(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
