"""The models of programs, [B, 6] -> [B, 3]: each has a `body` and a `head`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_trainer import StepBatch, StepReport, Trainer

from .draft import Draft

NUM_FEATURES = 6
NUM_CLASSES = 3
WIDTH = 12


class Net(nn.Module):
    """A body that computes features, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


def plain() -> Net:
    return Net(nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh()))


def flat() -> Net:
    """All parameters are slices of one tensor, some of them of the same shape."""
    body = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    net = Net(nn.Sequential(body, nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    parameters = [*net.parameters()]
    memory = torch.cat([each.detach().flatten() for each in parameters])
    slices = memory.split([each.numel() for each in parameters])
    for parameter, part in zip(parameters, slices, strict=True):
        parameter.data = part.view_as(parameter)
    return net


def norms() -> Net:
    return Net(nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()))


def dropout() -> Net:
    return Net(nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.ReLU(), nn.Dropout(0.2)))


def frozen_base() -> Net:
    """Trains an adapter and the head on a base that stands still."""
    base = nn.Linear(NUM_FEATURES, WIDTH).requires_grad_(False)
    return Net(nn.Sequential(base, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()))


class LowRank(nn.Module):
    """A linear layer that stands still, and a change of low rank."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))


def lora() -> Net:
    return Net(nn.Sequential(LowRank(nn.Linear(NUM_FEATURES, WIDTH)), nn.Tanh()))


class MomentumNet(Net):
    """Adds the features of a slow copy of the body, which its trainer moves."""

    def __init__(self) -> None:
        super().__init__(norms().body)
        self.slow = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            slow = self.slow(inputs)
        return self.head(self.body(inputs) + 0.1 * slow)


class Follow(Trainer):
    """Moves the slow copy a tenth of the way after each step."""

    def train_step(self, step_batch: StepBatch) -> StepReport:
        report = super().train_step(step_batch)
        with torch.no_grad():
            pairs = zip(self.model.slow.parameters(), self.model.body.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.1)
        return report


class TiedNet(Net):
    """Encodes, decodes and encodes again by one matrix."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(NUM_FEATURES, WIDTH))
        self.again = nn.Linear(NUM_FEATURES, WIDTH)
        self.again.weight = self.body.weight

    def forward(self, inputs: Tensor) -> Tensor:
        decoded = F.linear(F.tanh(self.body(inputs)), self.body.weight.T)
        return self.head(F.tanh(self.again(decoded)))


class Folding(nn.Module):
    """A linear layer with a scale, which it folds into its weights from evaluation to training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))
        self.folded: Tensor | None = None

    def train(self, mode: bool = True) -> Folding:
        if mode:
            self.folded = None
        super().train(mode)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            return F.linear(inputs, self.layer.weight * self.scale, self.layer.bias)
        if self.folded is None:
            self.folded = self.layer.weight * self.scale
        return F.linear(inputs, self.folded, self.layer.bias)


def folding() -> Net:
    return Net(nn.Sequential(Folding(), nn.Tanh()))


class Centred(nn.Module):
    """Subtracts a running mean, in a buffer that each forward assigns, and counts.

    It counts the forwards, and how often each feature is positive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("positive", torch.zeros(WIDTH, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.layer(inputs)
        if self.training and len(inputs):
            self.mean = self.mean.lerp(features.detach().float().mean(0), 0.1)
            self.count += 1
            self.positive += (features > 0).sum(0)
        return F.tanh(features - self.mean + self.positive / 1000)


class OddWeights(nn.Module):
    """Weights that are slices, expanded, in half precision and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sliced = nn.Parameter((torch.randn(WIDTH, 48) / 3)[:, :NUM_FEATURES])
        self.expanded = nn.Parameter(torch.zeros(1).expand(WIDTH))
        self.coarse = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, inputs: Tensor) -> Tensor:
        features = F.relu(inputs @ self.sliced.T + self.expanded)
        return features * self.coarse.float() + self.empty.sum()


class CentredNet(Net):
    """A net whose counts of samples add up over processes; its counts of forwards do not."""

    summed_buffers = ("body.positive",)

    def __init__(self) -> None:
        super().__init__(Centred())


def momentum(draft: Draft) -> None:
    draft.model = MomentumNet()
    draft.trainer_classes.append(Follow)


def _with(make: Callable[[], nn.Module]) -> Callable[[Draft], None]:
    def choose(draft: Draft) -> None:
        draft.model = make()

    return choose


MODELS: dict[str, Callable[[Draft], None]] = {
    "plain": _with(plain),
    "norms": _with(norms),
    "dropout": _with(dropout),
    "frozen base": _with(frozen_base),
    "lora": _with(lora),
    "momentum encoder": momentum,
    "tied": _with(TiedNet),
    "folding": _with(folding),
    "buffers": _with(CentredNet),
    "odd weights": _with(lambda: Net(OddWeights())),
    "one memory": _with(flat),
}
