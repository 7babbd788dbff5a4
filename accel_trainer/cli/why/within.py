"""The first difference within a step: both sides are trained again, and watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.run_dir import prepare_directory
from ..replay.replay import STEP_DIGESTS
from .element import Element, first_element
from .finding import Finding
from .records import Differences
from .sides import Retrained, Side
from .traces import (
    DataDifference,
    TraceDifference,
    attributes_that_differ,
    compare_data,
    compare_traces,
    read_trace,
)

TRACE = Path(__file__).with_name("trace.py")
_STEP = "ACCEL_TRAINER_TRACE_STEP"
_KEEP = "ACCEL_TRAINER_TRACE_KEEP"
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
    def sides(self) -> tuple[Side, Side]:
        """The two sides."""
        return self.one.side, self.other.side


@dataclass(frozen=True)
class Traced:
    """What differs in a step of two sides."""

    difference: TraceDifference | None
    element: Element | str | None
    attributes: list[str]
    """Those of the user's objects that differed before the step, and that no checkpoint holds."""
    data: DataDifference
    num_steps: int
    """How many steps were trained to find out."""

    def tell(self, say: Callable[[str], None], step: int, parts: Sequence[str]) -> Finding:
        """Tell what differs first, and return it."""
        found = self.difference
        if self.attributes:
            names = ", ".join(self.attributes[:_MAX_SAMPLES])
            say(f"before step {step}, these attributes differ, which no checkpoint holds: {names}")
        if found is None:
            return Finding(is_equal=False, step=step, parts=parts)
        row, other = found.rows
        line = row.get("line")
        at = f" ({line})" if line else ""
        say(f"step {step}, {found.where()}: {row['name']}{at}")
        if found.place == "name":
            say(f"  the other side has {other['name']} in the {other['phase']} there")
        if found.place == "plain":
            say(f"  other arguments: {_excerpt(row, other)}")
        inputs_equal = found.place == "outputs" if row["kind"] == "operator" else None
        if row["kind"] == "operator" and found.place in ("inputs", "outputs"):
            say("  its inputs were equal" if inputs_equal else "  its inputs differed already")
        if isinstance(self.element, Element):
            say(f"  {self.element.describe()}")
        elif self.element is not None:
            say(f"  {self.element}")
        self._tell_data(say)
        element = self.element if isinstance(self.element, Element) else None
        return Finding(
            is_equal=False,
            step=step,
            parts=parts,
            phase=row["phase"],
            module=row.get("module") or None,
            operator=row["name"],
            inputs_equal=inputs_equal,
            line=line,
            element=element.index if element else None,
            values=element.values if element else None,
            ulp=element.ulp if element else None,
        )

    def _tell_data(self, say: Callable[[str], None]) -> None:
        data = self.data
        if data.has_other_ids:
            say("  the batch has other samples, or in another order")
        elif data.samples:
            more = len(data.samples) - _MAX_SAMPLES
            names = ", ".join(data.samples[:_MAX_SAMPLES]) + f" and {more} more" * (more > 0)
            say(f"  the batch has the same samples with other contents: {names}")


def _excerpt(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    texts = [str(each.get("plain") or each["outputs"]) for each in (row, other)]
    start = next(
        (index for index, (a, b) in enumerate(zip(*texts, strict=False)) if a != b),
        min(map(len, texts)),
    )
    begin = max(0, start - 10)
    return " and ".join(text[begin : begin + 40] for text in texts)


def trace_step(sides: tuple[Side, Side], step: int, folder: Path) -> Traced:
    """Train both sides again, record the step, and compare."""
    prepare_directory(folder)
    folders = [
        side.train(
            folder / f"{index}-trace",
            until=step,
            callbacks=(STEP_DIGESTS, TRACE),
            variables={_STEP: str(step)},
        )
        for index, side in enumerate(sides)
    ]
    rows = [read_trace(each) for each in folders]
    found = compare_traces(rows[0], rows[1])
    num_steps = sum(step - side.begin for side in sides)
    element = None
    if found is not None and found.has_tensors:
        element = _keep(sides, step, found, folder)
        num_steps *= 2
    return Traced(
        difference=found,
        element=element,
        attributes=attributes_that_differ(rows[0], rows[1]),
        data=compare_data(rows[0], rows[1]),
        num_steps=num_steps,
    )


def _keep(
    sides: tuple[Side, Side], step: int, found: TraceDifference, folder: Path
) -> Element | str | None:
    """Train both sides once more, and keep the value that differs."""
    kept = []
    for index, (side, row) in enumerate(zip(sides, found.rows, strict=True)):
        wanted = f"{row['index']}:{found.place}:{found.position}"
        side.train(
            folder / f"{index}-keep",
            until=step,
            callbacks=(TRACE,),
            variables={_STEP: str(step), _KEEP: wanted},
        )
        kept.append(folder / f"{index}-keep")
    return first_element(kept[0], kept[1])
