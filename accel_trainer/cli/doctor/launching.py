"""Checks the launch: addresses, ports and settings of the processes."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from ...run.parser import read_stored_yaml
from ...run.preflight import Check, LaunchContext

_DEFAULT_PORT = 29500  # of torchrun and accelerate
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
_NEUTRAL = {  # accelerate's own defaults; other values change a run
    "distributed_type": "NO", "dynamo_config": {}, "gpu_ids": "all", "mixed_precision": "no", "num_machines": 1,
    "num_processes": 1, "use_cpu": False,
}  # fmt: skip


def find_port(now: LaunchContext) -> str | None:
    """The port of the process group is free."""
    environ = now.environ
    if environ.get("RANK") != "0" or "MASTER_PORT" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return None  # torch's launcher already listens there
    problem = _problem_of_port(int(environ["MASTER_PORT"]))
    return problem and f"MASTER_PORT {environ['MASTER_PORT']} cannot be used ({problem}): choose a free port"


def find_default_port(now: LaunchContext) -> str | None:
    """The default port of launchers is free."""
    problem = None if "MASTER_PORT" in now.environ else _problem_of_port(_DEFAULT_PORT)
    if problem is None:
        return None
    return (
        f"port {_DEFAULT_PORT}, the default of launchers, cannot be used ({problem}): launch with "
        "--main_process_port 0 on one machine, or another port on several"
    )


def find_unknown_address(now: LaunchContext) -> str | None:
    """The address of the main process resolves."""
    address = now.environ.get("MASTER_ADDR")
    try:
        socket.getaddrinfo(address or "localhost", None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"MASTER_ADDR {address} is unknown here ({reason}): set the address of the machine of rank 0"
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
        f"MASTER_ADDR {now.environ['MASTER_ADDR']} means only this machine, and {now.num_local_processes} of "
        f"{now.num_processes} processes are on it: set the address of the machine of rank 0 (--main_process_ip)"
    )


def find_unknown_interface(now: LaunchContext) -> str | None:
    """The chosen network interfaces exist."""
    existing = [name for _, name in socket.if_nameindex()]
    for variable in _INTERFACES:
        value = now.environ.get(variable, "")
        wanted = tuple(value.removeprefix("=").split(","))
        is_exact = value.startswith("=")  # otherwise NCCL matches prefixes, and with ^ all others
        known = [name for name in existing if (name in wanted if is_exact else name.startswith(wanted))]
        if value and value[0] != "^" and not known:
            return f"{variable}={value} names no interface of {', '.join(existing)}: correct or unset it"
    return None


def find_launcher_defaults(now: LaunchContext) -> str | None:
    """No default config file changes `accelerate launch`."""
    from accelerate.commands.config.config_args import default_config_file

    try:
        values = read_stored_yaml(Path(default_config_file).resolve())
        changed = {name: values[name] for name, usual in _NEUTRAL.items() if values.get(name, usual) != usual}
    except (OSError, ValueError, AttributeError):
        return None
    if not changed:
        return None
    listed = ", ".join(f"{name} {value}" for name, value in changed.items())
    return (
        f"{default_config_file} applies to every `accelerate launch` without --config_file ({listed}): pass one of "
        "accelerate_configs/, or delete that file"
    )


def find_nccl_timeout(now: LaunchContext) -> str | None:
    """The timeout is set by the flag."""
    if "NCCL_TIMEOUT" not in now.environ:
        return None
    return (
        f"NCCL_TIMEOUT={now.environ['NCCL_TIMEOUT']} has no effect: unset it; --runtime.timeout-s is "
        f"{now.config.runtime.timeout_s:g}"
    )


def find_slow_setting(now: LaunchContext) -> str | None:
    """No debug setting slows the run down."""
    found = [f"{name}={value}" for name, value in _SLOW.items() if now.environ.get(name) == value]
    return f"{', '.join(found)} slow down every step: unset them unless you are debugging" if found else None


def _problem_of_port(port: int) -> str | None:
    """Return why no process can listen on `port`, None if one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a recently closed port is free
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror
    return None


CHECKS = (
    Check("PORT_IN_USE", "error", find_port),
    Check("DEFAULT_PORT", "warning", find_default_port),
    Check("MASTER_ADDR", "error", find_unknown_address),
    Check("LOOPBACK", "warning", find_loopback),
    Check("INTERFACE", "error", find_unknown_interface),
    Check("LAUNCHER_DEFAULTS", "warning", find_launcher_defaults),
    Check("NCCL_TIMEOUT", "warning", find_nccl_timeout),
    Check("SLOW_SETTING", "warning", find_slow_setting),
)
