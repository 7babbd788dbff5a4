"""What decides the bits of a result on a GPU, as far as a CPU shows it.

A CPU, too, lacks some deterministic kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Batch, ClassificationTask, RecipeConfig, RuntimeConfig, StepOutput, main
from accel_trainer.core.errors import ConfigError
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.distributed.determinism import choose_kernels, nondeterminism_named
from tests import processes, workload

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def kernels_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def put(number: float) -> torch.Tensor:
    """Call what has no deterministic kernel on a CPU either."""
    return torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([number, number]))


def test_an_operation_without_a_deterministic_kernel_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choose_kernels(True)
    with warnings.catch_warnings(), nondeterminism_named() as found:
        warnings.simplefilter("always")
        put(1.0)
        put(2.0)
    assert found == {"put_"}
    (line,) = caplog.messages
    assert line.startswith(
        "put_ has no deterministic kernel here: a resumed run is close, not equal bit for bit"
    )


def test_other_warnings_are_shown_as_before() -> None:
    with pytest.warns(UserWarning, match="of another kind"), nondeterminism_named():
        warnings.warn("of another kind", stacklevel=1)


def test_strict_ends_there_in_one_line_that_names_it() -> None:
    choose_kernels("strict")
    refused = pytest.raises(
        ConfigError, match="put_ has no deterministic kernel here.* strict .*: replace it"
    )
    with refused, nondeterminism_named():
        put(1.0)


class Putting(ClassificationTask):
    """A task with such an operation."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        put(1.0)
        return super().step(model, batch)


def train_putting(folder: Path, deterministic: Any) -> None:
    warnings.simplefilter("default")
    choose_kernels(deterministic)  # as a run does on a GPU
    config = workload.make_config(
        folder, runtime=RuntimeConfig(num_threads=1, deterministic=deterministic)
    )
    main(lambda _: workload.train(config, task=Putting()), RecipeConfig, description="", argv=[])


def test_a_run_records_it_and_a_strict_one_ends(tmp_path: Path) -> None:
    job = processes.run(train_putting, tmp_path / "run", True, folder=tmp_path / "logs")
    assert job.output().count("put_ has no deterministic kernel here") == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())[
        "nondeterministic_operations"
    ] == ["put_"]
    strict = processes.run(
        train_putting, tmp_path / "strict", "strict", folder=tmp_path / "more", codes=[64]
    )
    assert "error[NONDETERMINISTIC]: put_ has no deterministic kernel here" in strict.output()
    assert "Traceback" not in strict.output()


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("asked_before", [False, True])
def test_whoever_asks_for_tf32_in_whichever_way_gets_the_same_answer(
    tf32: bool, asked_before: bool
) -> None:
    """torch.compile and libraries ask, and torch raises if only one of its two APIs was set."""
    matmul = torch.backends.cuda.matmul
    if asked_before:
        matmul.fp32_precision = "ieee" if tf32 else "tf32"  # as transformers sets it
    start_accelerator(RuntimeConfig(num_threads=1, tf32=tf32))
    assert matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    cudnn: Any = torch.backends.cudnn
    expected = "tf32" if tf32 else "ieee"
    for backend in (matmul, cudnn.conv, cudnn.rnn):
        assert backend.fp32_precision == expected


def test_a_checkout_without_an_install_has_versions() -> None:
    script = """
from importlib import metadata

find = metadata.distribution

def find_others(name):
    if name == "accel-trainer":
        raise metadata.PackageNotFoundError(name)
    return find(name)

metadata.distribution = find_others
from accel_trainer.distributed.accelerator import library_versions
print(library_versions()["accel_trainer"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "not installed\n"
