"""The state of every scheduler and optimizer of torch can be kept in `states=`, and loaded."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from accel_trainer.checkpoint.serialization import decode, encode, pack_tensors, unpack_tensors

# What a scheduler needs beside the optimizer.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "LambdaLR": (lambda epoch: 0.5**epoch,),
    "MultiplicativeLR": (lambda epoch: 0.5,),
    "StepLR": (2,),
    "MultiStepLR": ([1, 3, 3],),
    "ExponentialLR": (0.9,),
    "CosineAnnealingLR": (3,),
    "CosineAnnealingWarmRestarts": (3,),
    "CyclicLR": (0.1, 0.2),
    "OneCycleLR": (0.1, 9),
}
OF_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda sgd: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(sgd), lr_scheduler.MultiStepLR(sgd, [2])]
    ),
    "SequentialLR": lambda sgd: lr_scheduler.SequentialLR(
        sgd, [lr_scheduler.ConstantLR(sgd), lr_scheduler.MultiStepLR(sgd, [2])], [2]
    ),
}


def named(module: Any, base: type) -> list[str]:
    return sorted(
        name
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and name[0] != "_"
    )


def through_files(state: object) -> Any:
    encoded = encode(state, name="own")
    return decode(encoded.skeleton, unpack_tensors(b"".join(pack_tensors(encoded.tensors))))


def make_scheduler(name: str) -> tuple[optim.Optimizer, Any]:
    sgd = optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1, momentum=0.9)
    if name in OF_SCHEDULERS:
        return sgd, OF_SCHEDULERS[name](sgd)
    return sgd, getattr(lr_scheduler, name)(sgd, *ARGUMENTS.get(name, ()))


def rates(sgd: optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
    found = []
    for step in range(num_steps):
        sgd.step()
        scheduler.step(*(float(step),) * (type(scheduler).__name__ == "ReduceLROnPlateau"))
        found.append(float(sgd.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("name", named(lr_scheduler, lr_scheduler.LRScheduler))
def test_a_scheduler_of_torch_continues_from_its_stored_state(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of steps in another order
        sgd, scheduler = make_scheduler(name)
        rates(sgd, scheduler, 2)
        again, loaded = make_scheduler(name)
        again.load_state_dict(through_files(sgd.state_dict()))
        loaded.load_state_dict(through_files(scheduler.state_dict()))
        assert rates(again, loaded, 5) == rates(sgd, scheduler, 5)


OPTIMIZERS = named(optim, optim.Optimizer)
REAL_ONLY = {"Adamax", "Adafactor", "LBFGS", "Muon", "SparseAdam"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in OPTIMIZERS]
    + [(name, torch.complex64) for name in OPTIMIZERS if name not in REAL_ONLY],
)
def test_an_optimizer_of_torch_continues_from_its_stored_state(
    name: str, dtype: torch.dtype
) -> None:
    def make() -> tuple[nn.Parameter, optim.Optimizer]:
        weight = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        return weight, getattr(optim, name)([weight], lr=0.1)

    def train(weight: nn.Parameter, optimizer: optim.Optimizer) -> Tensor:
        def loss() -> Tensor:
            optimizer.zero_grad()
            if name == "SparseAdam":
                weight.grad = torch.ones(2, 3).to_sparse()
                return torch.ones(())
            result = (weight * weight.conj()).real.sum()
            result.backward()
            return result

        for _ in range(3):
            loss()
            optimizer.step(loss)
        return weight.detach().clone()

    weight, optimizer = make()
    train(weight, optimizer)
    other, loaded = make()
    other.data.copy_(through_files({"w": weight.detach()})["w"])
    loaded.load_state_dict(through_files(optimizer.state_dict()))
    assert torch.equal(train(other, loaded), train(weight, optimizer))
