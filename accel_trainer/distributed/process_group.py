"""The process group of a launch, also after a restart."""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..core.errors import ExitCode, ProcessError, reason_of

# Served by this process, and kept: the others may already be forming the next group with them.
_stores: dict[tuple[str, int], Store] = {}


def init_process_group(
    backend: str, *, timeout_s: float, device: torch.device | None = None
) -> None:
    """Form the process group of this launch, also after a shutdown or a restart. **Collective.**

    `device` is the GPU of this process. Without it, NCCL's barriers guess one and can hang.

    Raises ProcessError if the other processes cannot be reached.
    """
    rank = int(os.environ["RANK"])
    num_processes = int(os.environ["WORLD_SIZE"])
    _choose_interface(os.environ["MASTER_ADDR"])
    try:
        met = _meet(rank, timedelta(seconds=timeout_s))
        store = _unused_prefix(met, rank, num_processes, timeout_s=timeout_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=num_processes,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
    except (RuntimeError, OSError) as error:
        raise ProcessError(
            "RENDEZVOUS",
            f"process {rank} of {num_processes} did not meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} s "
            f"({reason_of(error)}): start all, with the address of process 0's machine and a free "
            "port there, open between the machines",
            rank,
            ExitCode.INTERNAL,
        ) from error


def find_cpu_group(*, timeout_s: float) -> dist.ProcessGroup | None:
    """Return the group that reduces CPU tensors; None: the default group does. **Collective.**

    A default group from before the run, such as accelerate's for GPUs, may only have NCCL.
    """
    has_one = "cpu:" in dist.get_backend_config()
    return None if has_one else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def _meet(rank: int, timeout: timedelta) -> Store:
    """Return the store of the rendezvous, which process 0 serves unless the launcher does."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    loopback = "127.0.0.1" if host == "localhost" else host
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: Store
    if serves and (host, port) in _stores:
        store = _stores[host, port]
    elif serves and os.name == "posix" and loopback.startswith("127."):
        # torch would listen on all interfaces, this server listens on the loopback only.
        with socket.create_server((loopback, port)) as server:
            store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in its stubs
                host,
                port,
                None,
                True,
                timeout,
                wait_for_workers=False,
                master_listen_fd=server.detach(),
            )
    else:
        store = next(rendezvous("env://", timeout=timeout))[0]
    if serves:
        _stores[host, port] = store
    store.set_timeout(timeout)
    return store


def _choose_interface(host: str) -> None:
    """Make gloo use the interface that leads to `host`, unless the user chose one.

    By default gloo announces the address of this machine's host name, often 127.0.0.1 or 127.0.1.1
    (torch 2.13).
    """
    # The rendezvous reports an unknown host, which is an OSError here.
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        mine = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == mine for address in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _unused_prefix(store: Store, rank: int, num_processes: int, *, timeout_s: float) -> Store:
    """Return `store` with a prefix that no earlier group has used, the same on all processes.

    **Collective.**

    The store may outlive the processes, and gloo would then read addresses of an earlier attempt.
    The main process chooses the prefix and sends it to each process that reports itself. A
    launcher's restart count would not do, since each machine counts separately.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"here/{rank}", name)
        prefix = store.get(f"prefix/{name}").decode()
        store.set(f"joined/{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    deadline_s = time.monotonic() + timeout_s
    missing = list(range(1, num_processes))
    while missing:
        for other in missing:
            if store.check([f"here/{other}"]):
                store.set(f"prefix/{store.get(f'here/{other}').decode()}", name)
        missing = [other for other in missing if not store.check([f"joined/{name}/{other}"])]
        if time.monotonic() > deadline_s:
            raise dist.DistStoreError(f"{len(missing)} processes are missing")
        time.sleep(0.01)
    return PrefixStore(name, store)
