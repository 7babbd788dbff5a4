"""The processes of a launch meet, also after a restart."""

from __future__ import annotations

import os
import socket

import pytest

from accel_trainer import ProcessError
from accel_trainer.process_group import join_processes


@pytest.mark.parametrize("reason", ["nobody", "somebody else"])
def test_others_that_cannot_be_reached_are_told_by_their_address(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        rank = 1
        if reason == "somebody else":
            taken.listen()
            rank = 0
        variables = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        monkeypatch.setattr(os, "environ", variables)
        with pytest.raises(ProcessError) as caught:
            join_processes("gloo", timeout_s=1)
    message = str(caught.value)
    assert message.startswith(
        f"error[RENDEZVOUS]: process {rank} of 4 did not meet the others at 127.0.0.1:{port} "
    )
    assert ("EADDRINUSE" in message) == (reason == "somebody else")
    assert "\n" not in message
