"""What `accel-trainer why` has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModuleState:
    """A module of the model in a step of both sides; the model itself has no name."""

    name: str
    is_equal: Mapping[str, bool]
    """By `forward` and `backward`: whether all of its operators were equal."""
    first: str | None
    """`forward` or `backward`, if the first difference of the step is there."""


@dataclass(frozen=True)
class Finding:
    """The first difference of two runs, or that there is none.

    What was not found out is None. `text` has all lines that a person reads.
    """

    is_equal: bool
    step: int | None = None
    """The first step after which the states differ, counted from 1."""
    parts: Sequence[str] = ()
    """What differs after it: `samples`, or parts of a checkpoint such as `model`."""
    phase: str | None = None
    """The part of the step: `data`, `forward`, `loss`, `backward`, `update`, and so on."""
    module: str | None = None
    """The name of the module in the model; None outside its modules."""
    operator: str | None = None
    """The operator of torch, such as `aten.convolution.default`, or what else differs first."""
    inputs_equal: bool | None = None
    """Whether the operator had equal inputs."""
    line: str | None = None
    """The line of the user's code that called the operator."""
    element: Sequence[int] | None = None
    """The index of the first element that differs."""
    values: tuple[Any, Any] | None = None
    """The two values of that element."""
    ulp: int | None = None
    """How many floating-point numbers the two values are apart."""
    cause: str | None = None
    """A short name, such as `no deterministic kernel`; None if it stays unknown."""
    modules: Sequence[ModuleState] = ()
    """The modules of the model in the order of their first use."""
    text: str = ""
