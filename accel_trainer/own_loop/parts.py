"""The models, optimizers and states around a user's own loop, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.state_dict import training_state
from ..checks.parts import check_trained
from ..core.parameters import Optimizers
from ..core.registry import Registry, Stateful
from ..training.strategy.data_parallel import settle_buckets
from .process_buffers import ProcessBuffers
from .updates import plain


@dataclass(frozen=True)
class Parts:
    """What trains: `module` holds all models, unwrapped, and `optimizers` are torch's own."""

    module: nn.Module
    optimizers: Optimizers
    given: Sequence[Any]
    """The models and optimizers as the user has them, perhaps wrapped by accelerate."""

    @classmethod
    def of(cls, accelerator: Accelerator, model: Any, optimizer: Any) -> Parts:
        """Return the parts of `exact_run`'s arguments.

        **Collective**: DDP settles its buckets, as it would after the first step.

        Raises ConfigError for what cannot be stored as a whole.
        """
        models = model if isinstance(model, Mapping) else {"": model}
        optimizers = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        check_trained(models, optimizers, accelerator)
        unwrapped = {name: accelerator.unwrap_model(each) for name, each in models.items()}
        module = unwrapped[""] if [*unwrapped] == [""] else nn.ModuleDict(unwrapped)
        for each in models.values():
            if isinstance(each, DistributedDataParallel) and not each.find_unused_parameters:
                settle_buckets(each)
        torchs = {name: plain(each) for name, each in optimizers.items()}
        return cls(module, torchs, [*models.values(), *optimizers.values()])

    def known(self, accelerator: Accelerator, states: Mapping[str, Any]) -> list[object]:
        """Return the objects that a checkpoint of the run holds, and those inside of wrappers."""
        inside = [getattr(each, "scheduler", None) for each in states.values()]
        return [
            *self.module.modules(),
            *self.optimizers.values(),
            *self.given,
            *states.values(),
            *inside,
            accelerator.scaler,
        ]

    def registry(
        self, accelerator: Accelerator, states: Mapping[str, Any], loop: Stateful
    ) -> Registry:
        """Return all parts that have state, by the names of their pieces."""
        trained = training_state(
            self.module, self.optimizers, scaler=accelerator.scaler, states=states
        )
        buffers = ProcessBuffers(self.module, states, accelerator)
        return Registry({**trained.parts, "process_buffers": buffers, "loop": loop})
