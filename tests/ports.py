"""Free ports, for launchers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle

_SIZE = 50  # of a block of ports


def free_port() -> int:
    """Return a port that nobody uses, nor gets before it is used.

    It is below those that systems give away, and in a block that no other process of tests has.
    """
    for port in _own_block()[1]:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            return port
    raise AssertionError


@cache
def _own_block() -> tuple[socket.socket, Iterator[int]]:
    """Return a socket at the first port of a block, which holds it, and the others in turn."""
    while True:
        first = random.SystemRandom().randrange(10_000, 20_000, _SIZE)
        holder = socket.socket()
        try:
            holder.bind(("0.0.0.0", first))
        except OSError:
            holder.close()
        else:
            return holder, cycle(range(first + 1, first + _SIZE))
