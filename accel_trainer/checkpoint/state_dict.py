"""The parts of a training that a checkpoint holds: their state, and how it is loaded again.

Everything is checked before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from os.path import commonprefix
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.digest import digest_of
from ..core.errors import CheckpointError, listed
from ..core.parameters import Optimizers, named_parts
from ..core.registry import Registry, StateDict, Stateful
from ..core.tensor_memory import make_dense
from ..core.wording import describe_tensor
from ..optim.evaluation_weights import evaluation_weights, has_evaluation_weights
from .optimizer_state import OptimizerState
from .serialization import Tensors
from .sharded import load_all, load_like

if TYPE_CHECKING:
    from ..optim.ema import Ema

# The end of the key under which torch stores what `get_extra_state` returns.
EXTRA_STATE = "_extra_state"


@dataclass(eq=False)
class ModelWeights(Stateful):
    """A model's state dict; `name` is the name of the piece."""

    model: nn.Module
    _: KW_ONLY
    name: str

    def state_dict(self) -> StateDict:
        """Return the model's state dict."""
        return dict(self.model.state_dict())

    def validated(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors. Raises CheckpointError if they belong to another model."""
        check_weights(self.name, self.model.state_dict(), stored)
        return stored

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tensors; only what this process needs of a stored one is read."""
        live = self.model.state_dict()
        self.model.load_state_dict(
            {key: load_like(live[key], value) for key, value in state.items()}
        )


@dataclass(eq=False)
class EvaluatedWeights(ModelWeights):
    """The weights with which the optimizers evaluate, for all who read a checkpoint.

    `TrainedWeights` are the ones with which they go on training.
    """

    optimizers: Optimizers

    def state_dict(self) -> StateDict:
        """Return a copy of the model's state dict as it is in an evaluation."""
        with evaluation_weights(self.optimizers):
            return copy.deepcopy(super().state_dict())


class TrainedWeights(ModelWeights):
    """The weights that an optimizer trains, if it evaluates with others."""

    is_optional = True


@dataclass(eq=False)
class AverageWeights(ModelWeights):
    """The averaged weights, which start as the model's on a branch of a run without an average."""

    average: Ema
    source: nn.Module

    starts_fresh = True

    def state_dict(self) -> StateDict:
        """Return the averages, without what modules have computed from them for an evaluation.

        **Host sync.** What equals the weights shares their memory afterwards.
        """
        self.average.settle()
        self.average.share()
        return super().state_dict()

    def start_fresh(self) -> None:
        """Copy the weights of the source."""
        self.model.load_state_dict(self.source.state_dict())


class UnlistedBuffers(Stateful):
    """Buffers that training changed and that no state dict has, such as a cache that grew.

    They are stored by the name of their model.
    """

    is_optional = True

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._initial = {
            name: {key: digest_of(buffer) for key, buffer in unlisted_buffers(model).items()}
            for name, model in models.items()
        }

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the buffers that differ from those at the start."""
        states = {}
        for name, model in self._models.items():
            before = self._initial[name]
            changed = {
                key: buffer
                for key, buffer in unlisted_buffers(model).items()
                if digest_of(buffer) != before.get(key)
            }
            if changed:
                states[name] = changed
        return states

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the buffers."""
        for name, model in self._models.items():
            live = unlisted_buffers(model)
            device = next((tensor.device for tensor in model.parameters()), None)
            for key, stored in state.get(name, {}).items():
                path, _, attribute = key.rpartition(".")
                whole = load_all(stored)
                if describe_tensor(live.get(key)) == describe_tensor(whole):
                    live[key].copy_(whole)
                else:
                    model.get_submodule(path).register_buffer(
                        attribute, whole.to(device), persistent=False
                    )


@dataclass(eq=False)
class OwnState(Stateful):
    """The state of anything with `state_dict` and `load_state_dict`, such as what a user keeps."""

    owner: Any

    def state_dict(self) -> StateDict:
        """Return the owner's state dict."""
        return self.owner.state_dict()  # type: ignore[no-any-return]  # the owner is the user's

    def load_state_dict(self, state: Any) -> None:
        """Pass the owner what it returned, with tensors on the CPU."""
        self.owner.load_state_dict(load_all(state))


def training_state(
    model: nn.Module,
    optimizers: Optimizers,
    average: Ema | None = None,
    scaler: torch.amp.GradScaler | None = None,
    states: Mapping[str, Any] = MappingProxyType({}),
) -> Registry:
    """Return the parts of a training that have state. Call it before the first step.

    `states` are the user's own. Parts are loaded in the order in which they stand here.
    """
    models = {"model": model}
    parts: dict[str, Stateful] = {"model": ModelWeights(model, name="model")}
    if any(map(has_evaluation_weights, optimizers.values())):
        parts["model"] = EvaluatedWeights(model, name="model", optimizers=optimizers)
        # Loaded into the same module after "model": training continues with these weights.
        parts["training_weights"] = TrainedWeights(model, name="training_weights")
    for name, optimizer in named_parts(optimizers).items():
        parts[name] = OptimizerState(optimizer, model)
    if average is not None:
        models["ema"] = average.model
        parts["ema"] = AverageWeights(average.model, name="ema", average=average, source=model)
    if scaler is not None:
        parts["scaler"] = OwnState(scaler)
    parts["buffers"] = UnlistedBuffers(models)
    for name, owner in states.items():
        is_module = isinstance(owner, nn.Module)
        parts[name] = ModelWeights(owner, name=name) if is_module else OwnState(owner)
    return Registry(parts)


def load_weights(model: nn.Module, weights: Tensors) -> None:
    """Load `weights` into a model, perhaps into its shards.

    Raises CheckpointError, before anything changes, if they do not fit.
    """
    part = ModelWeights(model, name="model")
    fitted = part.validated(weights)
    make_dense(model)
    part.load_state_dict(fitted)


def check_weights(name: str, mine: Tensors, theirs: Tensors) -> None:
    """Raise CheckpointError with the first differences in names, shapes and dtypes."""
    differences = [f"{key} is missing" for key in mine.keys() - theirs.keys()]
    differences += [f"{key} is unknown here" for key in theirs.keys() - mine.keys()]
    for key in mine.keys() & theirs.keys():
        if key.endswith(EXTRA_STATE):
            continue  # Only the module knows its format, and its size may change.
        here = f"{mine[key].dtype} {list(mine[key].shape)}"
        there = f"{theirs[key].dtype} {list(theirs[key].shape)}"
        if here != there:
            differences.append(f"{key} is {there}, here {here}")
    if differences:
        fix = "use weights of this model, or leave out what differs: --init-from with --init-skip"
        prefix = commonprefix([*theirs]).removesuffix(commonprefix([*mine]))
        if prefix and any(prefix + key in theirs for key in mine):
            fix = f"all its names start with {prefix}, the model's do not: remove the extra prefix"
        raise CheckpointError(
            "CKPT_WEIGHTS",
            f"the stored {name} does not fit: {listed(differences, separator='; ')}: {fix}",
        )


# --- buffers that no state dict has ---


def unlisted_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the module's state dict, by name.

    Such as those with `persistent=False`.
    """
    listed = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in listed}
