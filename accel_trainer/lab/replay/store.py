"""Stores finished stretches: each is a file, which is there as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from accel_trainer import OutputError
from accel_trainer.commands import Row, filesystem, prepare_directory, read_json_object, writes_to

from .proof import Proof
from .stretches import Logged, Stretch

_STRETCHES = "stretches"


@dataclass(frozen=True)
class Store:
    """Files in `folder/stretches`, and in `folder/pictures` what callbacks have drawn.

    `key` is a hash of all that decides the rows.
    """

    folder: Path
    key: str

    def begin(self) -> None:
        """Begin in a new or empty folder, or continue. Raises OutputError if it holds others."""
        prepare_directory(self.folder)
        if filesystem.files_in(self.folder) and not (self.folder / _STRETCHES).is_dir():
            fact = f"{self.folder} holds other files"
            raise OutputError("OUT_DIR", f"{fact}: move them away, or give a new folder")
        with writes_to(self.folder):
            filesystem.make_directory(self.folder / _STRETCHES)

    def get(self, stretch: Stretch) -> Logged | None:
        """Return a stretch with its rows; None: it is not finished."""
        path = self._path(stretch)
        if not path.exists():
            return None
        stored = read_json_object(path)
        return Logged(stretch, stored["rows"], Proof(**stored["proof"]))

    def put(self, logged: Logged, replay: Path) -> None:
        """Store a stretch durably, with the pictures of its rows from the folder of its replay."""
        stored = {"rows": logged.rows, "proof": asdict(logged.proof)}
        with writes_to(self.folder):
            for picture in _pictures_in(logged.rows):
                filesystem.make_directory(self.folder / "pictures")
                copy = self.folder / "pictures" / picture.name
                filesystem.replace_file(copy, filesystem.read_chunks(replay / picture))
            path = self._path(logged.stretch)
            filesystem.write_file_atomic(path, json.dumps(stored).encode())

    def _path(self, stretch: Stretch) -> Path:
        end = "-end" * stretch.is_end
        steps = f"{stretch.after + 1:010d}-{stretch.until:010d}"
        return self.folder / _STRETCHES / f"steps-{steps}{end}-{self.key}.json"


def _pictures_in(rows: Iterable[Row]) -> Iterator[Path]:
    for row in rows:
        for value in row.values():
            if isinstance(value, dict) and "picture" in value:
                yield Path(value["picture"])
