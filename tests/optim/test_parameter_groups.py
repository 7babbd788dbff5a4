from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from torch import nn
from torch.optim import SGD

from accel_trainer.checks.rates import describe_rates
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.learning_rate import RATIO
from accel_trainer.optim.config import OptimizerConfig
from accel_trainer.optim.parameter_groups import (
    describe_parameters,
    freeze,
    parameter_groups,
)

from ..workload import SmallNet


def make_net() -> nn.Module:
    return SmallNet(norm="batch")


def test_matrices_and_filters_decay_and_vectors_do_not() -> None:
    model = make_net()
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    named = {group["weight_decay"]: group["param_names"] for group in groups}
    assert named == {
        0.1: ["layers.0.weight", "layers.3.weight", "layers.9.weight"],
        0.0: [
            "layers.1.weight",
            "layers.1.bias",
            "layers.4.weight",
            "layers.4.bias",
            "layers.9.bias",
        ],
    }
    own = dict(model.named_parameters())
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(own[name]) for name in group["param_names"]]


@pytest.mark.parametrize(("weight_decay", "decay_all"), [(0.1, True), (0.0, False)])
def test_parameters_with_one_decay_are_one_group(weight_decay: float, decay_all: bool) -> None:
    model = make_net()
    (group,) = parameter_groups(
        model, OptimizerConfig(weight_decay=weight_decay, decay_norms_and_biases=decay_all)
    )
    assert group["weight_decay"] == weight_decay
    assert group["param_names"] == [name for name, _ in model.named_parameters()]


def test_frozen_parameters_are_left_out() -> None:
    model = make_net()
    model.layers[0].requires_grad_(False)
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert "layers.0.weight" not in [name for group in groups for name in group["param_names"]]


def test_layer_decay_gives_each_block_its_learning_rate() -> None:
    model = make_net()
    names = [name for name, _ in model.named_parameters()]
    groups = parameter_groups(model, OptimizerConfig(layer_decay=0.5))
    scales = {name: group[RATIO] for group in groups for name in group["param_names"]}
    assert sorted(scales) == sorted(names)
    blocks = sorted({int(name.split(".")[1]) for name in names})
    for name in names:
        deeper = len([block for block in blocks if block > int(name.split(".")[1])])
        assert math.isclose(scales[name], 0.5**deeper)


def test_a_pattern_sets_the_learning_rate_and_decay_of_what_it_finds() -> None:
    model = make_net()
    scales, decays = (r"^layers\.9\.=10", r"^layers\.9\.bias=0.5"), ("bias=0.25",)
    config = OptimizerConfig(weight_decay=0.1, learning_rate_scales=scales, weight_decays=decays)
    groups = parameter_groups(model, config)
    found = {n: (g[RATIO], g["weight_decay"]) for g in groups for n in g["param_names"]}
    assert found["layers.9.weight"] == (10, 0.1)
    assert found["layers.9.bias"] == (0.5, 0.25), "the last pattern counts"
    assert found["layers.0.weight"] == (1, 0.1)
    assert found["layers.1.bias"] == (1, 0.25)
    assert found["layers.1.weight"] == (1, 0)


@pytest.mark.parametrize(
    ("patterns", "frozen"), [(("head=10",), None), ((r"^layers\.0=10",), r"^layers\.0")]
)
def test_a_pattern_that_finds_no_trained_parameter_is_refused(
    patterns: tuple[str, ...], frozen: str | None
) -> None:
    model = make_net()
    if frozen is not None:
        freeze(model, frozen)
    with pytest.raises(ConfigError, match="which matches no trained parameter") as refused:
        parameter_groups(model, OptimizerConfig(learning_rate_scales=patterns))
    assert "\n" not in str(refused.value)


def test_the_group_of_muon_has_the_filters_alone() -> None:
    groups = parameter_groups(make_net(), OptimizerConfig(name="muon", filter_momentum=0.5))
    (filters,) = [group for group in groups if "filter_momentum" in group]
    assert filters["param_names"] == ["layers.0.weight", "layers.3.weight"]
    assert (filters["filter_momentum"], filters["weight_decay"]) == (0.5, 0)


def test_parameters_are_frozen_by_a_pattern_of_their_names() -> None:
    model = make_net()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert describe_parameters(model) == f"{total:,} parameters"
    freeze(model, r"^layers\.0\.")
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "layers.0.weight"
    ]
    assert describe_parameters(model) == f"{total:,} parameters, 216 of them frozen"


@pytest.mark.parametrize(("pattern", "which"), [("head", "none"), ("", "all")])
def test_a_pattern_that_freezes_all_parameters_or_none_is_refused(pattern: str, which: str) -> None:
    with pytest.raises(
        ConfigError, match=f"matches {which} of the 8 parameters .*: it must match some, not all"
    ):
        freeze(make_net(), pattern)


class Net(nn.Module):
    """A stem, blocks and a head, which may be registered in another order than they are called."""

    def __init__(self, *, head_first: bool = False, head: str = "head") -> None:
        super().__init__()
        if head_first:
            self.add_module(head, nn.Linear(4, 2))
        self.stem = nn.Linear(4, 4)
        self.blocks = blocks(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
        if not head_first:
            self.add_module(head, nn.Linear(4, 2))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.blocks = blocks(Net)


def blocks(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(make() for _ in range(3)))


def with_head(trunk: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(stages=trunk, head=nn.Linear(4, 2)))


PLAIN = ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
IN_STAGES = ("stages.0.0", "stages.0.1", "stages.0.2", "stages.1.0", "stages.1.1", "stages.1.2")


@pytest.mark.parametrize(
    ("make", "ladder"),
    [
        (Net, PLAIN),
        (lambda: Net(head_first=True), PLAIN),
        (lambda: Net(head_first=True, head="fc"), (*PLAIN[:4], "fc")),
        (lambda: nn.Sequential(Net(), nn.Linear(2, 2)), [*(f"0.{each}" for each in PLAIN), "1"]),
        (lambda: nn.Sequential(nn.Identity(), Net()), [f"1.{each}" for each in PLAIN]),
        (
            lambda: nn.ModuleDict({"net": nn.ModuleDict({"trunk": Net()})}),
            [f"net.trunk.{each}" for each in PLAIN],
        ),
        (
            lambda: with_head(nn.Sequential(*(blocks(lambda: nn.Linear(4, 4)) for _ in "ab"))),
            (*IN_STAGES, "head"),
        ),
        (
            lambda: with_head(nn.Sequential(Stage(), Stage())),
            [
                *(
                    f"stages.{stage}.{each}"
                    for stage in range(2)
                    for each in ("downsample", "blocks.0", "blocks.1", "blocks.2")
                ),
                "head",
            ],
        ),
    ],
)
def test_the_ladder_of_learning_rates_is_that_of_the_blocks(
    make: Callable[[], nn.Module], ladder: Sequence[str]
) -> None:
    groups = parameter_groups(make(), OptimizerConfig(layer_decay=0.5))
    scales = {name: group[RATIO] for group in groups for name in group["param_names"]}
    for name, scale in scales.items():
        (height,) = [i for i, each in enumerate(reversed(ladder)) if name.startswith(f"{each}.")]
        assert scale == 0.5**height, name
    line = describe_rates({"": SGD(groups, lr=0.1)})
    for each in ladder:
        assert re.search(rf" {re.escape(each)}\.[\w.]* x ", line), line


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 2),
        lambda: nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)}),
    ],
)
def test_a_layer_decay_that_finds_no_ladder_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"CONFIG.*layer-decay"):
        parameter_groups(make(), OptimizerConfig(layer_decay=0.5))


def test_rates_that_are_all_the_same_are_not_told() -> None:
    plain = parameter_groups(Net(), OptimizerConfig())
    assert describe_rates({"": SGD(plain, lr=0.1)}) == ""
