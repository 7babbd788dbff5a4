"""An optimizer's state is stored by name: its parameters and groups may come in any order.

An order that comes from a set of names is a different one in each process. Here it is drawn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from accel_trainer.checkpoint.optimizer_state import OptimizerState
from accel_trainer.checkpoint.serialization import decode, encode
from accel_trainer.core.digest import digest_of
from accel_trainer.core.errors import CheckpointError
from accel_trainer.core.learning_rate import RATIO, SCALE, set_learning_rate
from accel_trainer.optim.muon import Muon

Groups = list[dict[str, Any]]
NUM_STEPS = 6


class Net(nn.Module):
    """Layers of equal shapes, whose state fits each other."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)])
        self.heads = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("age", "sex", "pulse")})


class Signs(Optimizer):
    """A user's class: momentum of signs, a counter in its groups and one beside the parameters."""

    def __init__(self, groups: Groups, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"] = self.state.get("all", 0) + 1  # type: ignore[call-overload, index]
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.3)
                change = (
                    state["mean"].sign() / group["num_steps"] + parameter * group["weight_decay"]
                )
                parameter.sub_(change, alpha=group["lr"])


class Summing(SGD):
    """Adds up the norms of all gradients, in its own order."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["norm"] = group.get("norm", 0.0) + sum(
                float(p.grad.norm()) for p in group["params"]
            )
        super().step()


class Listing(SGD):
    """Keeps a list with a tensor for each parameter."""

    def __init__(self, groups: Groups, lr: float = 0.01) -> None:
        super().__init__(groups, lr=lr)
        self.seen = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.seen = state.pop("seen")
        super().load_state_dict(state)


class First(SGD):
    """Keeps one vector for all of its parameters, with the first of them."""

    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        flat = torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])
        self.state[first]["flat"] = flat
        super().step()


class Both(Optimizer):
    """Two optimizers in one, each with its own numbers."""

    def __init__(self, groups: Groups, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr})
        half = len(self.param_groups) // 2
        self.parts: list[Optimizer] = [AdamW(self.param_groups[half:], lr=lr)]
        if half:
            self.parts.append(SGD(self.param_groups[:half], lr=lr, momentum=0.9))

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, stored in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(stored)


BY_NAME: dict[str, Callable[[Groups], Optimizer]] = {
    "SGD with momentum": lambda groups: SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: AdamW(groups, lr=0.01),
    "AdamW with names": lambda groups: AdamW(groups, lr=0.01, amsgrad=True),
    "Adagrad": lambda groups: Adagrad(groups, lr=0.01),
    "centered RMSprop": lambda groups: RMSprop(groups, lr=0.01, centered=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "Muon": lambda groups: Muon(groups, lr=0.01, momentum=0.9),
    "a user's": Signs,
}
BY_ORDER: dict[str, Callable[[Groups], Optimizer]] = {
    "a sum": lambda groups: Summing(groups, lr=0.01),
    "a list": Listing,
    "a vector": First,
    "two optimizers": Both,
}


class Start:
    """A start of a run: its net, and an optimizer whose groups are parts of the names."""

    def __init__(
        self, build: Callable[[Groups], Optimizer], parts: Sequence[Sequence[str]]
    ) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.named = dict(self.net.named_parameters())
        groups: Groups = []
        for names in parts:
            number = min(map(sorted(self.named).index, names))  # of the part, in whatever order
            decay = {"weight_decay": 0.01 * number}
            is_filters = build is BY_NAME["Muon"] and self.named[names[0]].ndim > 2
            if is_filters:
                decay = {"weight_decay": 0.0, "momentum": 0.0, "filter_momentum": 0.6}
            groups.append({"params": [self.named[name] for name in names], **decay})
            if build is BY_NAME["AdamW with names"]:
                groups[-1]["params"] = [(name, self.named[name]) for name in names]
        self.optimizer = build(groups)
        self.state = OptimizerState(self.optimizer, self.net)

    def train(self, steps: range) -> Start:
        for step in steps:
            for name, parameter in self.named.items():
                generator = torch.Generator().manual_seed(step * 1000 + len(name) + ord(name[-8]))
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step()
        return self

    def resumed(self, before: Start) -> Start:
        """Continue from what a checkpoint of `before` holds."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(before.named[name])
        encoded = encode(copy.deepcopy(before.state.state_dict()), name="optimizer")
        read = {name: tensor.clone() for name, tensor in encoded.tensors.items()}
        self.state.load_state_dict(self.state.validated(decode(encoded.skeleton, read)))
        return self

    def bits(self) -> tuple[dict[str, Any], str]:
        values = {name: parameter.tolist() for name, parameter in self.named.items()}
        return values, digest_of(self.state.state_dict())


def drawn_parts(draw: random.Random, *, filters_apart: bool) -> list[list[str]]:
    """Some groups of all names."""
    names = [name for name, _ in Net().named_parameters()]
    parts: dict[tuple[bool, int], list[str]] = {}
    num_groups = draw.randint(1, 4)
    for name in names:
        is_apart = filters_apart and "filters" in name and "weight" in name
        parts.setdefault((is_apart, draw.randrange(num_groups)), []).append(name)
    return list(parts.values())


def shuffled(parts: Sequence[Sequence[str]], draw: random.Random) -> list[list[str]]:
    """The same groups in another order, as are their names."""
    groups = [draw.sample(part, len(part)) for part in parts]
    return draw.sample(groups, len(groups))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_resume_with_another_order_of_groups_has_the_same_bits(
    name: str,
) -> None:
    for seed in range(25):
        draw = random.Random(seed)
        parts = drawn_parts(draw, filters_apart=name == "Muon")
        whole = Start(BY_NAME[name], parts).train(range(NUM_STEPS))
        run = Start(BY_NAME[name], shuffled(parts, draw))
        done = 0
        for kill in sorted(draw.sample(range(1, NUM_STEPS), 2)):
            run = Start(BY_NAME[name], shuffled(parts, draw)).resumed(run.train(range(done, kill)))
            done = kill
        assert run.train(range(done, NUM_STEPS)).bits() == whole.bits(), f"seed {seed}"
        assert "order" not in whole.state.state_dict()


@pytest.mark.parametrize("name", BY_ORDER)
def test_state_that_may_follow_the_order_is_loaded_in_no_other(name: str) -> None:
    num_refused = 0
    for seed in range(10):
        draw = random.Random(seed)
        parts = drawn_parts(draw, filters_apart=False)
        before = Start(BY_ORDER[name], parts).train(range(3))
        same = Start(BY_ORDER[name], parts).resumed(before).train(range(3, NUM_STEPS))
        whole = Start(BY_ORDER[name], parts).train(range(NUM_STEPS))
        assert same.bits() == whole.bits(), f"seed {seed}"
        other = shuffled(parts, draw)
        if other != parts:
            with pytest.raises(CheckpointError, match="order of its parameters.* sorted names"):
                Start(BY_ORDER[name], other).resumed(before)
            num_refused += 1
    assert num_refused > 5


def test_groups_that_are_not_the_same_sets_are_refused() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        parts = drawn_parts(draw, filters_apart=False)
        other = drawn_parts(draw, filters_apart=False)
        before = Start(BY_NAME["AdamW"], parts).train(range(1))
        is_same = {frozenset(part) for part in parts} == {frozenset(part) for part in other}
        if is_same:
            Start(BY_NAME["AdamW"], other).resumed(before)
            continue
        with pytest.raises(CheckpointError, match="different parameters") as caught:
            Start(BY_NAME["AdamW"], other).resumed(before)
        assert caught.value.code == "CKPT_OPTIMIZER"
        assert "\n" not in str(caught.value)


def test_a_setting_that_was_changed_on_purpose_stays_with_its_group() -> None:
    parts = [["filters.0.weight"], ["filters.1.weight"]]
    rest = [name for name, _ in Net().named_parameters() if name not in sum(parts, [])]
    before = Start(BY_NAME["a user's"], [*parts, rest]).train(range(2))
    after = Start(BY_NAME["a user's"], [rest, *reversed(parts)])
    after.optimizer.param_groups[1]["weight_decay"] = 0.5
    after.resumed(before)
    settings = [
        (group["weight_decay"], group["num_steps"]) for group in after.optimizer.param_groups
    ]
    assert settings[1] == (0.5, 2), "that of filters.1"
    assert settings[2] == (before.optimizer.param_groups[0]["weight_decay"], 2)


class Fading(Optimizer):
    """Its steps get shorter, by a factor for each column that it keeps as a setting."""

    def __init__(self, groups: Groups, fade: torch.Tensor) -> None:
        super().__init__(groups, {"lr": 0.01, "weight_decay": 0.0, "fade": fade})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["fade"].mul_(0.9)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["fade"].mean(), alpha=group["lr"])


@pytest.mark.parametrize("fade", [torch.tensor(1.0), torch.linspace(1, 2, 3)])
def test_a_tensor_that_groups_share_as_a_setting_stays_one(fade: torch.Tensor) -> None:
    names = [name for name, _ in Net().named_parameters()]
    for parts in ([names], [names[:3], names[3:]], [names[:2], names[2:6], names[6:]]):
        runs = [Start(lambda groups: Fading(groups, fade.clone()), parts) for _ in range(3)]
        whole, cut, resumed = runs
        resumed.resumed(cut.train(range(3))).train(range(3, NUM_STEPS))
        assert resumed.bits() == whole.train(range(NUM_STEPS)).bits()
        assert len({id(group["fade"]) for group in resumed.optimizer.param_groups}) == 1


def with_rates(order: Sequence[int], rates: Sequence[float]) -> Start:
    """Groups with the ratios of their rates, as the recipe's optimizer gets them."""
    names = [name for name, _ in Net().named_parameters()]
    parts = [names[:4], names[4:8], names[8:]]
    start = Start(BY_NAME["AdamW"], [parts[index] for index in order])
    for index, group in zip(order, start.optimizer.param_groups, strict=True):
        group["lr"] = rates[index]
        group[RATIO] = rates[index] / rates[order[0]]
    start.state = OptimizerState(start.optimizer, start.net)
    return start


def test_rates_that_follow_another_first_group_are_refused() -> None:
    before = with_rates([0, 1, 2], [0.1, 0.01, 0.1]).train(range(1))
    for order in ([0, 2, 1], [2, 1, 0], [2, 0, 1]):
        resumed = with_rates(order, [0.1, 0.01, 0.1]).resumed(before)
        scales = [group[RATIO] for group in resumed.optimizer.param_groups]
        assert scales == pytest.approx([[1.0, 0.1, 1.0][index] for index in order])
    with pytest.raises(CheckpointError, match="learning rates relative to its first group"):
        with_rates([1, 0, 2], [0.1, 0.01, 0.1]).resumed(before)


def of_older_version(piece: dict[str, Any], factors: Sequence[float]) -> dict[str, Any]:
    """Return a piece as before ratios had a key of their own: one number held all factors."""
    piece = copy.deepcopy(piece)
    for groups in (piece["initial_groups"], piece["param_groups"]):
        for group in groups:
            if RATIO in group:
                group[SCALE] = group.pop(RATIO)
    for group, factor in zip(piece["param_groups"], factors, strict=True):
        if factor != 1:
            group[SCALE] = group.get(SCALE, 1.0) * factor
    return piece


@pytest.mark.parametrize("rates", [[0.1, 0.1, 0.1], [0.1, 0.02, 0.3], [0.1, 0.0, 0.1]])
@pytest.mark.parametrize("factors", [[1, 1, 1], [0.25, 1, 0.5], [3, 3, 3]])
@pytest.mark.parametrize("has_ratios", [True, False])
def test_an_older_checkpoint_keeps_the_rates_and_the_factors_of_its_user(
    rates: list[float], factors: list[float], has_ratios: bool
) -> None:
    def make() -> Start:
        start = with_rates([0, 1, 2], rates if has_ratios else [0.1] * 3)
        for group in start.optimizer.param_groups:
            if not has_ratios:
                del group[RATIO]
        start.state = OptimizerState(start.optimizer, start.net)
        return start

    before = make().train(range(2))
    piece = of_older_version(before.state.state_dict(), factors)
    for _ in range(2):  # the checkpoint that the new version saves is loaded as well
        after = make()
        after.state.load_state_dict(after.state.validated(piece))
        set_learning_rate(after.optimizer, 0.7)
        ratios = [rate / rates[0] if has_ratios else 1.0 for rate in rates]
        for number, group in enumerate(after.optimizer.param_groups):
            assert group.get(RATIO, 1.0) == ratios[number]
            factor = factors[sorted_place(piece, after, number)]
            assert group["lr"] == pytest.approx(0.7 * ratios[number] * factor)
            assert group.get(SCALE, 1.0) == pytest.approx(factor * (ratios[number] != 0))
        piece = after.state.state_dict()


def sorted_place(piece: dict[str, Any], start: Start, number: int) -> int:
    """Return the place of a group of the optimizer in a piece, which sorts them by names."""
    names = {each: name for name, each in start.net.named_parameters()}
    mine = sorted(names[each] for each in start.optimizer.param_groups[number]["params"])
    return [group["params"] for group in piece["param_groups"]].index(mine)


def test_groups_without_parameters_change_nothing() -> None:
    def build(groups: Groups) -> Optimizer:
        return AdamW([*groups, {"params": []}], lr=0.01)

    names = [name for name, _ in Net().named_parameters()]
    before = Start(build, [names]).train(range(2))
    assert Start(build, [names[::-1]]).resumed(before).bits() == before.bits()


def test_state_without_names_is_refused() -> None:
    start = Start(BY_NAME["AdamW"], [[name for name, _ in Net().named_parameters()]])
    older = {
        "class": "AdamW",
        "initial_groups": [{}],
        **start.train(range(1)).optimizer.state_dict(),
    }
    with pytest.raises(CheckpointError, match="version that saved it"):
        start.state.validated(older)
