"""YAML of plain values, also from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .filesystem import read_file

MAX_BYTES = 1 << 20


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return `values`, which are plain, as a text in their order."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values in a file by name. Raises OSError, or ValueError if there are none."""
    values = parse_yaml(read_file(path, max_bytes=MAX_BYTES).decode())
    if not values:
        raise ValueError(f"{path.name} is empty")
    return values


def parse_yaml(text: str) -> dict[str, Any]:
    """Return the values in a text by name. Raises ValueError."""
    try:
        values = _Loader(text).get_single_data() or {}
    except Exception as error:  # PyYAML raises any type, such as KeyError for `!!bool x`
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "not YAML"
        raise ValueError(f"{where}: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"expected names with values, got a value of type {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """Refuses names that appear twice, as merges hide, and aliases: a few can stand for gigabytes.

    Not `CSafeLoader`, which ends the process by a segmentation fault for deeply nested text.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. Raises YAMLError."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (& and *) are not supported"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return the dict of a node. Raises YAMLError."""
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            is_merge = key.tag.endswith(":merge")
            if is_merge or name in seen:
                problem = (
                    "merges (<<) are not supported" if is_merge else f"{name[:40]} appears twice"
                )
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)
