"""A file system that knows what of it a power loss spares.

Only what POSIX promises is certain: bytes after fsync of the file, names after fsync of their
directory. Anything else may be there, be gone, or be half there, and in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[str, Any]  # name -> bytes, or Tree for a directory


@dataclass
class Node:
    """A file or directory: what is certain to survive, and what has been done since."""

    names: dict[str, Node] | None = None  # None: a file
    pending: list[dict[str, Node | None]] = field(default_factory=list)
    data: bytes = b""
    synced_data: bytes = b""

    def change(self, **entries: Node | None) -> None:
        """Change names in one step, which a power loss undoes as a whole or not at all."""
        self.pending.append(entries)

    def current(self) -> dict[str, Node]:
        assert self.names is not None
        return _apply(self.names, self.pending)

    def sync(self) -> None:
        if self.names is None:
            self.synced_data = self.data
        else:
            self.names = self.current()
            self.pending = []


def _apply(
    names: Mapping[str, Node], changes: Collection[dict[str, Node | None]]
) -> dict[str, Node]:
    result: dict[str, Node | None] = dict(names)
    for change in changes:
        result.update(change)
    return {name: node for name, node in result.items() if node is not None}


class FileSystem:
    """The folder of a run, as changed by recorded operations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = Node({})

    def node(self, path: Path) -> Node:
        node = self.root
        for part in path.relative_to(self.folder).parts:
            node = node.current()[part]
        return node

    def do(self, operation: str, path: Path, details: tuple[Any, ...]) -> None:
        parent = self.node(path.parent) if path != self.folder else self.root
        match operation, details:
            case "make_directory" | "create", ():
                parent.change(**{path.name: Node({} if operation == "make_directory" else None)})
            case "write", (bytes(data),):
                self.node(path).data += data
            case "truncate", (int(size),):
                self.node(path).data = self.node(path).data[:size]
            case "sync" | "sync_directory", ():
                self.node(path).sync()
            case "rename", (Path() as target,):
                parent.change(**{target.name: self.node(path), path.name: None})
            case "link", (Path() as source,):
                parent.change(**{path.name: self.node(source)})
            case "remove", ():
                parent.change(**{path.name: None})
            case "remove_tree", ():
                for name in self.node(path).current():
                    self.node(path).change(**{name: None})
                parent.change(**{path.name: None})
            case _:
                raise AssertionError(operation)


@dataclass(frozen=True)
class Model:
    """Which of the un-synced changes of names survive, and what becomes of un-synced bytes."""

    label: str
    keep_name: Callable[[], bool]
    data: Callable[[], str]

    def survivors(self, node: Node) -> Tree:
        assert node.names is not None
        kept = _apply(node.names, [change for change in node.pending if self.keep_name()])
        return {
            name: self._bytes(child) if child.names is None else self.survivors(child)
            for name, child in kept.items()
        }

    def _bytes(self, node: Node) -> bytes:
        kind = self.data()
        synced = node.synced_data
        if node.data == synced or kind == "lost":
            return synced
        if not node.data.startswith(synced):
            return node.data if kind == "kept" else synced  # it was cut
        tail = node.data[len(synced) :]
        return (
            synced + {"kept": tail, "zeros": bytes(len(tail)), "half": tail[: len(tail) // 2]}[kind]
        )


def models(seed: int, num_random: int) -> list[Model]:
    plain = [
        Model(
            f"names {'kept' if keeps else 'lost'}, data {data}",
            lambda keeps=keeps: keeps,
            lambda data=data: data,
        )
        for keeps, data in [
            (False, "lost"),
            (True, "lost"),
            (True, "zeros"),
            (True, "half"),
            (True, "kept"),
        ]
    ]
    for number in range(num_random):
        draw = random.Random(f"{seed}-{number}")
        plain.append(
            Model(
                f"random {number}",
                lambda draw=draw: draw.random() < 0.5,
                lambda draw=draw: draw.choice(["lost", "zeros", "half", "kept"]),
            )
        )
    return plain
