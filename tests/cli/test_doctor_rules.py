"""Each check of the doctor finds its fault, brought about for real where that can be done, and is
silent without it."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import RecipeConfig, RuntimeConfig
from accel_trainer.cli.doctor.command import CHECKS
from accel_trainer.cli.doctor.findings import LaunchContext
from tests import processes
from tests.faults.disks import can_mount, mount_small_disk

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}

needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs a user namespace")


def find(
    code: str, config: RecipeConfig | None = None, source: str = "", **environ: str
) -> str | None:
    check = next(check for check in CHECKS if check.code == code)
    return check.find(
        LaunchContext(config=config or RecipeConfig(), source=source, environ=environ)
    )


def with_threads(num_threads: int | None) -> RecipeConfig:
    return RecipeConfig(runtime=RuntimeConfig(num_threads=num_threads))


def in_a_process(act: Callable[..., None], *arguments: Any, folder: Path) -> None:
    processes.run(act, *arguments, folder=folder)


# --- launching ---


def test_a_port_that_another_process_holds() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        found = find("PORT_IN_USE", **TWO, MASTER_PORT=port)
        assert (
            found
            == f"MASTER_PORT {port} cannot be used (Address already in use): choose a free port"
        )
        assert find("PORT_IN_USE", **TWO | {"RANK": "1"}, MASTER_PORT=port) is None, (
            "held by rank 0"
        )
        assert find("PORT_IN_USE", **TWO, MASTER_PORT=port, TORCHELASTIC_RUN_ID="x") is None, (
            "by torchrun"
        )
        assert find("PORT_IN_USE", **TWO) is None, "none is named"
    assert find("PORT_IN_USE", **TWO, MASTER_PORT=port) is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [("no-such-host.invalid", r"[A-Z][\w ]+"), ("gpu01..cluster", ".*label.*")],
)
def test_a_main_address_that_nobody_knows(address: str, reason: str) -> None:
    said = str(find("MASTER_ADDR", MASTER_ADDR=address))
    assert re.match(rf"MASTER_ADDR {address} is unknown here \({reason}\): set", said), said
    assert find("MASTER_ADDR", MASTER_ADDR="localhost") is find("MASTER_ADDR") is None


def test_machines_that_would_connect_over_a_loopback_address() -> None:
    said = str(find("LOOPBACK", **TWO | {"WORLD_SIZE": "4"}))
    assert said.startswith(
        "MASTER_ADDR 127.0.0.1 means only this machine, and 2 of 4 processes are on it: set"
    )
    assert find("LOOPBACK", **TWO) is find("LOOPBACK") is None
    assert find("LOOPBACK", **TWO | {"WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}) is None


@pytest.mark.parametrize(
    ("value", "is_wrong"),
    [
        ("eth77", True),
        ("=l", True),
        ("lo", False),
        ("l", False),
        ("eth77,lo", False),
        ("^docker", False),
    ],
)
def test_a_network_interface_that_does_not_exist(value: str, is_wrong: bool) -> None:
    found = find("INTERFACE", NCCL_SOCKET_IFNAME=value)
    assert (found is not None) == is_wrong
    assert found is None or found.startswith(f"NCCL_SOCKET_IFNAME={value} matches no interface (")


# --- the machine ---


@needs_mounts
def test_a_tiny_shared_memory(tmp_path: Path) -> None:
    in_a_process(check_shared_memory, folder=tmp_path)


def check_shared_memory() -> None:
    mount_small_disk(Path("/dev/shm"), "size=2g")
    assert find("SHARED_MEMORY") is None
    mount_small_disk(Path("/dev/shm"), "size=64m")
    assert str(find("SHARED_MEMORY")).startswith(
        "/dev/shm has 64 MiB, and data workers (num_workers > 0) and NCCL"
    )


def test_too_few_files_for_data_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        fact = "a process may open only 256 files, too few for data workers"
        assert f"{fact}: run `ulimit -n {hard}`" in str(find("OPEN_FILES"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        assert find("OPEN_FILES") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert find("OPEN_FILES") is None, "infinity is written as -1"
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, resource.RLIM_INFINITY))
    assert "run `ulimit -n 65536`" in str(find("OPEN_FILES")), "as on macOS"


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a limit on the cores, as Linux has"
)
def test_more_threads_than_cores(tmp_path: Path) -> None:
    in_a_process(check_threads, folder=tmp_path)


def check_threads() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert find("THREADS", with_threads(2)) == (
        "1 process of 2 threads on 1 core: set --runtime.num-threads 1"
    )
    assert str(find("THREADS", **TWO)).endswith(
        "set --runtime.num-threads 1 and launch fewer processes"
    )
    assert find("THREADS", with_threads(1)) is find("THREADS") is None


def test_a_recipe_that_uses_cuda_as_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("CUDA_TOUCHED") is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "move that code (.cuda(), torch.cuda...) into train()" in str(find("CUDA_TOUCHED"))


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
OWN, TORCH = "from accel_trainer import main\n", "import torch\n"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (TORCH + OWN, "torch"),
        (f'"""Mine."""\nimport os\nfrom torch import nn\n\n{OWN}', "torch"),
        ("import torchvision\n" + OWN, "torch"),
        ("import timm\n" + OWN, "timm"),
        (OWN + TORCH, None),
        (f"import numpy as np\n{OWN}{TORCH}", None),
        (f"def later():\n    {TORCH}\n{OWN}", None),
        ("", None),
        *((path.read_text(), None) for path in RECIPES),
    ],
)
def test_a_recipe_that_imports_torch_first(
    source: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    found = find("IMPORT_ORDER", with_threads(2), source)
    assert (found is None) == (named is None)
    assert named is None or f"imports {named} before accel_trainer" in str(found)
    assert find("IMPORT_ORDER", with_threads(1), source) is None, "nothing waits"


VERSIONS = {
    "TORCH_UNTRIED": (torch, "__version__", ("2.11.0+cu130", "2.13.1", "2.15.0+cu132")),
    "PYTHON_UNTRIED": (platform, "python_version", ("3.10.0", "3.11.7", "3.13.5", "3.14.8+")),
}
UNTRIED = {
    "TORCH_UNTRIED": ("2.8.0", "2.1.2", "2.80.0", "2.99.0", "3.0.0a0+git1"),
    "PYTHON_UNTRIED": ("3.15.0", "3.15.0rc1", "3.1.4", "3.141.0", "4.0.0"),
}


@pytest.mark.parametrize("code", VERSIONS)
def test_versions_that_the_tests_never_ran_with(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, tried = VERSIONS[code]
    for version in (*tried, *UNTRIED[code]):
        is_called = callable(getattr(owner, name))
        monkeypatch.setattr(owner, name, (lambda v=version: v) if is_called else version)
        found = find(code)
        assert (found is None) == (version in tried), version
        assert found is None or f" {version} has not been tried: the tests ran with " in found


def test_float32_without_tf32_on_a_gpu_with_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(
        num_gpus: int = 1, capability: tuple[int, int] = (8, 0), runtime: Any = None, **environ: str
    ) -> str | None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return find("TENSOR_CORES", RecipeConfig(runtime=runtime or RuntimeConfig()), **environ)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert "--mixed-precision bf16, or --runtime.tf32" in str(found())
    for runtime in (RuntimeConfig(tf32=True), RuntimeConfig(mixed_precision="bf16")):
        assert found(runtime=runtime) is None
    assert found(capability=(7, 5)) is None
    assert found(num_gpus=0) is None
    assert found(ACCELERATE_MIXED_PRECISION="fp16") is None
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert found() is None
