from __future__ import annotations

import os
import platform
import resource
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.timing import Stopwatch
from accel_trainer.distributed.accelerator import (
    RuntimeConfig,
    describe_machine,
    start_accelerator,
)
from accel_trainer.distributed.collectives import shutdown
from accel_trainer.distributed.machine import peak_memory_bytes
from accel_trainer.distributed.placement import place_model
from accel_trainer.training.compile import compile_model

from .. import processes, workload
from ..joined import joined_processes
from ..workload import SmallNet

ONE_THREAD = RuntimeConfig(num_threads=1)
TWO = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize("source", ["config", "launcher"])
def test_fp16_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    config = RuntimeConfig(mixed_precision="fp16" if source == "config" else None)
    if source == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="--mixed-precision fp16 needs a GPU, and there is none"):
        start_accelerator(config)


@pytest.mark.parametrize(
    ("config", "launcher", "expected"),
    [(None, None, "no"), (None, "bf16", "bf16"), ("no", "bf16", "no"), ("bf16", "no", "bf16")],
)
def test_the_config_decides_the_precision_before_the_launcher(
    monkeypatch: pytest.MonkeyPatch, config: str | None, launcher: str | None, expected: str
) -> None:
    if launcher:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert (
        start_accelerator(RuntimeConfig(mixed_precision=config, num_threads=1)).mixed_precision
        == expected
    )


def test_processes_that_accelerate_does_not_find_are_refused(tmp_path: Path) -> None:
    """Each would believe that it is the only one, and write the same checkpoints."""
    processes.run(find_less_processes, folder=tmp_path)


def find_less_processes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.update(TWO)
    with pytest.raises(ConfigError, match=r"LAUNCH.*joined 1 process,.*WORLD_SIZE is 2"):
        start_accelerator(ONE_THREAD)


def test_what_is_not_on_this_machine_is_refused_before_the_processes_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    message = "--runtime.backend nccl needs GPUs, and there are none: use gloo"
    with pytest.raises(ConfigError, match=message):
        start_accelerator(RuntimeConfig(timeout_s=1, backend="nccl"))


def test_processes_send_their_messages_by_the_backend_that_is_asked_for(tmp_path: Path) -> None:
    processes.run(check_backend, num_processes=2, folder=tmp_path)


def check_backend() -> None:
    dist.Backend.register_backend("loud", make_loud_gloo, devices=["cpu"])
    accelerator = start_accelerator(RuntimeConfig(num_threads=1, backend="loud"))
    assert dist.get_backend() == "loud"
    assert describe_machine(accelerator).startswith("2 x cpu (1 thread) over loud")
    shutdown(accelerator)


def make_loud_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def test_processes_that_joined_before_the_run_are_used_as_they_are(tmp_path: Path) -> None:
    processes.run(start_after_joining, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    assert (tmp_path / "run" / "export").is_dir()


def start_after_joining(folder: Path) -> None:
    PartialState(cpu=True)
    with pytest.raises(ConfigError, match="--runtime.backend ucc, but the processes already"):
        start_accelerator(RuntimeConfig(backend="ucc"))
    workload.train(workload.make_config(folder))


def test_a_second_run_of_a_process_may_have_another_precision(tmp_path: Path) -> None:
    """As in a notebook."""
    processes.run(train_in_two_precisions, tmp_path, folder=tmp_path / "logs")
    processes.run(train_alone, tmp_path / "alone", folder=tmp_path / "logs")
    full, reduced, alone = (
        tmp_path / name / "export/model.safetensors" for name in ("no", "bf16", "alone")
    )
    assert full.read_bytes() != reduced.read_bytes() == alone.read_bytes()


def train_in_two_precisions(folder: Path) -> None:
    for precision in ("no", "bf16"):
        train_at(folder / precision, precision)


def train_alone(folder: Path) -> None:
    train_at(folder, "bf16")


def train_at(folder: Path, precision: str) -> None:
    runtime = RuntimeConfig(num_threads=1, mixed_precision=precision)
    workload.train(workload.make_config(folder, runtime=runtime))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_is_pinned(num_threads: int) -> None:
    start_accelerator(RuntimeConfig(num_threads=num_threads))
    assert torch.get_num_threads() == num_threads


def test_by_default_the_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(6), raising=False)
    for local_processes, expected in ((1, 6), (2, 3), (4, 1), (8, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_processes))
        start_accelerator(RuntimeConfig())
        assert torch.get_num_threads() == expected


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a limit on the cores, as Linux has"
)
def test_a_process_takes_no_more_threads_than_it_was_given_cores(tmp_path: Path) -> None:
    processes.run(check_threads_on_one_core, folder=tmp_path)


def check_threads_on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start_accelerator(RuntimeConfig())
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("variables", "config", "expected"),
    [
        ({"OMP_NUM_THREADS": "1"}, None, 1),
        ({"OMP_NUM_THREADS": "3"}, None, 3),
        ({"OMP_NUM_THREADS": "3"}, 2, 2),
        # Set by torchrun itself.
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, None, 6),
        # Set by accelerate's launcher.
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_DYNAMO_BACKEND": "no"}, None, 6),
        ({"OMP_NUM_THREADS": "two"}, None, 6),
    ],
)
def test_threads_that_the_user_asks_openmp_for_are_kept(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], config: int | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(6), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start_accelerator(RuntimeConfig(num_threads=config))
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize("tf32", [False, True])
def test_float32_is_float32_unless_tf32_is_asked_for(tf32: bool) -> None:
    start_accelerator(RuntimeConfig(num_threads=1, tf32=tf32))
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32


def test_the_loss_scale_of_fp16_is_as_configured() -> None:
    config = RuntimeConfig(num_threads=1, loss_scale=1024.0)
    for chosen, scale in ((config, 1024.0), (ONE_THREAD, 65536.0)):
        scaler = torch.amp.GradScaler("cpu", **start_accelerator(chosen).scaler_handler.to_kwargs())
        assert (scaler.get_scale(), scaler.get_growth_interval()) == (scale, 2000)


# The compiler of torch 2.13 raises it itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_placed_model_is_the_same_module_with_the_same_names(compiled: bool) -> None:
    accelerator = start_accelerator(ONE_THREAD)
    model = SmallNet(norm="batch")
    names = list(model.state_dict())
    parameters = list(map(id, model.parameters()))
    placed = place_model(model, accelerator, ONE_THREAD)
    if compiled:
        compile_model(placed, Stopwatch())
    assert isinstance(placed, SmallNet)
    assert list(placed.state_dict()) == names
    assert list(map(id, placed.parameters())) == parameters
    assert (placed._compiled_call_impl is not None) == compiled
    assert not any("forward" in vars(module) for module in placed.modules())


def test_norms_span_several_processes_by_default(tmp_path: Path) -> None:
    processes.run(check_norms, num_processes=2, folder=tmp_path)


def check_norms() -> None:
    with joined_processes() as accelerator:
        for spans in (True, False):
            placed = place_model(
                SmallNet(norm="batch"), accelerator, RuntimeConfig(sync_batch_norm=spans)
            )
            assert [type(placed.layers[index]) for index in (1, 4)] == [nn.BatchNorm2d] * 2
            assert ["forward" in vars(placed.layers[index]) for index in (1, 4)] == [spans] * 2
        assert describe_machine(accelerator).startswith(
            "2 x cpu (1 thread) over gloo, float32, torch "
        )
        assert accelerator.gradient_accumulation_steps == 1


def test_the_machine_is_described_in_one_line() -> None:
    line = describe_machine(start_accelerator(ONE_THREAD))
    assert line == f"1 x cpu (1 thread), float32, torch {torch.__version__}"


def test_peak_memory_is_in_bytes() -> None:
    held = torch.ones(50 << 20, dtype=torch.uint8)
    assert 50 << 20 < peak_memory_bytes(start_accelerator(ONE_THREAD)) < 1 << 40
    assert len(held)


def test_peak_memory_is_in_bytes_on_a_mac_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the system counts it in bytes already, and on Linux in KiB."""
    accelerator = start_accelerator(ONE_THREAD)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3 << 20))
    for system, expected in (("linux", 3 << 30), ("darwin", 3 << 20)):
        monkeypatch.setattr("sys.platform", system)
        assert peak_memory_bytes(accelerator) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_threads": 0}, "runtime.num_threads is 0: set it to 1 to 1024"),
        ({"num_threads": 1_000_000}, "runtime.num_threads is 1000000: set it to 1 to 1024"),
        ({"loss_scale": 0.0}, "runtime.loss_scale is 0.0: set it above 0, and finite"),
        ({"timeout_s": 0.0}, "runtime.timeout_s is 0.0: set it above 0"),
        ({"timeout_s": float("nan")}, "runtime.timeout_s is nan: set it above 0"),
    ],
)
def test_a_bad_value_is_named_with_its_fix(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig(**changes)


@pytest.mark.slow
def test_memory_that_a_step_frees_is_there_for_the_next(tmp_path: Path) -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library")
    processes.run(check_freed_memory, folder=tmp_path)


def check_freed_memory() -> None:
    start_accelerator(ONE_THREAD)
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(6)
    ]
    model = nn.Sequential(*blocks)
    images = torch.randn(64, 16, 32, 32)

    def count_faults(num_steps: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(num_steps):
            model(images).sum().backward()
            model.zero_grad()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    count_faults(6)
    assert count_faults(30) < 20_000, "100,000 to 250,000 if it is given back"
