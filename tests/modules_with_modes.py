"""Modules that compute something from their weights when their mode changes, as libraries do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

MakeModule = Callable[[], nn.Module]

SIZE = 4


def inputs() -> Tensor:
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(5))


def _weight(seed: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 3)


class Merging(nn.Module):
    """Adds an adapter to its frozen weight in evaluation, in place, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weight(1, SIZE, SIZE).requires_grad_(False)
        self.down = _weight(2, 2, SIZE)
        self.up = _weight(3, SIZE, 2)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.is_merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.up @ self.down).detach()
            self.is_merged = not mode
        return self

    def forward(self, rows: Tensor) -> Tensor:
        out = rows @ self.weight.T
        return out if self.is_merged else out + rows @ self.down.T @ self.up.T


class WithMergingChild(nn.Module):
    """Its `train` changes the weights of a child, as the convolutions of loralib do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE)
        nn.init.eye_(self.base.weight)
        nn.init.zeros_(self.base.bias)
        self.base.requires_grad_(False)
        self.delta = _weight(4, SIZE, SIZE)
        self.is_merged = False

    def train(self, mode: bool = True) -> WithMergingChild:
        super().train(mode)
        if mode == self.is_merged:
            self.base.weight.data += (-1 if mode else 1) * self.delta.detach()
            self.is_merged = not mode
        return self

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.base(rows)
        return out if self.is_merged else out + rows @ self.delta.T


class Caching(nn.Module):
    """Computes a kernel in the first forward of an evaluation, until `train()`, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weight(6, SIZE, SIZE)
        self.kernel: Tensor | None = None

    def train(self, mode: bool = True) -> Caching:
        if mode:
            self.kernel = None
        return super().train(mode)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            return rows @ self.weight.tanh().T
        if self.kernel is None:
            self.kernel = self.weight.tanh().detach()
        return rows @ self.kernel.T


class Folding(nn.Module):
    """Computes one weight of two branches in `eval()`, as structural reparametrisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.one = _weight(7, SIZE, SIZE)
        self.other = _weight(8, SIZE, SIZE)
        self.folded: Tensor | None = None

    def train(self, mode: bool = True) -> Folding:
        self.folded = None if mode else (self.one + self.other).detach()
        return super().train(mode)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            return rows @ self.one.T + rows @ self.other.T
        assert self.folded is not None
        return rows @ self.folded.T


class KeepingNorm(nn.Module):
    """Keeps its norm in evaluation, by the `train` of torch's own examples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weight(9, SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        nn.init.constant_(self.norm.running_mean, 0.25)  # type: ignore[arg-type]  # a tensor

    def train(self, mode: bool = True) -> KeepingNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.norm(rows @ self.weight.T)
        return out


class Table(nn.Module):
    """Builds a buffer that no state dict has in its first forward, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weight(10, SIZE, SIZE)
        self.register_buffer("table", None, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(SIZE, dtype=rows.dtype).cos()
        return (rows * self.table) @ self.weight.T


def _linear() -> nn.Linear:
    torch.manual_seed(11)
    return nn.Linear(SIZE, SIZE)


def normed_by_hooks() -> nn.Module:
    """Return layers of torch's older norms, whose hooks set an attribute at each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(_linear())
    return nn.Sequential(old, nn.utils.spectral_norm(_linear()))


def normed() -> nn.Module:
    """Return layers of torch's norms, of which one iterates in training alone."""
    kinds = nn.utils.parametrizations
    return nn.Sequential(kinds.weight_norm(_linear()), kinds.spectral_norm(_linear()))


ZOO: tuple[MakeModule, ...] = (
    Merging,
    WithMergingChild,
    Caching,
    Folding,
    KeepingNorm,
    Table,
    normed_by_hooks,
    normed,
)


def fresh_output(make: MakeModule, model: nn.Module) -> Tensor:
    """Return what a new model with the weights of `model` returns in evaluation mode."""
    fresh = make()
    fresh.load_state_dict(model.state_dict())
    output: Tensor = fresh.eval()(inputs())
    return output
