"""Checks the launch: the addresses and ports of the processes."""

from __future__ import annotations

import ipaddress
import socket

from .findings import Check, LaunchContext

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def find_port(now: LaunchContext) -> str | None:
    """The port of the process group is free."""
    environ = now.environ
    is_main_process = environ.get("RANK") == "0"
    has_launcher = "TORCHELASTIC_RUN_ID" in environ  # torch's launcher already listens on the port
    if not is_main_process or "MASTER_PORT" not in environ or has_launcher:
        return None
    with socket.socket() as probe:
        # With this option a recently closed port counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(environ["MASTER_PORT"])))
        except OSError as error:
            fact = f"MASTER_PORT {environ['MASTER_PORT']} cannot be used ({error.strerror})"
            return f"{fact}: choose a free port"
    return None


def find_unknown_address(now: LaunchContext) -> str | None:
    """The address of the main process resolves."""
    address = now.environ.get("MASTER_ADDR")
    try:
        socket.getaddrinfo(address or "localhost", None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        fact = f"MASTER_ADDR {address} is unknown here ({reason})"
        return f"{fact}: set the address of the machine of rank 0"
    return None


def find_loopback(now: LaunchContext) -> str | None:
    """The main process has an address that all machines can reach."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(now.environ["MASTER_ADDR"]))
    except (KeyError, OSError, ValueError):
        return None
    if now.num_processes == now.num_local_processes or not address.is_loopback:
        return None
    return (
        f"MASTER_ADDR {now.environ['MASTER_ADDR']} means only this machine, and "
        f"{now.num_local_processes} of {now.num_processes} processes are on it: set the address of "
        "the machine of rank 0 (--main_process_ip)"
    )


def find_unknown_interface(now: LaunchContext) -> str | None:
    """The chosen network interfaces exist."""
    existing = [name for _, name in socket.if_nameindex()]
    for variable in _INTERFACES:
        value = now.environ.get(variable, "")
        if not value or value.startswith("^"):  # ^ excludes interfaces
            continue
        wanted = tuple(value.removeprefix("=").split(","))
        if value.startswith("="):
            is_known = any(name in wanted for name in existing)
        else:  # NCCL matches prefixes
            is_known = any(name.startswith(wanted) for name in existing)
        if not is_known:
            fact = f"{variable}={value} matches no interface ({', '.join(existing)})"
            return f"{fact}: correct or unset it"
    return None


CHECKS = (
    Check("PORT_IN_USE", "error", find_port),
    Check("MASTER_ADDR", "error", find_unknown_address),
    Check("LOOPBACK", "warning", find_loopback),
    Check("INTERFACE", "error", find_unknown_interface),
)
