"""A setting of accelerate is applied, or refused in one line that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType

from accel_trainer import (
    BatchConfig,
    ConfigError,
    ExitCode,
    RuntimeConfig,
    build_eval_loader,
    build_train_loader,
)
from accel_trainer.distributed.accelerate_settings import reject_unsupported
from accel_trainer.distributed.accelerator import start_accelerator

from .. import processes, workload
from ..joined import FSDP

ROOT = Path(__file__).parents[2]

REFUSED = {
    "DeepSpeed": (
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        "accelerate rejects .*DeepSpeed is not installed",
    ),
    "Megatron": (
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        "accelerate rejects .*Megatron is not installed",
    ),
    "SageMaker": ({"ACCELERATE_USE_SAGEMAKER": "true"}, "accelerate rejects .*smdistributed"),
    "fp8": ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "accelerate rejects .*`fp8` precision requires"),
    "no precision": ({"ACCELERATE_MIXED_PRECISION": "tf32"}, "accelerate rejects .*mode: tf32"),
    "dynamo eager": ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "dynamo_backend: EAGER .*--compile"),
    "dynamo inductor": (
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
        "dynamo_backend: INDUCTOR .*--compile",
    ),
    "no dynamo": (
        {"ACCELERATE_DYNAMO_BACKEND": "warp"},
        "accelerate rejects its settings .*preset",
    ),
    "accumulation": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        "gradient_accumulation_steps: 4 .*--accumulate",
    ),
    "no number": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "four"},
        "accelerate rejects its settings .*preset",
    ),
    "no truth": (
        {"ACCELERATE_USE_CPU": "maybe"},
        "ACCELERATE_USE_CPU is maybe: set it to true or false",
    ),
    "tensor parallel": (
        {"PARALLELISM_CONFIG_TP_SIZE": "2"},
        "accelerate rejects its settings .*preset",
    ),
    "context parallel": (
        {"PARALLELISM_CONFIG_CP_SIZE": "2", **FSDP},
        "accelerate rejects .*ParallelismConfig",
    ),
    "HSDP": (
        {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", **FSDP},
        "accelerate rejects .*ParallelismConfig",
    ),
    "FSDP 1": (
        {**FSDP, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"},
        "fsdp_version: 1 .*to 2",
    ),
    "recomputation": (
        {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
        "fsdp_activation_check.*utils.checkpoint",
    ),
    "offload": (
        {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"},
        "fsdp_offload_params .*: set it to false and shard over more",
    ),
    "ignored": (
        {**FSDP, "FSDP_IGNORED_MODULES": "layers.0"},
        "fsdp_ignored_modules .*: leave it out",
    ),
    "local state": (
        {**FSDP, "FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"},
        "accelerate rejects its settings .*preset",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_supported_is_one_line(tmp_path: Path, name: str) -> None:
    variables, message = REFUSED[name]
    if any(variable.startswith("PARALLELISM_CONFIG") for variable in variables):
        variables = {**variables, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    needs_two = "ACCELERATE_USE_FSDP" in variables
    processes.run(refuse, variables, message, num_processes=1 + needs_two, folder=tmp_path)


def refuse(variables: dict[str, str], message: str) -> None:
    os.environ.update(variables)
    with pytest.raises(ConfigError, match=message) as caught:
        start_accelerator(RuntimeConfig(num_threads=1))
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    if torch.distributed.is_initialized():
        # The other process may still be joining, which fails if this one leaves.
        torch.distributed.barrier()


def test_a_layer_class_that_the_model_does_not_have_is_one_line(tmp_path: Path) -> None:
    processes.run(train_in_blocks, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")


def train_in_blocks(folder: Path) -> None:
    os.environ.update(
        FSDP,
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="BertLayer",
    )
    with pytest.raises(ConfigError, match="fsdp_transformer_layer_cls_to_wrap does not fit: "):
        workload.train(workload.make_config(folder, trainer=workload.TrainerConfig()))


@pytest.mark.parametrize("kind", DistributedType)
def test_an_untested_kind_of_processes_is_not_taken_for_a_supported_one(
    kind: DistributedType,
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = kind
    supported = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
    if kind in supported:
        reject_unsupported(accelerator)
    elif kind != DistributedType.FSDP:  # which has its options looked at, above
        with pytest.raises(ConfigError, match=f"distributed_type: {kind.value} is not supported"):
            reject_unsupported(accelerator)


def test_settings_of_fp8_and_of_accelerates_own_loaders_have_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    start_accelerator(RuntimeConfig(num_threads=1))
    options = DataLoaderConfiguration(split_batches=True, dispatch_batches=True, even_batches=False)
    seen = []
    for accelerator in (Accelerator(cpu=True), Accelerator(cpu=True, dataloader_config=options)):
        reject_unsupported(accelerator)
        data = [(0.5, number) for number in range(10)]
        batch = BatchConfig(global_batch_size=4, eval_batch_size=3)
        train = build_train_loader(data, batch, seed=0, accelerator=accelerator)
        test = build_eval_loader(data, batch, num_parts=1, accelerator=accelerator)
        trained = [micro for step in train.step_batches(0, 0) for micro in step.micro_batches]
        seen.append([batch.targets.tolist() for batch in (*trained, *test.batches())])
    assert seen[0] == seen[1]


PRESET = """
compute_environment: LOCAL_MACHINE
num_machines: 1
machine_rank: 0
main_process_port: 0
use_cpu: {use_cpu}
num_processes: {num_processes}
distributed_type: {kind}
mixed_precision: '{precision}'
{more}
"""
# accelerate's launcher refuses these with a traceback of its own.
LAUNCHERS_OWN = ("DeepSpeed is not installed", "FP8 is not available")
LAUNCHED = {
    "DeepSpeed": (
        {
            "kind": "DEEPSPEED",
            "more": "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4}",
        },
        "DeepSpeed is not installed",
    ),
    "Megatron": (
        {"kind": "MEGATRON_LM", "more": "megatron_lm_config: {megatron_lm_tp_degree: 2}"},
        "Megatron is not installed",
    ),
    "fp8": ({"precision": "fp8"}, "FP8 is not available"),
    "fp16 on a CPU": ({"precision": "fp16"}, "--mixed-precision fp16 needs a GPU"),
    "dynamo EAGER": (
        {"more": "dynamo_config: {dynamo_backend: EAGER}"},
        "dynamo_backend: EAGER is not supported",
    ),
    "dynamo INDUCTOR": (
        {"more": "dynamo_config: {dynamo_backend: INDUCTOR}"},
        "dynamo_backend: INDUCTOR is not",
    ),
    "tensor parallel": (
        {
            "kind": "FSDP",
            "more": "fsdp_config: {fsdp_version: 2}\n"
            "parallelism_config: {parallelism_config_tp_size: 2}",
        },
        "ParallelismConfig is only compatible",
    ),
    "context parallel": (
        {
            "kind": "FSDP",
            "more": "fsdp_config: {fsdp_version: 2}\n"
            "parallelism_config: {parallelism_config_cp_size: 2}",
        },
        "ParallelismConfig is only compatible",
    ),
    "HSDP": (
        {
            "kind": "FSDP",
            "more": "fsdp_config: {fsdp_version: 2}\n"
            "parallelism_config: {parallelism_config_dp_replicate_size: 2}",
        },
        "ParallelismConfig is only compatible",
    ),
    "FSDP 1": (
        {"kind": "FSDP", "more": "fsdp_config: {fsdp_version: 1}"},
        "fsdp_version: 1 is not supported",
    ),
    "FSDP 2, checkpointing": (
        {
            "kind": "FSDP",
            "more": "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}",
        },
        "fsdp_activation_checkpointing is not supported",
    ),
    "FSDP 2, offload": (
        {"kind": "FSDP", "more": "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}"},
        "fsdp_offload_params is not supported",
    ),
    "FSDP 2, no reshard": (
        {
            "kind": "FSDP",
            "more": "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}",
        },
        None,
    ),
    "bf16": ({"precision": "bf16"}, None),
    "downcast_bf16": ({"more": "downcast_bf16: 'yes'"}, None),  # handed to a TPU alone
    "one process": ({"kind": "'NO'", "num_processes": 1, "use_cpu": "true"}, None),
}


@pytest.mark.slow
@pytest.mark.usefixtures("python_is_forked")
@pytest.mark.parametrize("name", LAUNCHED)
def test_an_accelerate_config_is_trained_with_or_refused(tmp_path: Path, name: str) -> None:
    pytest.importorskip("sklearn")
    changes, message = LAUNCHED[name]
    values = {
        "kind": "MULTI_GPU",
        "use_cpu": "false",
        "num_processes": 2,
        "precision": "no",
        "more": "",
    } | changes
    (tmp_path / "config.yaml").write_text(PRESET.format_map(values))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(tmp_path / "config.yaml"),
    ]
    command += ["recipes/cifar.py", "--dataset", "digits", "--model", "resnet8", "--max-steps", "1"]
    command += [
        "--augment.crop-padding",
        "1",
        "--output-dir",
        str(tmp_path / "run"),
        "--cache-dir",
        str(tmp_path),
    ]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    launched = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if message is None:
        assert launched.returncode == 0, launched.stderr
        assert "(--max-steps)" in launched.stdout
        return
    assert launched.returncode != 0
    if message in LAUNCHERS_OWN:
        assert message in launched.stderr
        return
    said = [line for line in launched.stderr.splitlines() if line.startswith("accel_trainer: ")]
    assert said, launched.stderr
    assert all(message in line for line in said), "one process speaks, or two that have not met"
