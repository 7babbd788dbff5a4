"""Which models and optimizers are sharded, and which are refused by name before any training."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_trainer import BatchConfig, Callback, OptimizerConfig, TrainerConfig
from tests import processes, workload
from tests.changing_net import ChangingNet
from tests.checkpoint.sharded_run import newest, stored_bytes
from tests.joined import FSDP
from tests.variants import slow
from tests.workload import NUM_CLASSES


class Wrapped(nn.Module):
    """Gives a net images as rows [B, 8, 24]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.head = nn.Linear(24, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.net(images.transpose(1, 2).flatten(2)).mean(1))


class Containers(nn.Module):
    """Modules and parameters in all of torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = nn.ModuleDict(
            {"a": nn.Linear(24, 24), "b": nn.ModuleList([nn.Linear(24, 24)])}
        )
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(24)) for _ in range(2)])
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.eye(24))})

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.lists["b"][0](self.lists["a"](rows))
        return rows @ self.weights[0] @ self.weights[1] @ self.named["x"]


class Tied(nn.Module):
    """Uses one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24, bias=False)
        self.second = nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows)))


class Odd(nn.Module):
    """Has a weight in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(24, 48).t().contiguous().t()[:, :24])

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 32, batch_first=True), 2)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    net = ViTForImageClassification(
        ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=NUM_CLASSES)
    )
    return Logits(net)


def language_model(kind: str) -> nn.Module:
    """Return a small transformers model that reads images as words.

    It is not wrapped, because accelerate asks it for its embeddings.
    """
    import transformers

    size = {"vocab_size": 32, "tie_word_embeddings": kind != "Llama"}
    bert = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    make, config = {
        "BERT": (transformers.BertForMaskedLM, transformers.BertConfig(**size, **bert)),
        "T5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(**size, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
        ),
        "Llama": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**size, **bert, **special),
        ),
    }[kind]

    class OfImages(make):
        def forward(self, images: Tensor) -> Tensor:
            words = (images.flatten(1)[:, :16] * 8).long().clamp(0, 15)
            decoded = {"decoder_input_ids": words[:, :2]} if kind == "T5" else {}
            return super().forward(input_ids=words, **decoded).logits[:, 0, :NUM_CLASSES]

    return OfImages(config)


class Logits(nn.Module):
    """Returns the logits of a model of transformers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).logits


class Scaled(nn.Module):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.scale


class Empty(Odd):
    """Has a parameter without elements beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.ones(3, 0))


class Coarse(nn.Module):
    """Computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24, dtype=torch.bfloat16)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows.bfloat16()).float()


class Mixed(Odd):
    """Has a scale in bf16 beside a weight in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24, dtype=torch.bfloat16))

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * self.scale.float()


class SameMemory(Tied):
    """Ties two parameters by their memory alone."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(24, 24, bias=False)
        self.second.weight.data = self.first.weight.data


NETS: dict[str, Callable[[], nn.Module]] = {
    "a transformer": lambda: Wrapped(encoder()),
    "a vit of transformers": vit,
    "containers": lambda: Wrapped(Containers()),
    "tied weights": lambda: Wrapped(Tied()),
    "not contiguous": lambda: Wrapped(Odd()),
    "without a dimension": lambda: Wrapped(Scaled()),
    "without elements": lambda: Wrapped(Empty()),
    "a layer in bf16": lambda: Wrapped(Coarse()),
    "bf16 beside float32": lambda: Wrapped(Mixed()),
    "the same memory": lambda: Wrapped(SameMemory()),
    "BERT": lambda: language_model("BERT"),
    "T5": lambda: language_model("T5"),
    "Llama": lambda: language_model("Llama"),
    "changing buffers": lambda: ChangingNet("usage"),
}


def config_of(folder: Path, name: str = "sgd", max_steps: int | None = 2) -> Any:
    config = workload.make_config(
        folder,
        batch=BatchConfig(per_device_batch_size=8, global_batch_size=16, eval_batch_size=10),
        trainer=TrainerConfig(num_epochs=2, max_steps=max_steps, ema_decay=0.9),
        optimizer=OptimizerConfig(name=name, learning_rate=0.01),
    )
    return replace(config, runtime=replace(config.runtime, sync_batch_norm=False))


def train(
    folder: Path,
    net: str,
    name: str = "sgd",
    max_steps: int | None = 2,
    changes: Mapping[str, str] = FSDP,
) -> None:
    os.environ.update(changes)
    torch.manual_seed(0)
    config = config_of(folder, name, max_steps)
    workload.train(config, net=NETS[net], num_train=72, callbacks=(Reads(),))


class Reads(Callback):
    """Is called while weights are gathered."""

    def on_micro_batch(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "net",
    [
        "a transformer",
        *slow(["a vit of transformers", "containers"]),
        "tied weights",
        "not contiguous",
        "a layer in bf16",
    ],
)
def test_a_model_with_containers_attention_or_tied_weights_is_sharded(
    tmp_path: Path, net: str
) -> None:
    if net == "a vit of transformers":
        pytest.importorskip("transformers")
    processes.run(train, tmp_path / "run", net, num_processes=2, folder=tmp_path / "logs")


@pytest.mark.slow
@pytest.mark.parametrize("net", ["BERT", "T5", "Llama"])
def test_a_language_model_is_sharded_with_or_without_tied_embeddings(
    tmp_path: Path, net: str
) -> None:
    pytest.importorskip("transformers")
    processes.run(train, tmp_path / "run", net, num_processes=2, folder=tmp_path / "logs")
    processes.run(
        train,
        tmp_path / "whole",
        net,
        "sgd",
        2,
        {},
        num_processes=2,
        folder=tmp_path / "logs-whole",
    )
    sharded, whole = (
        load_file(newest(tmp_path / name) / "model.safetensors") for name in ("run", "whole")
    )
    assert all(torch.allclose(sharded[name], whole[name], atol=1e-5) for name in whole)


@pytest.mark.parametrize(
    ("net", "name", "line"),
    [
        ("without a dimension", "sgd", "error[FSDP]: net.scale has the shape [], and cannot be"),
        ("without elements", "sgd", "error[FSDP]: net.empty has the shape [3, 0], and cannot be"),
        ("bf16 beside float32", "sgd", "error[FSDP]: net.scale is torch.bfloat16 and net.weight"),
        ("the same memory", "sgd", "error[FSDP]: net.second.weight shares its memory with a"),
        ("containers", "Adafactor", "error[FSDP]: Adafactor needs whole weights, and does not"),
        ("containers", "Rprop", "error[FSDP]: Rprop needs whole weights, and does not work with"),
        ("containers", "Adagrad", "error[FSDP]: Adagrad has state before its first step, and does"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(
    tmp_path: Path, net: str, name: str, line: str
) -> None:
    job = processes.run(train, tmp_path / "run", net, name, folder=tmp_path / "logs", codes=[1, 1])
    assert line in job.output()


def buffers_at_each_step(folder: Path) -> None:
    os.environ.update(FSDP)
    torch.manual_seed(0)
    net = ChangingNet("usage")
    seen = []
    net.register_forward_pre_hook(
        lambda module, _: seen.append(describe(module)) if module.training else None
    )
    workload.train(config_of(folder, max_steps=4), net=lambda: net, num_train=72)
    print("buffers", seen)


def describe(module: nn.Module) -> str:
    data = b"".join(
        buffer.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for buffer in module.buffers()
    )
    return hashlib.sha256(data).hexdigest()[:8]


def test_sharded_processes_begin_each_step_with_the_same_buffers(tmp_path: Path) -> None:
    job = processes.run(
        buffers_at_each_step, tmp_path / "run", num_processes=2, folder=tmp_path / "logs"
    )
    seen = [
        [line for line in job.output(rank).splitlines() if line.startswith("buffers")]
        for rank in (0, 1)
    ]
    assert seen[0] == seen[1] != []


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["true", "false"])
@pytest.mark.parametrize("net", ["a transformer", "a vit of transformers"])
def test_the_rehearsal_of_a_resume_says_nothing_of_sharded_models(
    tmp_path: Path, net: str, reshard: str
) -> None:
    if net == "a vit of transformers":
        pytest.importorskip("transformers")
    settings = FSDP | {"FSDP_RESHARD_AFTER_FORWARD": reshard}
    for name, attempts in (("whole", (None,)), ("resumed", (2, 7, None))):
        for number, max_steps in enumerate(attempts):
            logs = tmp_path / f"logs-{name}-{number}"
            arguments = (tmp_path / name, net, "adamw", max_steps, settings)
            job = processes.run(train, *arguments, num_processes=2, folder=logs)
            assert not re.search("UNSAVED_STATE|CKPT_INEXACT", job.output(0) + job.output(1))
    assert stored_bytes(newest(tmp_path / "whole")) == stored_bytes(newest(tmp_path / "resumed"))
