"""Sharded weights (FSDP2) on CPU processes: the same training, checkpoints and exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_trainer import (
    BatchConfig,
    Callback,
    OptimizerConfig,
    RuntimeConfig,
    Trainer,
    TrainerConfig,
)
from accel_trainer.distributed.accelerator import start_accelerator
from accel_trainer.distributed.collectives import shutdown
from accel_trainer.distributed.fsdp import gather_shards
from tests import processes, workload
from tests.checkpoint.sharded_run import newest
from tests.joined import FSDP
from tests.training.step.test_nonfinite_report import BAD, Poisoned

ROOT = Path(__file__).parents[2]

# The other choice of every setting; accelerate's launcher sets the last one by itself.
OTHERWISE = {
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Conv2d",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def train(
    folder: Path,
    *,
    shards: bool,
    max_steps: int | None = None,
    name: str = "sgd",
    norm: str = "group",
    otherwise: bool = False,
    precision: str = "no",
) -> None:
    """Train in clipped micro-batches on 29 samples (a short last step batch); evaluate on 37."""
    if shards:
        os.environ.update(FSDP | OTHERWISE if otherwise else FSDP)
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    config = workload.make_config(
        folder,
        batch=BatchConfig(
            per_device_batch_size=28 // num_processes, global_batch_size=56, eval_batch_size=10
        ),
        trainer=TrainerConfig(
            num_epochs=2, max_steps=max_steps, log_every_n_steps=1, max_grad_norm=0.5, ema_decay=0.9
        ),
        optimizer=OptimizerConfig(name=name, learning_rate=0.05),
        runtime=RuntimeConfig(num_threads=1, timeout_s=300, mixed_precision=precision),
    )
    # In float64 rounding stays small over the steps; autocast rounds to its own precision, whatever
    # it is given.
    dtype = torch.float64 if precision == "no" else torch.float32
    workload.train(config, num_train=56 + 29, norm=norm, dtype=dtype)


def history(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if "loss" in key or "accuracy" in key}
        for row in rows
    ]


def run(folder: Path, *, num_processes: int, shards: bool, **options: object) -> None:
    processes.run(
        _start,
        folder,
        shards,
        options,
        num_processes=num_processes,
        folder=folder.with_suffix(".logs"),
    )


def _start(folder: Path, shards: bool, options: dict[str, object]) -> None:
    train(folder, shards=shards, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes."""
    folder = tmp_path_factory.mktemp("fsdp") / "whole"
    run(folder, num_processes=2, shards=False, norm="batch")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with shards."""
    folder = tmp_path_factory.mktemp("fsdp") / "sharded"
    run(folder, num_processes=2, shards=True, norm="batch")
    return folder


def test_sharded_weights_train_evaluate_and_export_like_whole_ones(
    whole: Path, sharded: Path
) -> None:
    assert_alike(sharded, whole, 1e-9)


@pytest.mark.slow
def test_so_are_they_with_other_options(tmp_path: Path) -> None:
    for folder, shards in ((tmp_path / "whole", False), (tmp_path / "sharded", True)):
        run(folder, num_processes=2, shards=shards, name="adamw", otherwise=True)
    assert_alike(tmp_path / "sharded", tmp_path / "whole", 1e-9)


@pytest.mark.slow
def test_a_sharded_step_in_bf16_differs_by_roundings_to_it(tmp_path: Path) -> None:
    for folder, shards in ((tmp_path / "whole", False), (tmp_path / "sharded", True)):
        run(
            folder,
            num_processes=2,
            shards=shards,
            norm="batch",
            otherwise=True,
            precision="bf16",
            max_steps=1,
        )
    weights = [
        load_file(tmp_path / name / "export" / "model.safetensors") for name in ("sharded", "whole")
    ]
    # A step of 0.05 times a gradient clipped to 0.5, whose terms were rounded to 8 bits a few
    # times.
    torch.testing.assert_close(*weights, rtol=0, atol=0.05 * 0.5 * 2**-6)


def assert_alike(sharded: Path, whole: Path, tolerance: float) -> None:
    mine, theirs = history(sharded), history(whole)
    assert len(mine) == len(theirs) == 6
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, abs=tolerance)
    assert mine[-1]["eval_ema/loss"] != mine[-1]["eval/loss"]
    weights = [load_file(folder / "export" / "model.safetensors") for folder in (sharded, whole)]
    torch.testing.assert_close(*weights, rtol=0, atol=tolerance)


def test_a_sharded_run_saves_whole_tensors_and_resumes_on_any_processes(tmp_path: Path) -> None:
    run(tmp_path / "once", num_processes=2, shards=False)
    folder = tmp_path / "moved"
    run(folder, num_processes=2, shards=True, max_steps=1)
    run(folder, num_processes=1, shards=False, max_steps=3)
    run(folder, num_processes=2, shards=True)
    moved, once = newest(folder), newest(tmp_path / "once")
    assert moved.name == once.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        torch.testing.assert_close(
            load_file(moved / name), load_file(once / name), rtol=0, atol=1e-9
        )
    export = load_file(folder / "export" / "model.safetensors")
    workload.SmallNet(norm="group").load_state_dict(export)


def test_a_finished_sharded_run_is_evaluated_before_any_step(tmp_path: Path) -> None:
    """One of three processes has none of the two evaluation samples: no forward may wait for it."""
    processes.run(_evaluate_untrained, tmp_path / "run", num_processes=3, folder=tmp_path / "logs")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_eval_samples"] == 2


def _evaluate_untrained(folder: Path) -> None:
    os.environ.update(FSDP)
    config = workload.make_config(folder, trainer=TrainerConfig(num_epochs=0))
    workload.train(config, num_train=72, num_test=2)


def test_a_sharded_gradient_that_is_not_finite_is_found_by_all(tmp_path: Path) -> None:
    processes.run(_diverge, tmp_path / "run", folder=tmp_path / "logs", codes=[1, 1])
    record = json.loads(next((tmp_path / "run").glob("nonfinite-step-*.json")).read_text())
    assert BAD in record["nonfinite_sample_ids"]


def _diverge(folder: Path) -> None:
    os.environ.update(FSDP)
    config = workload.make_config(folder, trainer=TrainerConfig(num_epochs=1))
    workload.train(config, task=Poisoned())


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"runtime": RuntimeConfig(num_threads=1, compile=True)}, "compile="),
        ({"optimizer": OptimizerConfig(name="muon")}, "OptimizerConfig(name='muon')"),
    ],
    ids=["compile", "muon"],
)
def test_what_needs_whole_weights_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], setting: str
) -> None:
    job = processes.run(
        _train_with, tmp_path / "run", changes, folder=tmp_path / "logs", codes=[1, 1]
    )
    assert f"error[FSDP]: {setting} does not work with FSDP: leave it out" in job.output()


def test_what_holds_no_shard_is_not_made_anew() -> None:
    counts, rest = Counter("aab"), defaultdict(int)
    found = gather_shards({"own": [counts, (rest,)]})
    assert found == {"own": [counts, (rest,)]}
    assert found["own"][0] is counts
    assert found["own"][1][0] is rest


def _train_with(folder: Path, changes: dict[str, object]) -> None:
    os.environ.update(FSDP)
    workload.train(workload.make_config(folder, **{"trainer": TrainerConfig()} | changes))


@pytest.mark.usefixtures("python_is_forked")
def test_the_preset_shards_on_cpu_processes(tmp_path: Path) -> None:
    preset = ROOT / "accelerate_configs" / "fsdp.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(preset)]
    command += ["--num_processes", "2", "-m", "tests.distributed.test_fsdp"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launched = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert sorted(launched.stdout.split("\n"))[-2:] == [
        "2 x cpu, bf16, shards",
        "2 x cpu, bf16, shards",
    ]


def main() -> None:
    accelerator = start_accelerator(RuntimeConfig(num_threads=1))
    kind = "shards" if accelerator.distributed_type == "FSDP" else "whole weights"
    device = accelerator.device.type
    precision = accelerator.mixed_precision
    line = f"{accelerator.num_processes} x {device}, {precision}, {kind}\n"
    os.write(1, line.encode())  # one write per process, so that lines do not mix
    shutdown(accelerator)


if __name__ == "__main__":
    main()


class Resharding(Callback):
    """Notes, after each evaluation, whether weights are sharded again after a forward."""

    def on_evaluate_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        parts = [module for module in trainer.model.modules() if hasattr(module, "unshard")]
        groups = [
            part._get_fsdp_state()._fsdp_param_group for part in parts if part is not trainer.model
        ]
        print(
            "reshards",
            {group.post_forward_mesh_info is not None for group in groups if group is not None},
        )


def _train_keeping(folder: Path, reshard: str) -> None:
    os.environ.update(FSDP | {"FSDP_RESHARD_AFTER_FORWARD": reshard})
    workload.train(
        workload.make_config(folder, trainer=TrainerConfig(num_epochs=1)), callbacks=(Resharding(),)
    )


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_an_evaluation_leaves_resharding_as_it_is_configured(tmp_path: Path, reshard: str) -> None:
    job = processes.run(
        _train_keeping, tmp_path / "run", reshard, num_processes=2, folder=tmp_path / "logs"
    )
    assert job.output().count(f"reshards {{{reshard == 'true'}}}") == 1, job.output()
