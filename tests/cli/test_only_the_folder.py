"""Somebody who has only the folder of an export gets the classes that the run was evaluated by."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from accel_trainer import main
from accel_trainer.cli.share.onnx_model import convert
from accel_trainer.vision import EvalTransform, load_images, load_photos
from accel_trainer.vision.data.photo_decode import decode_photo
from recipes import cifar, images, vit
from tests.cli.conftest import run_command
from tests.vision.make_photos import encoded

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("jinja2")

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for the run, its data and its exports, which are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def train(recipe: Any, place: Path, *flags: str) -> Path:
    places = ["--cache-dir", str(place / "cache"), "--output-dir", str(place / "run"), "--quiet"]
    short = ["--epochs", "3", "--batch-size", "10", "--runtime.num-threads", "1"]
    with pytest.raises(SystemExit) as ended:
        main(recipe.train, recipe.Config, description="", argv=[*places, *short, *flags])
    assert ended.value.code == 0
    return place / "run"


def photos_of(place: Path) -> list[tuple[Path, str]]:
    """Write photos that are bright at their left, right or bottom; return what a run sets aside."""
    noise = np.random.default_rng(0)
    for number in range(60):
        folder = place / "photos" / ("ant", "bee", "cow")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = noise.integers(0, 130, (50, 60 + number, 3), np.uint8)
        bright = (np.s_[:, :25], np.s_[:, -25:], np.s_[-20:])[number % 3]
        pixels[bright] += 120
        (folder / f"{number}.jpg").write_bytes(encoded(Image.fromarray(pixels)))
    found = load_photos(str(place / "photos"), val_fraction=0.5, cache_dir=place / "cache")
    names = [found.val.name_of(number) for number in range(len(found.val.labels))]
    paths = [Path(name.partition(" (row ")[0]) for name in names]
    return [(path, path.parent.name) for path in paths]


def small_images_of(place: Path, dataset: str) -> list[tuple[Path, str]]:
    """Write the test images of a dataset of small images as files."""
    found = load_images(dataset, cache_dir=place / "cache")
    written = []
    (place / "pictures").mkdir()
    for number, pixels in enumerate(found.test.images.permute(0, 2, 3, 1).squeeze(-1).numpy()):
        path = place / "pictures" / f"{number:04}.png"
        Image.fromarray(pixels).save(path)
        written.append((path, found.class_names[int(found.test.labels[number])]))
    return written


def write_colours(place: Path) -> Path:
    """A dataset of small colour images, in class folders."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 40)):
        for label in range(3):
            folder = place / "colours" / split / "xyz"[label]
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 80 + 80 * label, (12, 12, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return place / "colours"


def normalised(path: Path, facts: dict[str, Any], transform: EvalTransform | None) -> Any:
    """The input that a model card describes, by numpy."""
    data = path.read_bytes()
    pixels = transform(data, "").numpy() if transform else decode_photo(data, "")
    if len(facts["mean"]) == 1:
        pixels = pixels[..., :1]
    inputs = (pixels / 255 - facts["mean"]) / facts["std"]
    return inputs.astype(np.float32).transpose(2, 0, 1)[None]


def by_onnx(export: Path, files: list[Path]) -> list[str]:
    """The classes by the ONNX file, used as it describes itself."""
    session = onnxruntime.InferenceSession(export / "model.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    (value,) = session.get_inputs()
    assert facts[value.name] == "float32 [B, C, H, W]: (pixels / 255 - mean) / std"
    config = json.loads((export / "config.json").read_text())
    assert config["onnx"].items() <= facts.items()
    names = json.loads(facts["class_names"])
    facts = {name: json.loads(facts[name]) for name in ("mean", "std", "image_size")}
    assert facts["mean"] == list(config["normalization"]["mean"])
    described = config.get("eval_transform")
    transform = EvalTransform.from_dict(described) if described else None
    inputs = np.concatenate([normalised(path, facts, transform) for path in files])
    assert list(inputs.shape[2:]) == facts["image_size"]
    (logits,) = session.run(None, {value.name: inputs})
    return [names[number] for number in logits.argmax(1)]


def by_predict(model: Path, files: list[Path], capsys: Shown) -> list[str]:
    code, out, err = run_command(capsys, ["predict", model, *files, "--jsonl"])
    assert code == 0, err
    return [json.loads(row)["predictions"][0]["label"] for row in out.splitlines()]


def by_card(export: Path, files: list[Path]) -> list[list[str]]:
    """The classes by each of the card's blocks of code that reads a picture."""
    blocks = re.findall(r"```python\n(.*?)```", (export / "README.md").read_text(), re.DOTALL)
    script = f"""
import contextlib, io, json, sys
sys.modules["accel_trainer"] = None
sys.path.insert(0, ".")
found = []
for code in {[block for block in blocks if '"image.' in block]!r}:
    found.append([])
    for path in {[str(path) for path in files]!r}:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(code.replace("image.jpg", path).replace("image.png", path), {{}})
        found[-1].append(said.getvalue().split()[0])
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=export, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return [*json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tta"),
    [
        ("photos", "flip"),
        ("photos", "none"),
        ("grey", "flip_crop"),
        ("grey", "none"),
        ("colours", "flip_crop"),
        ("colours", "none"),
    ],
)
def test_each_export_gives_the_classes_of_evaluate(
    kind: str, tta: str, place: Path, capsys: Shown
) -> None:
    recipe: Any = cifar
    if kind == "photos":
        recipe, labelled = images, photos_of(place)
        data = [str(place / "photos"), "--val-fraction", "0.5", "--image-size", "24"]
    else:
        dataset = "digits" if kind == "grey" else str(write_colours(place))
        labelled, data = small_images_of(place, dataset), [dataset, "--augment.crop-padding", "1"]
    model = ["--model", "resnet8", "--model.width", "4", "--model.norm", "group"]
    run = train(recipe, place, "--dataset", *data, *model, "--tta", tta, "--onnx")
    options = ["--cache-dir", place / "cache"]
    _, out, _ = run_command(capsys, ["evaluate", run, "--json", *options])
    evaluated = json.loads(out)
    counts = torch.tensor(evaluated["metrics"]["confusion_matrix"])
    names = evaluated["class_names"]
    files = [path for path, _ in labelled]

    def check(found: list[str], what: str) -> None:
        matrix = torch.zeros_like(counts)
        for (_, label), given in zip(labelled, found, strict=True):
            matrix[names.index(label), names.index(given)] += 1
        assert matrix.equal(counts), f"{what} gives other classes than evaluate"

    copied = shutil.copytree(run / "export", place / "copied")
    shared, converted = place / "shared", place / "converted"
    assert run_command(capsys, ["export", run, "--to", shared])[0] == 0
    without = shutil.copytree(run, place / "without")  # as if the recipe had no --onnx
    config = json.loads((without / "export" / "config.json").read_text())
    for name in ("model.onnx", "example.safetensors"):
        (without / "export" / name).unlink()
    kept = {name: value for name, value in config.items() if not name.startswith(("onnx", "exam"))}
    (without / "export" / "config.json").write_text(json.dumps(kept))
    assert run_command(capsys, ["export", without, "--to", converted, "--onnx"])[0] == 0
    assert [path.name for path in sorted(shared.iterdir())] == [
        path.name for path in sorted(converted.iterdir())
    ]
    for model in (run, run / "export", copied, shared):
        check(by_predict(model, files, capsys), f"predict {model}")
    for export in (copied, shared, converted):
        check(by_onnx(export, files), f"the ONNX file in {export}")
    for number, found in enumerate(by_card(converted, files)):
        check(found, f"block {number} of the card")
    assert number == 1, "one block with torch, one with onnxruntime"
    for export in (shared, converted):
        code, said, err = run_command(capsys, ["verify", export, "--dataset", data[0], *options])
        assert code == 0, said + err
        assert re.search(r"^model\.onnx .* differs by at most .*  ok$", said, re.MULTILINE)
    one_view = json.loads((shared / "config.json").read_text())
    one_view["evaluation"]["tta"] = "none"
    (shared / "config.json").write_text(json.dumps(one_view))
    others = by_predict(shared, files, capsys)
    assert (others == by_predict(run, files, capsys)) is (tta == "none"), "the views matter here"


@pytest.mark.slow
def test_what_transformers_loads_gives_the_classes_of_evaluate(place: Path, capsys: Shown) -> None:
    hf = pytest.importorskip("transformers")
    labelled = photos_of(place)
    data = [
        "--dataset",
        str(place / "photos"),
        "--val-fraction",
        "0.5",
        "--photos.image-size",
        "32",
    ]
    # At 24 pixels, our transform would decode these JPEGs at half their size.
    run = train(vit, place, *data, "--onnx")
    files = [path for path, _ in labelled]
    folder = run / "export" / "pretrained"
    model = hf.AutoModelForImageClassification.from_pretrained(folder).eval()
    prepare = hf.AutoImageProcessor.from_pretrained(folder)
    with torch.inference_mode():
        pictures = [Image.open(path).convert("RGB") for path in files]
        logits = model(**prepare(pictures, return_tensors="pt")).logits
    by_name = [model.config.id2label[int(number)] for number in logits.argmax(1)]
    found = by_predict(run, files, capsys)
    assert found == by_onnx(run / "export", files)
    right = [label == given for (_, label), given in zip(labelled, found, strict=True)]
    best = json.loads((run / "result.json").read_text())["best"]
    assert sum(right) / len(right) == pytest.approx(best["value"])
    assert found == by_name


@pytest.mark.slow
def test_an_onnx_file_of_other_weights_differs(place: Path, capsys: Shown) -> None:
    dataset = str(write_colours(place))
    flags = ["--dataset", dataset, "--augment.crop-padding", "1", "--model", "resnet8", "--onnx"]
    run = train(cifar, place, *flags)
    verify = ["verify", run, "--dataset", dataset, "--cache-dir", place / "cache"]
    code, said, _ = run_command(capsys, verify)
    assert (code, "model.onnx " in said) == (0, True), "the file that the recipe wrote"
    other = shutil.copytree(run / "export", place / "other")
    weights = load_file(other / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"].flip(0)
    save_file(weights, other / "model.safetensors")
    config = json.loads((other / "config.json").read_text())
    del config["sha256"], config["onnx_sha256"], config["onnx"]
    (other / "config.json").write_text(json.dumps(config))
    made = convert(other, config)
    for name, data in made.contents.items():
        (run / "export" / name).write_bytes(data)
    config = json.loads((run / "export" / "config.json").read_text()) | made.config
    (run / "export" / "config.json").write_text(json.dumps(config))
    code, said, _ = run_command(capsys, verify)
    assert (code, "CHANGED" in said) == (1, False), "with a hash and an example of its own"
    assert re.search(r"^model\.onnx .* DIFFERS$", said, re.MULTILINE)
