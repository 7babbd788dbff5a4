"""Every process has a shard of each weight (FSDP2).

A forward gathers the shards, and so waits for the other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.parameters import Optimizers
from ...core.registry import Pieces
from ...distributed import fsdp
from ...distributed.collectives import SINGLE_PROCESS, Peers, join_peers
from ...distributed.placement import place_model
from .base import Strategy

if TYPE_CHECKING:
    from ...distributed.accelerator import RuntimeConfig


class ShardedStrategy(Strategy):
    """Trains with FSDP, which averages the gradients, as shards, over the processes."""

    has_collective_forward = True

    def refuse(self, flags: Sequence[str]) -> None:
        """Raise ConfigError for the first of the `flags`: they need whole weights."""
        for flag in flags:
            raise ConfigError(
                "FSDP",
                f"{flag} does not work with FSDP: leave it out, or launch with multi_gpu.yaml",
            )

    def place(self, model: nn.Module, config: RuntimeConfig) -> nn.Module:
        """Return `model` on the device, ready to be sharded.

        Raises ConfigError if it cannot be sharded.
        """
        # Shards must be contiguous (torch 2.13).
        model = place_model(model, self.accelerator, replace(config, channels_last=False))
        fsdp.make_shardable(model, self.accelerator)
        return model

    def copy(self, model: nn.Module) -> nn.Module:
        """Return a copy, sharded as `prepare` will shard the model. **Collective.**"""
        return fsdp.sharded_copy(model, self.accelerator)

    def prepare(self, model: nn.Module, optimizers: Optimizers) -> nn.Module:
        """Return the model, sharded by accelerate as the parameters of its only optimizer are.

        **Collective.**

        Raises ConfigError if torch cannot shard them, or the optimizer cannot step shards.
        """
        optimizer = optimizers[""]
        fsdp.reject_optimizer(optimizer)
        with fsdp.own_units(model):
            prepared, _ = self.accelerator.prepare(model, optimizer)
        fsdp.reject_dtypes(prepared)
        # "_fused_sgd_ does not have a sharding strategy" (torch 2.13).
        for group in optimizer.param_groups:
            group["fused"] = False
        return prepared  # type: ignore[no-any-return]  # accelerate is untyped

    def gather(self, pieces: Pieces) -> dict[str, Any]:
        """Return whole tensors on the main process, or the shards if each process stores its own.

        **Collective.**
        """
        return dict(pieces if fsdp.saves_shards(self.accelerator) else fsdp.gather_shards(pieces))

    def checkpoint_peers(self, *, timeout_s: float) -> Peers:
        """Return all processes if each stores its shards. **Collective.**"""
        if not fsdp.saves_shards(self.accelerator):
            return SINGLE_PROCESS
        return join_peers(self.accelerator, timeout_s=timeout_s)

    def is_on_any_process(self, flag: Tensor) -> Tensor:
        """Return a flag [] that is above 0 if `flag` is on any process. **Collective.**"""
        return self.accelerator.reduce(flag)  # type: ignore[no-any-return]  # accelerate is untyped
