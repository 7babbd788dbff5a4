"""Exports that somebody forged: each command ends in one line before it asks for memory, and names
are only shown."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from accel_trainer.cli.common.output import printable
from tests.cli.conftest import run_command

_ROOM_BYTES = 2**34  # of address space beyond what there is now
COMMANDS = ("predict", "evaluate", "verify")


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What asks for a terabyte fails here, on a machine of any size."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def changed(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config.update(values)


def in_model(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["model"].update(values)


def transform(**values: Any) -> Callable[[dict[str, Any]], object]:
    stored = {
        "size": 16,
        "crop_ratio": 1.0,
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
        "interpolation": "bilinear",
    }
    return changed(eval_transform=stored | values)


FORGED: dict[str, bytes | Callable[[dict[str, Any]], object]] = {
    "empty": b"",
    "a list": b"[1, 2]",
    "a pickle": pickle.dumps({"model": 1}),
    "deep": b"[" * 100_000,
    "in_channels": changed(in_channels=10**9),
    "in_channels that is a text": changed(in_channels="x"),
    "image_size": changed(image_size=[10**12, 10**12]),
    "image_size of one number": changed(image_size=[16]),
    "an empty transform": changed(eval_transform={}),
    "image_size that is a text": changed(image_size="16"),
    "size of the transform": transform(size=10**12),
    "size of the transform as a text": transform(size="x"),
    "size of the transform of half a pixel": transform(size=8.5),
    "mean of the transform": transform(mean=["a", "b", "c"]),
    "width": in_model(width=10**9),
    "width of half a channel": in_model(width=8.5),
    "a wider model than the weights": in_model(width=60_000),
    "name": in_model(name=["x"]),
    "an unknown setting": in_model(surprise=1),
    "no model": changed(model=[1]),
    "more classes than weights": changed(class_names=[str(number) for number in range(200_000)]),
    "class names as a text": changed(class_names="abc"),
    "mean": changed(normalization={"mean": ["x"], "std": [1.0]}),
    "std": changed(normalization={"mean": [0.5], "std": [0.0]}),
    "more numbers than channels": changed(normalization={"mean": [0.5] * 5, "std": [1.0] * 5}),
    "no normalization": changed(normalization=5),
    "evaluation": changed(evaluation=[1]),
    "views": changed(evaluation={"tta": "x"}),
    "the label that is ignored": changed(evaluation={"ignore_index": 1.5}),
    "the photos that were set aside": changed(evaluation={"photos": {"val_fraction": "x"}}),
    "weights": changed(weights={"a": 1}),
    "the hash of an onnx": lambda config: (config.pop("model"), config.update(onnx_sha256=5)),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_config_of_an_export_ends_in_one_line(
    forgery: str, model: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (16, 16)).save(model.parent / "image.png")
    forged = FORGED[forgery]
    content = json.loads((model / "config.json").read_text())
    if not isinstance(forged, bytes):
        forged(content)
        forged = json.dumps(content).encode()
    (model / "config.json").write_bytes(forged)
    flags = {
        "predict": [model.parent / "image.png"],
        "evaluate": ["--dataset", "digits"],
        "verify": [],
    }
    for command in (
        COMMANDS
        if forgery in ("empty", "a list", "deep", "in_channels")
        else ("predict", "evaluate")
    ):
        caches = [] if command == "predict" else ["--cache-dir", runs.parent / "cache"]
        code, out, err = run_command(capsys, [command, model, *flags[command], *caches])
        assert (code, out) == (74, ""), (command, out, err)
        assert re.fullmatch(r"accel_trainer: error\[\w+\]: .{1,600}\n", err), (command, err[:500])


@pytest.mark.parametrize("header", [b"", b"\0" * 64, b"\xff" * 64, (2**62).to_bytes(8, "little")])
def test_a_forged_file_of_weights_ends_in_one_line(
    header: bytes, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (16, 16)).save(model.parent / "image.png")
    (model / "model.safetensors").write_bytes(header)
    os.truncate(model / "model.safetensors", 2**35)  # takes no room on the disk
    code, _, err = run_command(capsys, ["predict", model, model.parent / "image.png"])
    assert code == 74
    assert err.count("\n") == 1


# --- terminals ---

NAMES = (
    "\x1b[31mred",
    "\x9b2J",
    "a\nb",
    "\u202egnp.exe",
    "un\u200bseen",
    "tag\U000e0041",
    "\x07bell",
    "tab\tis fine",
    "Bär 猫",
)


def test_names_of_classes_and_pictures_cannot_command_a_terminal(
    model: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((model / "config.json").read_text())
    content["class_names"] = [NAMES[number % len(NAMES)] + str(number) for number in range(10)]
    (model / "config.json").write_text(json.dumps(content))
    pictures = model.parent / "pictures"
    pictures.mkdir()
    for name in (
        b"\x1b]0;title\x07.png",
        "b\u202e.png".encode(),
        b"no utf-8 \xff.png",
        b"line\nbreak.png",
    ):
        Image.new("L", (16, 16)).save(pictures / "x.png")
        os.rename(os.fsencode(pictures / "x.png"), os.path.join(os.fsencode(pictures), name))
    (pictures / "\x1b[2Jbroken.png").write_bytes(b"")
    code, out, err = run_command(capsys, ["predict", model, pictures, "--top", "10"])
    assert code == 65
    assert len(out.splitlines()) == 4, "a line for each"
    for text in (
        "\\x1b[31mred",
        "\\x9b2J",
        "a\\nb",
        "\\u202egnp.exe",
        "un\\u200bseen",
        "tag\\U000e0041",
        "tab\tis fine",
        "Bär 猫",
        "no utf-8 \\udcff.png",
    ):
        assert text in out
    assert printable(out + err) == out + err
    assert err.count("\n") == 1


def test_the_names_of_photos_and_classes_cannot_command_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("\x1b[31mred", "\x9b2J"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (9, 9)).save(tmp_path / "photos" / name / f"\x1b[2J{index}.png")
        (tmp_path / "photos" / name / "\x1b[3Jbroken.png").write_bytes(b"")
    code, out, err = run_command(
        capsys,
        ["data", tmp_path / "photos", "--val-fraction", "0.5", "--cache-dir", tmp_path / "cache"],
    )
    assert code == 65
    assert "\\x1b[31mred" in out
    assert "\\x9b2J" in out
    shown = out + re.sub(r".*\r", "", err)  # without the bar
    assert printable(shown) == shown


def hostile_onnx(name: str) -> bytes:
    """Return an ONNX file that loads and does not fit, or does not load at all."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    images = helper.make_tensor_value_info("images", kind, ["batch", 1, 16, 16])
    number = helper.make_tensor_value_info("logits", kind, [])
    several = helper.make_tensor_sequence_value_info("logits", kind, None)
    constant = helper.make_tensor("one", kind, [], [1.0])
    graphs = {
        "without inputs": ([helper.make_node("Constant", [], ["logits"], value=constant)], []),
        "with one number": (
            [helper.make_node("ReduceSum", ["images"], ["logits"], keepdims=0)],
            [images],
        ),
        "with a sequence": (
            [helper.make_node("SequenceConstruct", ["images"], ["logits"])],
            [images],
        ),
        "with an unknown operator": (
            [helper.make_node("Nothing", ["images"], ["logits"])],
            [images],
        ),
    }
    raw = {"empty": b"", "noise": os.urandom(999)}
    if name in raw:
        return raw[name]
    nodes, inputs = graphs[name.removesuffix(", cut")]
    output = several if "sequence" in name else number
    graph = helper.make_graph(nodes, "hostile", inputs, [output])
    opset = helper.make_opsetid("", 17)
    data = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    return bytes(data[: len(data) // 2] if name.endswith(", cut") else data)


@pytest.mark.parametrize(
    "name",
    [
        "empty",
        "noise",
        "without inputs",
        "with one number",
        "with one number, cut",
        "with a sequence",
        "with an unknown operator",
    ],
)
def test_a_hostile_onnx_ends_in_one_line(
    name: str, model: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    Image.new("L", (16, 16)).save(model.parent / "image.png")
    data = hostile_onnx(name)
    (model / "model.onnx").write_bytes(data)
    content = json.loads((model / "config.json").read_text())
    content.pop("model")
    content["onnx_sha256"] = hashlib.sha256(data).hexdigest()
    (model / "config.json").write_text(json.dumps(content))
    flags: dict[str, list[object]] = {
        "predict": [model.parent / "image.png"],
        "evaluate": ["--dataset", "digits", "--cache-dir", runs.parent / "cache"],
        "verify": [],
    }
    for command in COMMANDS:
        code, _, err = run_command(capsys, [command, model, *flags[command]])
        assert code in (65, 74), (command, err)
        assert re.fullmatch(r"accel_trainer: error\[\w+\]: .{1,600}\n", err), (command, err[:900])
