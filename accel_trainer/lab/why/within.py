"""The first difference within a step: both sides are trained again, and watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_trainer.commands import Difference, prepare_directory, shortened

from ..replay.replay import STEP_DIGESTS
from ..rows import read_digests, shared
from . import trace
from .element import Element, first_element
from .finding import Finding, ModuleState
from .records import Differences
from .sides import Retrained, Side
from .traces import (
    DataDifference,
    TraceDifference,
    attributes_that_differ,
    compare_data,
    compare_traces,
    module_states,
    read_trace,
)

_MAX_SAMPLES = 3


@dataclass(frozen=True)
class Pair:
    """Two sides that differ, and how they are related."""

    kind: str
    """`two runs`, `one run twice`, or `start and checkpoint`."""
    one: Retrained
    other: Retrained
    changes: Differences | None = None

    @property
    def has_equal_batches(self) -> bool:
        """Whether the main processes of both have the same samples in a step."""
        changed = (
            [] if self.changes is None else [name for name, _, _ in self.changes.order_of_sums]
        )
        return all(name.endswith("num_threads") for name in changed)

    @property
    def sides(self) -> tuple[Side, Side]:
        """The two sides."""
        return self.one.side, self.other.side


@dataclass(frozen=True)
class Traced:
    """What differs in a step of two sides."""

    step: int
    """The step that was looked into."""
    difference: TraceDifference | None
    element: Element | None
    attributes: list[str]
    """Those of the user's objects that differed before the step, and that no checkpoint holds."""
    data: DataDifference
    modules: list[ModuleState]

    @property
    def is_of_operator(self) -> bool:
        """Whether an operator has returned different tensors for equal inputs."""
        found = self.difference
        return found is not None and (found.kind, found.place) == ("operator", "outputs")

    def tell(self, say: Callable[[str], None], parts: Sequence[str]) -> Finding:
        """Tell what differs first, and return it."""
        found = self.difference
        step = self.step
        if self.attributes:
            names = ", ".join(self.attributes[:_MAX_SAMPLES])
            say(f"before step {step}, these attributes differ, and are in no checkpoint: {names}")
        if found is None:
            return Finding(is_equal=False, step=step, parts=parts, modules=self.modules)
        row, other = found.rows
        line = row.get("line")
        at = f" ({line})" if line else ""
        say(f"step {step}, {found.where()}: {row['name']}{at}")
        if found.place == "name":
            say(f"  the other run has {other['name']} there, in the {other['phase']}")
        if found.plain_values is not None:
            say(f"  a different argument from Python: {' and '.join(found.plain_values)}")
        inputs_equal = found.place == "outputs" if row["kind"] == "operator" else None
        if row["kind"] == "operator" and found.place in ("inputs", "outputs"):
            say("  its inputs were equal" if inputs_equal else "  its inputs already differed")
        element = self.element or Element("")
        if element.text:
            say(f"  {element.text}")
        self._tell_data(say)
        return Finding(
            is_equal=False,
            step=step,
            parts=parts,
            phase=row["phase"],
            module=row.get("module") or None,
            operator=row["name"],
            inputs_equal=inputs_equal,
            line=line,
            element=element.index,
            values=element.values or found.plain_values,
            ulp=element.ulp,
            modules=self.modules,
        )

    def _tell_data(self, say: Callable[[str], None]) -> None:
        data = self.data
        if data.has_other_ids:
            say("  the batch has different samples, or a different order")
        elif data.samples:
            names = shortened(data.samples, most=_MAX_SAMPLES)
            say(f"  the batch has the same samples, but with different contents of {names}")
            if data.was_read_apart is not None:
                read = "different" if data.was_read_apart else "equal"
                say(f"  the samples that the dataset returned are {read}")


def trace_step(sides: tuple[Side, Side], step: int, folder: Path) -> Traced:
    """Train both sides again, record the step, and compare."""
    prepare_directory(folder)
    callbacks = {**STEP_DIGESTS, trace.__file__: {"step": step}}
    folders = [
        side.train(folder / f"{index}-trace", until=step, callbacks=callbacks).folder
        for index, side in enumerate(sides)
    ]
    earlier = Difference.of(*shared(*map(read_digests, folders)))
    if earlier is not None and earlier.step < step:
        return trace_step(sides, earlier.step, folder / "earlier")
    rows = [read_trace(each) for each in folders]
    found = compare_traces(rows[0], rows[1])
    element = None
    if found is not None and found.has_tensors:
        element = _keep(sides, step, found, folder)
    return Traced(
        step=step,
        difference=found,
        element=element,
        attributes=attributes_that_differ(rows[0], rows[1]),
        data=compare_data(rows[0], rows[1]),
        modules=module_states(rows[0], rows[1], found),
    )


def _keep(
    sides: tuple[Side, Side], step: int, found: TraceDifference, folder: Path
) -> Element | None:
    """Train both sides once more, and keep the value that differs."""
    kept = []
    for index, (side, row) in enumerate(zip(sides, found.rows, strict=True)):
        wanted = (row["index"], found.place, found.position)
        callbacks = {trace.__file__: {"step": step, "kept": wanted}}
        kept.append(side.train(folder / f"{index}-keep", until=step, callbacks=callbacks).folder)
    return first_element(kept[0], kept[1])
