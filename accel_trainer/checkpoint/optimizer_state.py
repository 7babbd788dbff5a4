"""The state of an optimizer as a checkpoint holds it: by the names of its parameters.

torch numbers them in the order of the optimizer's groups. If that order comes from a set, it is a
different one in each process, and a resume would silently give state to other parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.digest import digest_of, flatten
from ..core.errors import CheckpointError
from ..core.learning_rate import RATIO, SCALE
from ..core.parameters import parameters_of
from ..core.registry import StateDict, Stateful
from .sharded import StoredTensor, load_all, load_like

_KEEP_ORDER = (
    "and that order has changed: build its groups from a list or from sorted names, because the "
    "order of a set differs between processes"
)

Group = Mapping[str, Any]
"""A parameter group: its settings by name, and its parameters or their names as `params`."""

# What torch's own optimizers store.
_TORCHS = ("state", "param_groups")


class OptimizerState(Stateful):
    """The state of an optimizer, whatever the order of its groups and of their parameters.

    Create it before the first step: it records the settings that the run starts with.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }
        self._initial_groups = copy.deepcopy(self._named(optimizer.param_groups))

    def state_dict(self) -> StateDict:
        """Return the optimizer's state dict, its class, and its settings before the first step.

        Names take the place of torch's numbers. If some of the state may follow the order of the
        parameters all the same, that order is stored as well.
        """
        mine = self._optimizer.state_dict()
        kind = type(self._optimizer).__name__
        piece = {"class": kind, "initial_groups": self._initial_groups, **mine}
        names = [self._names[parameter] for parameter in parameters_of(self._optimizer)]
        state = mine.get("state", {})
        groups = mine.get("param_groups", [])
        numbers = [number for group in groups for number in group.get("params", ())]
        if numbers != [*range(len(names))] or not isinstance(state, Mapping):
            return piece | {"order": self._order()}
        by_name = {name: state[key] for key, name in enumerate(names) if key in state}
        piece["state"] = dict(sorted(by_name.items()))
        piece["shared_state"] = {key: state[key] for key in state.keys() - {*numbers}}
        piece["param_groups"] = self._named(groups)
        if self._follows_order(piece):
            piece["order"] = self._order()
        return piece

    def _follows_order(self, piece: StateDict) -> bool:
        """Whether state may be of several parameters, such as a list, or a sum that order rounds.

        These are tensors, and numbers that training changes but counts, beside the state of each
        parameter; and in that, tensors that are larger than the parameter.
        """
        known = flatten({"param_groups": self._initial_groups})
        own = ("class", "initial_groups", "state")
        shared = flatten({name: value for name, value in piece.items() if name not in own})
        return any(
            isinstance(leaf, Tensor)
            or not (leaf is None or isinstance(leaf, int | str) or leaf == known.get(path))
            for path, leaf in shared.items()
            if not path.endswith(".lr") and leaf != {}
        ) or any(
            isinstance(leaf, Tensor) and leaf.numel() > parameter.numel()
            for parameter, name in self._names.items()
            for leaf in flatten(piece["state"].get(name)).values()
        )

    def _order(self) -> list[list[list[str]]]:
        """Return the names in each group of the optimizer, and of those in its attributes."""
        attributes = vars(self._optimizer)
        kept = flatten({key: attributes[key] for key in attributes if key not in _TORCHS})
        return [
            [[self._names.get(each, "") for each in group["params"]] for group in one.param_groups]
            for one in (self._optimizer, *kept.values())
            if isinstance(one, Optimizer)
        ]

    def _names_in(self, group: Group) -> tuple[str, ...]:
        return tuple(sorted(self._names[parameter] for parameter in group["params"]))

    def _named(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return the optimizer's groups, given by their settings, sorted by the sorted names."""
        named = [
            {**group, "params": [*self._names_in(mine)]}
            for group, mine in zip(groups, self._optimizer.param_groups, strict=True)
        ]
        for group in named:
            group.pop("param_names", None)
        return sorted(named, key=itemgetter("params"))

    def validated(self, stored: StateDict) -> StateDict:
        """Return the state dict to load, with torch's numbers for this run's parameters.

        Entries that torch's own optimizers do not have are loaded as they were saved. Raises
        CheckpointError for another optimizer, other parameters or groups, and another order if some
        of the state may follow it.
        """
        mine = type(self._optimizer).__name__
        theirs = stored.get("class")
        if theirs != mine:
            raise _misfit(
                f"is {theirs}, but this run uses {mine}: use {theirs}, or start a new run from "
                "its weights with --init-from"
            )
        if not stored.keys() & {"order", "shared_state"}:
            raise _misfit("was saved without names: continue with the version that saved it")
        order = self._order()
        if stored.get("order", order) != order:
            raise _misfit(f"has state that depends on the order of its parameters, {_KEEP_ORDER}")
        has_names = "shared_state" in stored
        kept = stored.keys() - {"class", "initial_groups", "order", "shared_state"}
        loaded = {key: load_all(stored[key]) for key in kept.difference(_TORCHS * has_names)}
        if has_names:
            groups = self._fitted_groups(stored["param_groups"], stored["initial_groups"])
            state = load_all(stored["shared_state"])
            for number, parameter in enumerate(parameters_of(self._optimizer)):
                if (name := self._names[parameter]) in stored["state"]:
                    state[number] = _fitted(stored["state"][name], parameter)
            loaded |= {"state": state, "param_groups": groups}
        return loaded

    def _fitted_groups(
        self, stored: Sequence[Group], initial: Sequence[Group]
    ) -> list[dict[str, Any]]:
        """Return the parameter groups to load; `initial` are the settings that the run began with.

        A setting that differs from the initial one was changed on purpose: this run's value is
        kept. All other settings are taken from the checkpoint, since some optimizers change them as
        they train.
        """
        if any(SCALE in group and RATIO not in group for group in initial):
            stored, initial = _with_ratios(stored, initial), _with_ratios(initial, initial)
        theirs = {tuple(group["params"]): group for group in stored}
        before = {tuple(group["params"]): group for group in initial}
        numbered = self._optimizer.state_dict()["param_groups"]
        keys = [self._names_in(group) for group in self._optimizer.param_groups]
        if {*keys} != theirs.keys() or any(
            group.keys() - theirs[key].keys() - {"param_names"}
            for key, group in zip(keys, numbered, strict=True)
        ):
            raise _misfit(
                "has different parameters or groups: use the options of the run that saved it, or "
                "start a new run from its weights with --init-from"
            )
        has_rates = len({float(group["lr"]) for group in initial}) > 1
        if has_rates and theirs[keys[0]].get(RATIO) != 1 == numbered[0].get(RATIO):
            raise _misfit(f"has learning rates relative to its first group, {_KEEP_ORDER}")
        groups = []
        shared: dict[int, Any] = {}  # the tensors that groups have in common, as they do by default
        for key, group in zip(keys, numbered, strict=True):
            loaded = load_all(theirs[key])
            for name, value in group.items():
                # Among what differs are the numbers of the parameters.
                if name != "lr" and digest_of(value) != digest_of(before[key].get(name)):
                    loaded[name] = value
                elif isinstance(value, Tensor):
                    loaded[name] = shared.setdefault(id(value), loaded[name])
            groups.append(loaded)
        return groups

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `validated` returned."""
        self._optimizer.load_state_dict(state)


def _with_ratios(stored: Sequence[Group], initial: Sequence[Group]) -> list[Group]:
    """Return the groups of an older version, whose `SCALE` was their ratio times a user's factor.

    In the `initial` groups, it was the ratio alone.
    """
    ratios = {tuple(group["params"]): group.get(SCALE, 1.0) for group in initial}
    return [
        {**group, RATIO: ratio, SCALE: group.get(SCALE, 1.0) / (ratio or 1.0)}
        for group in stored
        for ratio in (ratios.get(tuple(group["params"]), 1.0),)
    ]


def _misfit(fact: str) -> CheckpointError:
    return CheckpointError("CKPT_OPTIMIZER", f"the checkpoint's optimizer {fact}")


def _fitted(value: Any, parameter: Tensor) -> Any:
    """Return what an optimizer has stored for a parameter, to load.

    A tensor of the parameter's shape also gets its memory layout, which fused kernels need.
    """
    if isinstance(value, Mapping):
        return {name: _fitted(each, parameter) for name, each in value.items()}
    is_tensor = isinstance(value, Tensor | StoredTensor)
    if not is_tensor or not value.shape or value.shape != parameter.shape:
        return load_all(value)  # a step, or Adafactor's row_var
    return torch.empty_like(parameter, dtype=value.dtype).copy_(load_like(parameter, value))
