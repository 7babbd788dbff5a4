from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.tensor_memory import address_of, copy_model
from accel_trainer.optim.ema import Ema

from ..modules_with_modes import ZOO, MakeModule, fresh_output, inputs
from ..workload import SmallNet


def average_of(source: nn.Module, *, decay: float) -> Ema:
    return Ema(source, copy_model(source), decay=decay, optimizers={})


def drift(model: nn.Module, step: int) -> None:
    """Move every parameter and buffer as a training step would."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
            else:
                tensor.add_(3)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_the_average_is_the_formula_with_a_ramped_decay(decay: float) -> None:
    source = SmallNet(norm="batch").double()
    ema = average_of(source, decay=decay)
    expected = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    for step in range(1, 31):
        drift(source, step)
        ema.update({"": step})
        ramped = min(decay, (1 + step) / (10 + step))
        for name, tensor in source.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = ramped * expected[name] + (1 - ramped) * tensor
    averaged = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    assert "layers.1.running_var" in averaged  # buffers too
    for name in averaged:
        torch.testing.assert_close(
            ema.model.state_dict()[name], expected[name], rtol=1e-12, atol=1e-12
        )


def test_the_ramp_reaches_the_decay_and_stays_there() -> None:
    source = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(source.weight)
    ema = average_of(source, decay=0.9)
    nn.init.ones_(source.weight)
    for step, share_kept in ((1, 2 / 11), (8, 0.5), (80, 0.9), (81, 0.9), (10**9, 0.9)):
        nn.init.zeros_(ema.model.weight)
        ema.update({"": step})
        assert ema.model.weight.item() == pytest.approx(1 - share_kept, rel=1e-12)


def test_integer_buffers_are_copied() -> None:
    source = SmallNet(norm="batch")
    ema = average_of(source, decay=0.9)
    drift(source, 1)
    ema.update({"": 1})
    assert ema.model.layers[1].num_batches_tracked.item() == 3


class Centred(nn.Module):
    """Has a buffer that another module shares until it is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("center", torch.zeros(2))
        self.head = nn.BatchNorm1d(2)
        self.double()
        self.head.running_mean = self.center


def test_a_buffer_that_the_model_assigns_is_averaged() -> None:
    source = Centred()
    ema, plain = average_of(source, decay=0.5), torch.zeros(2, dtype=torch.float64)
    for step in range(1, 12):
        source.center = source.center + step
        source.head.num_batches_tracked = source.head.num_batches_tracked + 2
        ema.update({"": step})
        decay = min(0.5, (1 + step) / (10 + step))
        plain = decay * plain + (1 - decay) * source.center
    torch.testing.assert_close(ema.model.center, plain, rtol=1e-12, atol=0)
    assert ema.model.head.num_batches_tracked == 22


def test_a_buffer_that_two_modules_share_is_averaged_once_a_step() -> None:
    source = Centred()
    ema = average_of(source, decay=0.5)
    source.center += 1
    ema.update({"": 100})
    assert ema.model.center.tolist() == ema.model.head.running_mean.tolist() == [0.5, 0.5]


def test_the_ema_copies_a_buffer_that_grows_and_skips_one_that_is_gone() -> None:
    source = Centred()
    ema = average_of(source, decay=0.5)
    source.center = torch.arange(3.0).double()
    ema.update({"": 100})
    assert ema.model.center.tolist() == [0, 1, 2]
    source.center = source.center + 2
    ema.update({"": 101})
    assert ema.model.center.tolist() == [1, 2, 3]
    source.center = None
    ema.update({"": 102})
    assert ema.model.center is None


def test_the_average_is_a_model_of_its_own_in_evaluation_mode() -> None:
    source = SmallNet(norm="batch").train()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    ema = average_of(source, decay=0.9)
    assert not any(module.training for module in ema.model.modules())
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    drift(ema.model, 1)
    assert all(module.training for module in source.modules())
    assert all(parameter.requires_grad for parameter in source.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


def test_layout_and_dtype_of_the_source_are_kept() -> None:
    source = SmallNet(norm="batch").bfloat16().to(memory_format=torch.channels_last)
    ema = average_of(source, decay=0.9)
    drift(source, 1)
    ema.update({"": 1})
    theirs = source.state_dict()
    for name, mine in ema.model.state_dict().items():
        assert (mine.dtype, mine.stride()) == (theirs[name].dtype, theirs[name].stride()), name


@pytest.mark.parametrize(
    ("dtype", "decay", "works"),
    [
        (torch.bfloat16, 0.999, False),
        (torch.bfloat16, 0.9, True),
        (torch.float16, 0.999, False),
        (torch.float16, 0.99, True),
        (torch.float32, 0.99999, True),
    ],
)
def test_an_average_that_rounding_would_stop_is_refused(
    dtype: torch.dtype, decay: float, works: bool
) -> None:
    source = nn.Linear(2, 2).to(dtype)
    optimizer = SGD(source.parameters(), lr=0.1)
    with nullcontext() if works else pytest.raises(ConfigError, match="does not move an average"):
        Ema(source, copy_model(source), decay=decay, optimizers={"": optimizer})


def test_the_average_continues_after_its_weights_were_loaded() -> None:
    source = SmallNet(norm="batch")
    ema, resumed = average_of(source, decay=0.9), average_of(source, decay=0.9)
    for step in (1, 2, 3):
        drift(source, step)
        ema.update({"": step})
    resumed.model.load_state_dict(ema.model.state_dict())
    drift(source, 4)
    ema.update({"": 4})
    resumed.update({"": 4})
    theirs = ema.model.state_dict()
    assert all(
        torch.equal(tensor, theirs[name]) for name, tensor in resumed.model.state_dict().items()
    )


def test_a_frozen_parameter_shares_its_memory_until_either_is_written() -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen = source[0].weight
    ema = Ema(source, copy_model(source), decay=0.9, optimizers={"": SGD(source[1].parameters())})
    ema.share()
    average = ema.model[0].weight
    before = frozen.detach().clone()
    assert address_of(average) == address_of(frozen)
    with torch.no_grad():
        source[1].weight.add_(1)
    ema.update({"": 1})
    assert address_of(average) == address_of(frozen)  # a forward and an update write neither
    frozen.data.add_(1)
    assert torch.equal(average, before)
    ema.update({"": 100})
    torch.testing.assert_close(average, before.lerp(frozen, 0.1))


def test_memory_that_cannot_be_shared_is_not() -> None:
    source = nn.Linear(2, 2)
    source.weight = nn.Parameter(torch.from_numpy(np.ones((2, 2), np.float32)))
    ema = Ema(source, copy_model(source), decay=0.9, optimizers={"": SGD([source.bias])})
    ema.share()
    ema.update({"": 1})
    assert torch.equal(ema.model.weight, source.weight)


@pytest.mark.parametrize(("owner", "name"), [(torch, "_lazy_clone"), (torch._C, "_data_address")])
def test_a_torch_that_cannot_share_memory_has_an_average_of_its_own(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    source = nn.Linear(2, 2)
    ema = Ema(source, copy_model(source), decay=0.9, optimizers={"": SGD([source.bias])})
    ema.share()
    before = source.weight.detach().clone()
    source.weight.data.add_(1)
    assert torch.equal(ema.model.weight, before)
    ema.update({"": 100})
    torch.testing.assert_close(ema.model.weight, before.lerp(source.weight, 0.1))


class Masked(nn.Module):
    """Has a mask of -inf, and a maximum that begins there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("highest", torch.tensor(-torch.inf))


def test_buffers_that_begin_with_infinity_are_copied_and_not_averaged() -> None:
    source = Masked()
    ema = average_of(source, decay=0.9)
    ema.update({"": 1})
    assert torch.equal(ema.model.mask, source.mask)
    source.highest.fill_(3.0)
    ema.update({"": 2})
    assert ema.model.highest.item() == 3


@pytest.mark.parametrize("make", ZOO)
def test_an_average_is_of_weights_alone_whatever_is_evaluated(make: MakeModule) -> None:
    source = make().train()
    trained = [each for each in source.parameters() if each.requires_grad]
    optimizers = {"": SGD(trained, lr=0.1)}
    averages = [Ema(source, copy_model(source), decay=0.9, optimizers=optimizers) for _ in range(2)]
    used = averages[0]
    for number in range(1, 5):
        source(inputs()).square().sum().backward()
        optimizers[""].step()
        optimizers[""].zero_grad()
        for average in averages:
            average.update({"": number})
        evaluated = used.evaluated()
        assert not evaluated.training
        torch.testing.assert_close(evaluated(inputs()), fresh_output(make, averages[1].model))
    used.settle()
    for name, each in used.model.state_dict().items():
        torch.testing.assert_close(each, averages[1].model.state_dict()[name])
