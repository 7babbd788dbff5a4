"""The processes of a launch meet, also after a restart."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from accel_trainer import ConfigError, ProcessError, RuntimeConfig
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.distributed.process_group import init_process_group

from .. import processes
from ..joined import joined_processes
from ..ports import free_port


@pytest.mark.parametrize("reason", ["nobody", "somebody else"])
def test_processes_that_cannot_be_reached_are_named_by_their_address(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Fault (Signals and processes): the port is taken -> an error with the address, after at most
    `--runtime.timeout-s`; `accel-trainer doctor` reports it in advance
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        rank = 1
        if reason == "somebody else":
            taken.listen()
            rank = 0
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        monkeypatch.setattr(os, "environ", variables)
        with pytest.raises(ProcessError) as caught:
            init_process_group("gloo", timeout_s=1)
    message = str(caught.value)
    assert message.startswith(
        f"error[RENDEZVOUS]: process {rank} of 4 did not meet the others at 127.0.0.1:{port} "
    )
    assert ("ddress already in use" in message) == (reason == "somebody else")
    assert "\n" not in message


def test_gloo_uses_the_interface_to_the_main_process_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would tell other machines the address of this one's name: 127.0.1.1 on many."""
    for given, used in (({}, "lo"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "ib0")):
        variables = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            **given,
        }
        monkeypatch.setattr(os, "environ", variables)
        with pytest.raises(ProcessError):
            init_process_group("gloo", timeout_s=0.1)
        assert variables["GLOO_SOCKET_IFNAME"] == used


@pytest.mark.parametrize(
    ("address", "heard"),
    [("127.0.0.1", {"127.0.0.1"}), ("localhost", {"127.0.0.1"}), ("0.0.0.0", {"::", "0.0.0.0"})],
)
def test_processes_of_one_machine_meet_where_no_other_can_reach_them(
    tmp_path: Path, address: str, heard: set[str]
) -> None:
    """torch would listen on all interfaces, and whoever reaches its store can write there."""
    job = processes.run(serve, address, num_processes=2, folder=tmp_path)
    assert set(job.output().split()) <= heard


def serve(address: str) -> None:
    os.environ["MASTER_ADDR"] = address
    port = int(os.environ["MASTER_PORT"])
    for _ in range(2):  # a second run of these processes meets there again
        with joined_processes() as accelerator:
            if accelerator.is_main_process:
                connections = psutil.Process().net_connections()
                listening = {
                    c.laddr.ip for c in connections if c.status == "LISTEN" and c.laddr.port == port
                }
                assert listening
                print(*listening)


def test_processes_that_the_program_has_joined_are_not_single_ones(
    tmp_path: Path,
) -> None:
    """As with torch's `spawn` and `init_process_group(rank=, world_size=)`, without variables."""
    several = processes.start(
        join_by_hand,
        free_port(),
        num_processes=2,
        folder=tmp_path,
        variables=lambda rank, num_processes: {"OWN_RANK": str(rank)},
    )
    assert several.wait() == [0, 0], several.output()
    processes.run(join_by_hand, 0, folder=tmp_path / "alone")


def join_by_hand(port: int) -> None:
    rank = int(os.environ.get("OWN_RANK", "0"))
    num_processes = 2 if port else 1
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port or free_port()}",
        rank=rank,
        world_size=num_processes,
    )
    if num_processes == 1:
        assert start_accelerator(RuntimeConfig()).num_processes == 1
        return
    with pytest.raises(ConfigError, match="has joined 2 processes, but WORLD_SIZE is 1: set"):
        start_accelerator(RuntimeConfig())
