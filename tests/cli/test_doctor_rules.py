"""Each check of the doctor finds its fault, brought about for real where that can be done, and is silent without it."""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config import config_args
from accelerate.commands.config.default import write_basic_config

from accel_trainer import BatchConfig, RecipeConfig, RunConfig, RuntimeConfig
from accel_trainer.cli.doctor import launching
from accel_trainer.cli.doctor.command import CHECKS
from accel_trainer.core.run_dir import RunLock
from accel_trainer.run.parser import save_config
from accel_trainer.run.preflight import LaunchContext
from accel_trainer.vision import PhotoConfig
from accel_trainer.vision.data.cache import cache_folder
from accel_trainer.vision.sources.find import find_source
from tests import processes
from tests.faults.disks import can_mount, mount_small_disk
from tests.faults.tiny_run import METADATA, damage, make, name_at, save
from tests.vision.make_photos import write_classes

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}

needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs a user namespace")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(RecipeConfig):
    dataset: str = "digits"


def find(code: str, config: RecipeConfig | None = None, **environ: str) -> str | None:
    check = next(check for check in CHECKS if check.code == code)
    return check.find(LaunchContext(config=config or RecipeConfig(), environ=environ))


def in_folder(folder: Path) -> RecipeConfig:
    return RecipeConfig(run=RunConfig(output_dir=folder))


def with_threads(num_threads: int | None) -> RecipeConfig:
    return RecipeConfig(runtime=RuntimeConfig(num_threads=num_threads))


def in_a_process(act: Callable[..., None], *arguments: Any, folder: Path) -> None:
    processes.run(act, *arguments, num_processes=1, folder=folder)


# --- launching ---


def test_a_port_that_another_process_holds() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        found = find("PORT_IN_USE", **TWO, MASTER_PORT=port)
        assert found == f"MASTER_PORT {port} cannot be used (Address already in use): choose a free port"
        assert find("PORT_IN_USE", **TWO | {"RANK": "1"}, MASTER_PORT=port) is None, "held by rank 0"
        assert find("PORT_IN_USE", **TWO, MASTER_PORT=port, TORCHELASTIC_RUN_ID="x") is None, "by torchrun"
        assert find("PORT_IN_USE", **TWO) is None, "none is named"
    assert find("PORT_IN_USE", **TWO, MASTER_PORT=port) is None


def test_the_default_port_of_launchers_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        monkeypatch.setattr(launching, "_DEFAULT_PORT", holder.getsockname()[1])
        assert "launch with --main_process_port 0" in str(find("DEFAULT_PORT"))
        assert find("DEFAULT_PORT", MASTER_PORT="1") is None, "a port is set"
    assert find("DEFAULT_PORT") is None


@pytest.mark.parametrize(
    ("address", "reason"), [("no-such-host.invalid", r"[A-Z][\w ]+"), ("gpu01..cluster", ".*label.*")]
)
def test_a_main_address_that_nobody_knows(address: str, reason: str) -> None:
    said = str(find("MASTER_ADDR", MASTER_ADDR=address))
    assert re.match(rf"MASTER_ADDR {address} is unknown here \({reason}\): set", said), said
    assert find("MASTER_ADDR", MASTER_ADDR="localhost") is find("MASTER_ADDR") is None


def test_machines_that_would_connect_over_a_loopback_address() -> None:
    said = str(find("LOOPBACK", **TWO | {"WORLD_SIZE": "4"}))
    assert said.startswith("MASTER_ADDR 127.0.0.1 means only this machine, and 2 of 4 processes are on it: set")
    assert find("LOOPBACK", **TWO) is find("LOOPBACK") is None
    assert find("LOOPBACK", **TWO | {"WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}) is None


@pytest.mark.parametrize(
    ("value", "is_wrong"),
    [("eth77", True), ("=l", True), ("lo", False), ("l", False), ("eth77,lo", False), ("^docker", False)],
)
def test_a_network_interface_that_does_not_exist(value: str, is_wrong: bool) -> None:
    found = find("INTERFACE", NCCL_SOCKET_IFNAME=value)
    assert (found is not None) == is_wrong
    assert found is None or found.startswith(f"NCCL_SOCKET_IFNAME={value} names no interface of ")


def test_a_file_that_silently_configures_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_args, "default_config_file", str(path))
    assert find("LAUNCHER_DEFAULTS") is None
    path.write_text("num_processes: 1\n")
    assert find("LAUNCHER_DEFAULTS") is None, "what it would do without the file"
    path.unlink()
    assert write_basic_config(mixed_precision="bf16", save_location=str(path))
    said = str(find("LAUNCHER_DEFAULTS"))
    assert said.startswith(f"{path} applies to every `accelerate launch` without --config_file (")
    assert "mixed_precision bf16" in said


def test_a_timeout_that_nothing_reads() -> None:
    said = str(find("NCCL_TIMEOUT", NCCL_TIMEOUT="1800"))
    assert said == "NCCL_TIMEOUT=1800 has no effect: unset it; --runtime.timeout-s is 600"
    assert find("NCCL_TIMEOUT") is None


def test_a_setting_for_debugging_that_slows_every_step() -> None:
    said = find("SLOW_SETTING", CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="1", TORCH_DISTRIBUTED_DEBUG="INFO")
    assert str(said).startswith("CUDA_LAUNCH_BLOCKING=1, NCCL_P2P_DISABLE=1 slow down every step: unset them")
    assert find("SLOW_SETTING", CUDA_LAUNCH_BLOCKING="0") is None


# --- the machine ---


@needs_mounts
def test_a_tiny_shared_memory(tmp_path: Path) -> None:
    in_a_process(check_shared_memory, folder=tmp_path)


def check_shared_memory() -> None:
    mount_small_disk(Path("/dev/shm"), "size=2g")
    assert find("SHARED_MEMORY") is None
    many = RecipeConfig(batch=BatchConfig(per_device_batch_size=512, num_workers=8))
    assert "data workers hold 16 batches there, 4704 MiB for images of 224 x 224" in str(find("SHARED_MEMORY", many))
    mount_small_disk(Path("/dev/shm"), "size=64m")
    assert str(find("SHARED_MEMORY")).startswith("/dev/shm has 64 MiB, and data workers (num_workers > 0) and NCCL")


def test_too_few_files_for_data_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert f"a process may open only 256 files, too few for data workers: run `ulimit -n {hard}`" in str(
            find("OPEN_FILES")
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        assert find("OPEN_FILES") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert find("OPEN_FILES") is None, "infinity is written as -1"


def test_more_threads_than_cores(tmp_path: Path) -> None:
    in_a_process(check_threads, folder=tmp_path)


def check_threads() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert find("THREADS", with_threads(2)) == ("1 processes of 2 threads share 1 cores: set --runtime.num-threads 1")
    assert str(find("THREADS", **TWO)).endswith("set --runtime.num-threads 1 and launch fewer processes")
    assert find("THREADS", with_threads(1)) is find("THREADS") is None


def test_a_recipe_that_uses_cuda_as_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("CUDA_TOUCHED") is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "move that code (.cuda(), torch.cuda...) into train()" in str(find("CUDA_TOUCHED"))


@pytest.mark.parametrize(("dataset", "package"), [("digits", "sklearn"), ("cifar10", "datasets"), ("/x", "PIL")])
def test_a_package_that_the_data_needs_is_missing(monkeypatch: pytest.MonkeyPatch, dataset: str, package: str) -> None:
    config = DatasetConfig(dataset=dataset)
    assert find("PACKAGE_MISSING", config) is None
    monkeypatch.setitem(sys.modules, package, None)
    assert find("PACKAGE_MISSING", config) == (
        f"--dataset {dataset} needs {package}: pip install 'accel-trainer[vision]'"
    )
    assert find("PACKAGE_MISSING") is None, "a recipe without --dataset"


def test_a_tracker_that_nobody_knows() -> None:
    config = RecipeConfig(run=RunConfig(track=("tensorboad",)))
    assert "--track tensorboad: accelerate has no such tracker" in str(find("TRACKER", config))
    assert find("TRACKER") is None


def test_compilation_without_a_compiler(tmp_path: Path) -> None:
    config = RecipeConfig(runtime=RuntimeConfig(compile=True))
    assert "there is none in PATH: install g++" in str(find("COMPILER_MISSING", config, PATH=str(tmp_path)))
    (tmp_path / "c++").write_text("")
    (tmp_path / "c++").chmod(0o755)
    assert find("COMPILER_MISSING", config, PATH=str(tmp_path)) is None
    assert find("COMPILER_MISSING", PATH="") is None
    (tmp_path / "c++").rename(tmp_path / "mine")
    assert find("COMPILER_MISSING", config, PATH=str(tmp_path), CXX="mine") is None


def test_a_torch_that_may_run_code_from_files() -> None:
    assert "unset it" in str(find("UNSAFE_LOAD", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"))
    assert find("UNSAFE_LOAD", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="0") is find("UNSAFE_LOAD") is None


def test_a_batch_that_processes_cannot_share() -> None:
    config = RecipeConfig(batch=BatchConfig(global_batch_size=33))
    assert "global batch 33 is not divisible by 2 processes" in str(find("BATCH_SIZE", config, **TWO))
    assert find("BATCH_SIZE", config) is None


# --- the run folder and the data ---


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = f"{tmp_path / 'file'} is a file: choose a folder for --output-dir"
    assert find("OUTPUT_DIR", in_folder(tmp_path / "file" / "run")) == said
    assert find("OUTPUT_DIR", in_folder(tmp_path / "new" / "run")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "looking leaves nothing"
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    in_a_process(check_permission, locked, folder=tmp_path / "logs")


def check_permission(locked: Path) -> None:
    if os.geteuid() == 0:  # root may write anywhere
        os.chdir(locked)
        os.setuid(65534)
        locked = Path(".")
    assert "(Permission denied): choose another --output-dir" in str(find("OUTPUT_DIR", in_folder(locked)))


def test_a_folder_in_which_another_run_is_active(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run.lock"):
        in_a_process(check_lock, tmp_path, folder=tmp_path / "logs")
    assert find("LOCKED", in_folder(tmp_path)) is None


def check_lock(folder: Path) -> None:
    assert f"{folder} is locked by pid " in str(find("LOCKED", in_folder(folder)))


@needs_mounts
@pytest.mark.parametrize(("options", "said"), [("size=1m", "GiB free"), ("nr_inodes=9", "room for 8 more files")])
def test_a_disk_with_little_room(tmp_path: Path, options: str, said: str) -> None:
    (tmp_path / "disk").mkdir()
    in_a_process(check_space, tmp_path / "disk", options, said, folder=tmp_path / "logs")


def check_space(disk: Path, options: str, said: str) -> None:
    mount_small_disk(disk, options)
    assert said in str(find("DISK_SPACE", in_folder(disk / "run")))


def test_a_damaged_checkpoint_and_what_a_start_does_then(tmp_path: Path) -> None:
    checkpointer = make(tmp_path / "checkpoints")
    save(checkpointer, 1, 2)
    assert find("CHECKPOINT_DAMAGED", in_folder(tmp_path)) is None
    damage(tmp_path / "checkpoints", 2)
    said = str(find("CHECKPOINT_DAMAGED", in_folder(tmp_path)))
    assert f"{name_at(2)}/model.safetensors" in said
    assert f"a run would resume from {name_at(1)}: see `accel-trainer inspect {tmp_path}`" in said
    damage(tmp_path / "checkpoints", 1)
    assert "none is valid, so a start is refused" in str(find("CHECKPOINT_DAMAGED", in_folder(tmp_path)))
    assert "so a start is refused" in str(find("CKPT_NONE_VALID", in_folder(tmp_path)))


def test_what_lies_in_a_folder_and_a_start_refuses_is_found_before(tmp_path: Path) -> None:
    refused = replace(DatasetConfig(), run=RunConfig(output_dir=tmp_path), batch=BatchConfig(global_batch_size=128))
    assert find("START_REFUSED", refused) is None
    save(make(tmp_path / "checkpoints"), 1)
    assert "config.yaml cannot be read" in str(find("START_REFUSED", refused)), "it is not there"
    (tmp_path / "config.yaml").write_text(save_config(replace(refused, seed=7)))
    assert "was made with another config (seed: 7 -> 0)" in str(find("START_REFUSED", refused))
    (tmp_path / "config.yaml").write_text(save_config(refused))
    never = replace(refused, run=RunConfig(output_dir=tmp_path, resume="never"))
    assert "--resume is never" in str(find("START_REFUSED", never))
    (tmp_path / "metrics.jsonl").symlink_to("/etc/passwd")
    assert "metrics.jsonl is not a file" in str(find("START_REFUSED", refused))


def test_another_number_of_processes_than_before(tmp_path: Path) -> None:
    save(make(tmp_path / "checkpoints", metadata={**METADATA, "num_processes": 4}), 1)
    said = str(find("OTHER_NUM_PROCESSES", in_folder(tmp_path), **TWO))
    assert said.startswith(f"{name_at(1)} was saved by 4 processes and this launch has 2: the global batch and the")
    assert find("OTHER_NUM_PROCESSES", in_folder(tmp_path), **TWO | {"WORLD_SIZE": "4"}) is None


def test_a_launcher_that_kills_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    save(make(tmp_path / "checkpoints"), 1)
    for number, file in enumerate((tmp_path / "checkpoints" / name_at(1)).iterdir()):
        os.utime(file, (1000 + 40 * (number == 1),) * 2)
    said = str(find("GRACE", in_folder(tmp_path)))
    assert said.startswith(
        f"{name_at(1)} took 40 s to write, but torch's launchers kill the run 30 s after a signal: set "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT to 80"
    )
    assert find("GRACE", in_folder(tmp_path), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="300") is None
    assert find("GRACE", in_folder(tmp_path / "new")) is None


def test_data_that_is_not_there() -> None:
    assert "did you mean digits?" in str(find("DATA", DatasetConfig(dataset="digts")))
    assert find("DATA", DatasetConfig()) is find("DATA") is None


def test_photos_that_the_run_would_refuse(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class PhotosConfig(DatasetConfig):
        photos: PhotoConfig = field(default_factory=PhotoConfig)

    folder = write_classes(tmp_path / "photos", per_class=9)
    config = PhotosConfig(dataset=str(folder), run=RunConfig(cache_dir=tmp_path / "cache"))
    assert "has no validation split: set one aside with --val-fraction 0.1" in str(find("DATA", config))
    split = replace(config, photos=PhotoConfig(val_fraction=0.3))
    assert find("DATA", split) is find("MEMORY", split) is None
    assert find("DATA", replace(split, dataset="owner/name")) is None, "nothing is downloaded"
    assert "no photos in" in str(find("DATA", replace(split, dataset=str(tmp_path / "cache"))))


def test_images_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    config = replace(DatasetConfig(), run=RunConfig(cache_dir=tmp_path))
    assert find("MEMORY", config) is None
    folder = cache_folder(find_source("digits"), tmp_path)
    folder.mkdir()
    with (folder / "train_images.u8").open("wb") as file:
        file.truncate(8 << 40)  # sparse
    assert f"{folder} has 8192.0 GiB of decoded images, but only " in str(find("MEMORY", config))
