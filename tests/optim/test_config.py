from __future__ import annotations

from inspect import signature

import pytest
import torch
from torch import nn
from torch.optim import SGD

from accel_trainer.core.errors import ConfigError
from accel_trainer.optim.config import OptimizerConfig, optimizer_class_of, pattern_values
from accel_trainer.optim.muon import Muon
from accel_trainer.optim.optimizers import build_optimizer

NAMES = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]


@pytest.mark.parametrize(
    ("name", "learning_rate"),
    [("sgd", 0.1), ("muon", 0.1), ("adamw", 1e-3), ("RMSprop", 0.01), ("Adadelta", 1.0)],
)
def test_each_optimizer_has_a_default_learning_rate(name: str, learning_rate: float) -> None:
    assert OptimizerConfig(name=name).with_defaults().learning_rate == learning_rate


def test_a_learning_rate_that_is_given_is_kept() -> None:
    assert OptimizerConfig(name="adamw", learning_rate=0.5).with_defaults().learning_rate == 0.5


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_follows_the_global_batch_by_the_chosen_rule(
    rule: str, expected: float
) -> None:
    config = OptimizerConfig(learning_rate=0.1, learning_rate_scaling=rule, base_batch_size=256)
    scaled = config.peak_learning_rate(global_batch_size=1024)
    assert scaled == pytest.approx(expected, rel=1e-15)
    assert config.peak_learning_rate(global_batch_size=256) == 0.1


def test_an_optimizer_is_found_by_name_here_or_in_torch() -> None:
    found = [optimizer_class_of(name) for name in ("sgd", "muon", "RMSprop")]
    assert found == [SGD, Muon, torch.optim.RMSprop]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adamW", "did you mean adamw[?]"),
        ("rmsprop", "did you mean RMSprop[?]"),
        ("os.system", "which does not exist: it is sgd, adamw, muon or a class of torch.optim"),
        ("Optimizer", "which does not exist"),
        ("LBFGS", "it needs several forwards for a step: choose a different"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_with_a_hint(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"OptimizerConfig\(name=\) is {name}, .*{said}"):
        OptimizerConfig(name=name)


def test_a_pattern_may_itself_contain_an_equals_sign() -> None:
    config = OptimizerConfig(weight_decays=("norm|bias=0", "a=b=0.5"))
    assert pattern_values(config, "weight_decays") == {"norm|bias": 0, "a=b": 0.5}


@pytest.mark.parametrize("text", ["head", "head=", "head=-1", "head=nan", "(=1"])
def test_a_pattern_without_a_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="optimizer.learning_rate_scales has .*: write"):
        OptimizerConfig(learning_rate_scales=(text,))


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_of_torch_has_the_defaults_of_its_class(name: str) -> None:
    ours, theirs = (nn.Linear(3, 2).requires_grad_(True) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(name=name, weight_decay=0.0)
    optimizers = [build_optimizer(ours, config)]
    kind = optimizer_class_of(name)
    decay = {"weight_decay": 0.0} if "weight_decay" in signature(kind).parameters else {}
    optimizers.append(kind(theirs.parameters(), **decay))
    for step in range(20):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            net(inputs).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-7)


def test_what_is_set_is_kept_and_a_run_records_what_it_uses() -> None:
    given = OptimizerConfig(name="Adadelta", eps=1e-3, momentum=0.5).with_defaults()
    assert (given.eps, given.momentum) == (1e-3, 0.5)
    for name, eps, momentum in (
        ("sgd", 1e-8, 0.9),
        ("adamw", 1e-8, 0.9),
        ("Adadelta", 1e-6, 0.9),
        ("Adagrad", 1e-10, 0.9),
        ("RMSprop", 1e-8, 0),
    ):
        config = OptimizerConfig(name=name).with_defaults()
        assert (config.eps, config.momentum) == (eps, momentum), name
