"""Free ports, for launchers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that nobody uses.

    It is below those that systems give away, so that nobody gets it by chance.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            return port
