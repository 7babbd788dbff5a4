"""The fused kernels of torch are used only where they step a parameter as its plain loops do,
whatever its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from accel_trainer import ConfigError, OptimizerConfig, RuntimeConfig
from accel_trainer.checkpoint.state_dict import load_weights
from accel_trainer.core.tensor_memory import is_dense, make_dense
from accel_trainer.distributed.placement import place_model
from accel_trainer.optim.config import UNSUITABLE
from accel_trainer.optim.optimizers import build_optimizer, fill_momentum
from accel_trainer.run.optimization import build_own_optimizers

from .. import processes, workload
from ..training.test_exactness import final_files
from ..variants import slow_but

NAMES = [
    "sgd",
    "muon",
    *(n for n, v in vars(torch.optim).items() if isinstance(v, type) and n != "Optimizer"),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda whole: whole[:3].clone(),
    "slice": lambda whole: whole[:3, 1:5],
    "transposed": lambda whole: whole.transpose(0, 1)[:4].clone().transpose(0, 1),
    "expanded": lambda whole: whole[:1].expand(3, *whole.shape[1:]),
    "channels-last": lambda whole: whole.clone(memory_format=torch.channels_last),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Parts(nn.Module):
    """One parameter of each layout, one that gets its first gradient late, one without elements,
    one without any."""

    def __init__(self, dtype: torch.dtype, *, kernel: tuple[int, ...], num_empty: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = torch.randn(4, 6, *kernel).to(dtype)
        made = {
            name: make(whole) for name, make in LAYOUTS.items() if kernel or name != "channels-last"
        }
        made |= {"late": whole.clone(), "unused": whole.clone(), "empty": whole[:num_empty]}
        if kernel:
            made["vector"] = torch.ones(5).to(dtype)
        self.parts = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in made.items()})

    def losses(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros((), dtype=torch.float64)
        for name, part in self.parts.items():
            noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
            if name not in ("late", "unused") or (name == "late" and step >= 3):
                loss = loss + (part.double() * noise).sum()
        return loss


def stepped(
    model: Parts, optimizer: Optimizer, *, rounds_to: torch.dtype | None = None
) -> dict[str, Tensor]:
    for step in range(10):
        model.losses(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in model.parameters() if rounds_to is not None else ():
            part.data = part.data.to(rounds_to).double()
    return {name: part.detach().clone() for name, part in model.parts.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", slow_but(["sgd", "muon", "AdamW", "Adagrad"], [n for n in NAMES if n not in UNSUITABLE])
)
def test_each_optimizer_steps_every_layout_and_dtype_as_unfused(
    name: str, dtype: torch.dtype
) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, eps=1e-4, weight_decay=0.1)
    num_empty = 0 if name != "Adafactor" else 1  # which divides by the number of elements
    kernel = () if name == "Muon" else (3, 3)  # torch's takes matrices only
    model = place_model(
        Parts(dtype, kernel=kernel, num_empty=num_empty), Accelerator(cpu=True), RuntimeConfig()
    )
    assert all(is_dense(part) for part in model.parameters())
    optimizer = build_optimizer(model, config)
    if isinstance(optimizer, torch.optim.SGD):
        fill_momentum(optimizer)
    mine = stepped(model, optimizer)
    plain = Parts(dtype, kernel=kernel, num_empty=num_empty)
    is_half = dtype.itemsize == 2
    computes_in_float32 = is_half and all(group.get("fused") for group in optimizer.param_groups)
    make_dense(plain if not computes_in_float32 else plain.double())
    reference = build_optimizer(plain, config)
    for group in reference.param_groups:
        group["fused"] = False
    theirs = stepped(plain, reference, rounds_to=dtype if computes_in_float32 else None)
    ulps = {False: 8, True: 4}[is_half]
    for part, tensor in theirs.items():
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        difference = (mine[part].double() - tensor.double()).abs()
        assert not tensor.numel() or difference.max() <= ulps * torch.finfo(dtype).eps * largest, (
            part
        )


def test_sgd_in_half_precision_and_only_that_is_stepped_unfused() -> None:
    for name in ("sgd", "adamw", "Adagrad"):
        for dtype in DTYPES:
            model = nn.Linear(3, 2).to(dtype)
            (group,) = build_optimizer(
                model, OptimizerConfig(name=name, weight_decay=0.0)
            ).param_groups
            assert group["fused"] is not (name == "sgd" and dtype.itemsize == 2), (name, dtype)


def test_momentum_from_the_start_changes_no_bit_of_fused_sgd() -> None:
    results = []
    for has_momentum in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 2))
        optimizer = build_optimizer(model, OptimizerConfig(learning_rate=0.1))
        if has_momentum:
            fill_momentum(optimizer)
        for _ in range(3):
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        results.append([t.detach().numpy().tobytes() for t in (*model.parameters(), *momentum)])
    assert results[0] == results[1]


# --- parameters that are views ---


def test_a_placed_slice_trains_all_its_elements_and_no_memory_of_others() -> None:
    whole = torch.ones(3, 16)
    model = nn.Linear(8, 3, bias=False)
    model.weight = nn.Parameter(whole[:, :8])
    model = place_model(model, Accelerator(cpu=True), RuntimeConfig())
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=0.1, weight_decay=0.0))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(whole, torch.ones(3, 16))
    assert (model.weight < 1).all()


def test_parameters_that_share_memory_stay_tied_when_they_are_placed() -> None:
    filters = torch.randn(4, 8, 3, 3)
    model = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)])
    model[0].weight = nn.Parameter(filters[:, :4])
    model[1].weight = nn.Parameter(filters[:, :4])
    model[2].weight = model[0].weight
    placed = place_model(model, Accelerator(cpu=True), RuntimeConfig(channels_last=True))
    assert placed[0].weight.data_ptr() == placed[1].weight.data_ptr()
    assert placed[2].weight is placed[0].weight
    assert torch.equal(placed[0].weight, filters[:, :4])


def test_weights_are_loaded_into_a_model_with_an_expanded_parameter() -> None:
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.zeros(1, 2).expand(3, 2))
    load_weights(model, {"weight": torch.arange(6.0).view(3, 2)})
    assert model.weight.flatten().tolist() == [0, 1, 2, 3, 4, 5]


# --- whole runs ---


class KeepsDtypes(nn.Module):
    """Is not cast to one dtype."""

    def to(self, *unused: Any) -> KeepsDtypes:
        return self


class OddNet(KeepsDtypes):
    """Parameters that are slices, transposed, expanded, in half precision, late, unused and without
    elements."""

    def __init__(self, *, norm: str, dropout: float) -> None:
        super().__init__()
        whole = torch.randn(32, 48) / 8
        self.sliced = nn.Parameter(whole[:, :16])
        self.transposed = nn.Parameter((torch.randn(16, 192) / 16).T)
        self.expanded = nn.Parameter(torch.zeros(1).expand(32))
        self.coarse = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
        self.late = nn.Parameter(torch.zeros(workload.NUM_CLASSES))
        self.unused, self.empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
        self.head = nn.Linear(32, workload.NUM_CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(1).expand(32))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(images.flatten(1) @ self.transposed @ self.sliced.T + self.expanded)
        logits = self.head(hidden * self.coarse.float() * self.scale) + self.empty.sum()
        if self.training:
            self.calls += 1
        return logits + self.late if self.calls > 4 else logits


class NormedNet(nn.Module):
    """Its weight is computed in each forward, by torch's older `weight_norm`."""

    def __init__(self, *, norm: str, dropout: float) -> None:
        super().__init__()
        self.head = nn.utils.weight_norm(nn.Linear(192, workload.NUM_CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def train_odd(
    folder: Path, name: str, stops: list[int | None], net: type[nn.Module] = OddNet
) -> None:
    workload.SmallNet = net  # type: ignore[misc,assignment]
    for max_steps in stops:
        config = workload.make_config(
            folder, optimizer=OptimizerConfig(name=name, learning_rate=0.01)
        )
        trainer = replace(config.trainer, max_steps=max_steps, max_grad_norm=None)
        workload.train(replace(config, trainer=trainer))


@pytest.mark.parametrize("name", slow_but(["sgd"], ["sgd", "adamw", "Adagrad"]))
def test_a_run_with_views_half_and_late_parameters_resumes(tmp_path: Path, name: str) -> None:
    processes.run(train_odd, tmp_path / "whole", name, [None], folder=tmp_path / "1")
    processes.run(train_odd, tmp_path / "parts", name, [3, 5, 7, None], folder=tmp_path / "2")
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")


def test_a_run_with_weight_norm_resumes_with_its_ema(tmp_path: Path) -> None:
    for name, stops in (("whole", [None]), ("parts", [3, 7, None])):
        processes.run(
            train_odd, tmp_path / name, "sgd", stops, NormedNet, folder=tmp_path / f"logs-{name}"
        )
    assert final_files(tmp_path / "parts") == final_files(tmp_path / "whole")
    stored = max((tmp_path / "whole" / "checkpoints").glob("step-*"))
    model, ema = (load_file(stored / f"{piece}.safetensors") for piece in ("model", "ema"))
    assert not any(torch.equal(model[name], ema[name]) for name in model), "averaged, not copied"


# --- optimizers of the user ---

REFUSED: Mapping[str, tuple[Any, str]] = {
    "half": (lambda p: SGD(p, lr=0.1, fused=True), "weight, which is torch.bfloat16"),
    "dampening": (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, fused=True), "dampening"),
    "complex": (lambda p: AdamW(p, fused=True), "weight, which is torch.complex64"),
    "complex Adagrad": (lambda p: Adagrad(p, fused=True), "weight, which is torch.complex64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_own_fused_optimizer_that_torch_steps_wrongly_is_refused(case: str) -> None:
    build, words = REFUSED[case]
    model = nn.Linear(2, 2, dtype=torch.complex64 if "complex" in case else torch.bfloat16)
    with pytest.raises(ConfigError, match=words) as refused:
        build_own_optimizers(
            {"": lambda model: build(model.parameters())},
            model.float() if case == "dampening" else model,
        )
    assert "pass fused=False" in str(refused.value)
