"""Cases that vary what others show: each costs a training, and each promise has a test already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

NUM_THREADS = int(os.environ.get("TEST_THREADS", "1"))  # of torch, in most tests: `make isa-test`


def slow(cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize` marked `slow`; a case with several arguments is a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def slow_but(shown: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all `cases` in their order, those that are not in `shown` marked `slow`."""
    kept = list(shown)
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are not all among the cases"
    return [case if case in kept else slow([case])[0] for case in cases]
