"""Alterations of a checkpoint: blind ones, and deliberate ones that make the hashes agree again."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_trainer.checkpoint.format import COMMIT, MANIFEST
from accel_trainer.distributed.collectives import Files

BAD_NAMES = [
    "../../x",
    "/etc/passwd",
    "a\0b.json",
    "a/b.json",
    "",
    ".json",
    "COMMIT",
    "x.pkl",
    "é.json",
]
BAD_ENTRIES = [
    {"bytes": 1, "sha256": "0" * 64},
    {"bytes": -1, "sha256": ""},
    {"bytes": 1e9},
    None,
    [],
    {},
]
AWKWARD = [
    "0",
    "-1",
    "1e999",
    "NaN",
    "-Infinity",
    "9" * 30,
    "9" * 5000,
    "2.5",
    "null",
    "true",
    "\0",
    "{}",
    "[]",
    "[[]]",
    '""',
    '"$tensor"',
    '"$dict"',
    '"F64"',
    '"BOOL"',
    '"__metadata__"',
    '"\\ud800"',
    '"\\u0000"',
    '{"$tuple":{}}',
    '{"$dict":[[[],1]]}',
    '{"$float":"1"}',
    '{"$tensor":[]}',
]


def tensor_file(header: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


def entry(dtype: str, shape: str, offsets: str) -> str:
    return f'{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}'


TENSOR_BOMBS = [
    ("huge header", struct.pack("<Q", 2**63) + b"{}"),
    ("header longer than the file", struct.pack("<Q", 1000) + b"{}"),
    # Parsing them takes a third of what a case may take; the square of their number takes hours.
    ("many entries", tensor_file("{" + ",".join(f'"{n}":{{}}' for n in range(300_000)) + "}")),
    (
        "overlap",
        tensor_file(f'{{"a":{entry("U8", "4", "0,4")},"b":{entry("U8", "4", "0,4")}}}', b"0000"),
    ),
    ("metadata of null", tensor_file('{"__metadata__":null}')),
    ("gap", tensor_file(f'{{"a":{entry("U8", "1", "3,4")}}}', b"0000")),
    ("huge shape", tensor_file(f'{{"a":{entry("F64", str(2**63 - 1), "0,4")}}}', b"0000")),
    ("huge shape without bytes", tensor_file(f'{{"a":{entry("F64", f"{2**63 - 1},0", "0,0")}}}')),
    (
        "a key twice",
        tensor_file(f'{{"a":{entry("U8", "0", "0,0")},"a":{entry("U8", "0", "0,0")}}}'),
    ),
    ("not a dtype", tensor_file(f'{{"a":{entry("object", "0", "0,0")}}}')),
]
JSON_BOMBS = [
    ("deep list", b"[" * 100_000),
    ("deep closed list", b"[" * 500 + b"]" * 500),
    ("deep object", b'{"a":' * 100_000),
    ("long integer", b"1" * 100_000),
    ("long tagged integer", b'{"$int":"' + b"f" * 100_000 + b'"}'),
    ("too many values", b"[" + b"0," * 3_000_000 + b"0]"),
    ("many values", b"[" + b"{}," * 150_000 + b"0]"),
    ("long string", b'"' + b"x" * (9 * 2**20) + b'"'),
    ("a key twice", b'{"a":1,"a":2}'),
]


def mutate_bytes(data: bytes, draw: random.Random, payload: bytes) -> bytes:
    """Return other bytes than `data`."""
    where = draw.randrange(len(data))
    size = draw.randint(1, max(1, len(data) // 4))
    candidates = [
        data[:where] + bytes([data[where] ^ 1 << draw.randrange(8)]) + data[where + 1 :],
        data[:where] + draw.randbytes(size) + data[where + size :],
        data[:where] + bytes(size) + data[where + size :],
        data[:where],
        data + draw.randbytes(size),
        data[:where] + data[where + size :],
        data[:where] + data[where : where + size] * 2 + data[where + size :],
        payload,
        b"",
    ]
    mutated = draw.choice(candidates)
    return mutated if mutated != data else data + b"\0"


def mutate_text(text: str, draw: random.Random) -> str:
    """Swap, drop or repeat a token of JSON, or put an awkward one in its place."""
    tokens = re.findall(r'"[^"]*"|-?[\w.+]+|\s+|.', text, re.DOTALL)
    where, other = draw.randrange(len(tokens)), draw.randrange(len(tokens))
    action = draw.randrange(4)
    if action == 0:
        tokens[where] = draw.choice(AWKWARD)
    elif action == 1:
        del tokens[where]
    elif action == 2:
        tokens.insert(where, tokens[other])
    else:
        tokens[where], tokens[other] = tokens[other], tokens[where]
    return "".join(tokens)


def damage_folder(folder: Path, draw: random.Random, payload: bytes) -> str:
    """Damage one file of a checkpoint on disk and say how."""
    files = sorted(folder.iterdir())
    path, other = draw.sample(files, 2)
    kind = draw.choice(["bytes"] * 40 + ["missing", "symlink", "fifo", "directory", "swapped"])
    if kind == "bytes":
        path.write_bytes(mutate_bytes(path.read_bytes(), draw, payload))
        return f"{kind} {path.name}"
    if kind == "swapped":
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
        return f"{kind} {path.name} {other.name}"
    copy = shutil.move(path, folder.parent / "moved")
    if kind == "symlink":
        path.symlink_to(copy)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    return f"{kind} {path.name}"


def rehash(files: Files, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Make sizes and hashes agree with the files, as an attacker would."""
    manifest = json.loads(files[MANIFEST])
    for name in manifest["files"]:
        manifest["files"][name] = {
            "bytes": len(files[name]),
            "sha256": hashlib.sha256(files[name]).hexdigest(),
        }
    change(manifest)
    seal(files, json.dumps(manifest).encode())


def seal(files: Files, manifest: bytes) -> None:
    files[MANIFEST] = manifest
    files[COMMIT] = hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def forge(files: Files, draw: random.Random, payload: bytes) -> str:
    """Alter a checkpoint so that its hashes still agree, and say how."""
    kind = draw.choice(["bytes"] * 6 + ["header"] * 6 + ["json"] * 6 + ["manifest"] * 3 + ["bomb"])
    pieces = [name for name in files if name not in (COMMIT, MANIFEST)]
    if kind == "manifest":
        return forge_manifest(files, draw)
    name = draw.choice([name for name in pieces if kind != "json" or name.endswith(".json")])
    label = ""
    if kind == "bytes":
        files[name] = mutate_bytes(files[name], draw, payload)
    elif kind == "bomb":
        label, files[name] = draw.choice(JSON_BOMBS if name.endswith(".json") else TENSOR_BOMBS)
    elif name.endswith(".json"):
        files[name] = mutate_text(files[name].decode(), draw).encode()
    else:
        (length,) = struct.unpack_from("<Q", files[name])
        header = mutate_text(files[name][8 : 8 + length].decode(), draw).encode()
        size = draw.choice([len(header)] * 18 + [draw.randrange(2**64), length])
        files[name] = struct.pack("<Q", size) + header + files[name][8 + length :]
    rehash(files)
    return f"{kind} {name} {label}"


def forge_manifest(files: Files, draw: random.Random) -> str:
    if draw.random() < 0.5:
        seal(files, mutate_text(files[MANIFEST].decode(), draw).encode())
        return "manifest"
    name = draw.choice(BAD_NAMES)
    value = draw.choice(BAD_ENTRIES)
    rehash(files, lambda manifest: manifest["files"].update({name: value}))
    return f"manifest lists {name!r}"
