"""The code of a model card, copied: it gives the class that `predict` gives, whatever the
picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from accel_trainer.callbacks.onnx import ONNX_FILES
from accel_trainer.cli.share.plain_model import write_transform
from tests.cli.conftest import run_command
from tests.variants import slow
from tests.vision.make_photos import encoded, photo

_ORIENTATION = 0x0112


def pictures() -> dict[str, bytes]:
    """Extreme aspect ratios, transparency, CMYK, 16 bits, palettes, turned photos, and large
    ones."""
    found = {}
    for number, (width, height) in enumerate(
        [(400, 9), (9, 400), (1, 1), (1, 90), (300, 100), (111, 333), (640, 480)]
    ):
        for kind in ("jpeg", "png"):
            found[f"{width}x{height}.{kind}"] = encoded(photo(width, height, seed=number), kind)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    clear = photo(90, 60).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    found |= {
        "alpha.png": encoded(clear, "png"),
        "alpha.webp": encoded(clear, "webp"),
        "alpha palette.gif": encoded(clear.convert("P"), "gif", transparency=0),
        "grey alpha.png": encoded(clear.convert("LA"), "png"),
        "palette.png": encoded(photo(90, 60).convert("P"), "png"),
        "cmyk.jpg": encoded(photo(200, 120).convert("CMYK")),
        "cmyk.tiff": encoded(photo(90, 60).convert("CMYK"), "tiff"),
        "grey.jpg": encoded(photo(200, 90).convert("L")),
        "one bit.png": encoded(photo(90, 60).convert("1"), "png"),
        "rgb.jpg": encoded(photo(300, 200), keep_rgb=True),
        "progressive.jpg": encoded(photo(300, 200), progressive=True),
        "bitmap.bmp": encoded(photo(50, 60), "bmp"),
        "profile.jpg": encoded(photo(99, 60), icc_profile=profile),
    }
    sixteen = (np.arange(60 * 90, dtype=np.uint16).reshape(60, 90) * 12).astype(np.uint16)
    found["sixteen bits.png"] = encoded(Image.fromarray(sixteen), "png")
    found["sixteen bits.tiff"] = encoded(Image.fromarray(sixteen), "tiff")
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        for kind in ("jpeg", "tiff"):
            found[f"turned {orientation}.{kind}"] = encoded(
                photo(120, 70, seed=orientation), kind, exif=exif
            )
    return found


def code_of(card: Path) -> str:
    """Return the last block of code: the one that reads a picture."""
    return re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)[-1]


def run_card(export: Path, files: list[Path], *, name: str) -> dict[str, list[str]]:
    """Run the card's code on each file, in one process that cannot import this package; return what
    it printed."""
    code = code_of(export / "README.md")
    assert code.count(f'"{name}"') >= 1, "its only input"
    script = (
        "import sys; sys.modules['accel_trainer'] = None; sys.path.insert(0, '.')\n"
        f"code = {code!r}\n"
        f"for path in {[str(path) for path in files]!r}:\n"
        f"    print(path, end='\\t')\n"
        f"    exec(code.replace({name!r}, path), {{}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        cwd=export,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        line.partition("\t")[0]: line.partition("\t")[2].split()
        for line in done.stdout.splitlines()
    }


def write_pictures(folder: Path) -> list[Path]:
    folder.mkdir()
    for name, data in pictures().items():
        (folder / name).write_bytes(data)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("kind", ["photos", *slow(["small images"])])
def test_the_code_of_a_card_gives_the_classes_of_predict_for_all_pictures(
    kind: str, photo_run: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    run, name = (photo_run, "image.jpg") if kind == "photos" else (runs / "fast", "image.png")
    assert run_command(capsys, ["export", run, "--to", tmp_path / "model"])[0] == 0
    files = write_pictures(tmp_path / "pictures")
    code, out, err = run_command(capsys, ["predict", tmp_path / "model", tmp_path / "pictures"])
    assert (code, err) == (0, "")
    predicted = {line.split("  ")[0]: line.split("  ")[1].split() for line in out.splitlines()}
    assert len(predicted) == len(files) > 40
    assert len({tuple(words) for words in predicted.values()}) > 20, "they are not all the same"
    printed = run_card(tmp_path / "model", files, name=name)
    assert {file: name for file, (name, _) in printed.items()} == {
        file: name for file, (name, _) in predicted.items()
    }
    # `predict` has several pictures in a batch, so that the last digit may be rounded otherwise.
    for file, (_, confidence) in printed.items():
        difference = float(confidence.strip("%")) - float(predicted[file][1].strip("%"))
        assert abs(difference) < 0.15, file


def test_the_card_of_photos_says_that_they_are_for_validation(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    run_command(capsys, ["export", photo_run, "--to", tmp_path / "model"])
    text = (tmp_path / "model" / "README.md").read_text()
    assert "| on the validation images | |" in text
    assert "validation images in float32" in text
    assert "split: validation" in text
    assert "test images" not in text
    assert (tmp_path / "model" / "transform.py").read_text() == write_transform()


def test_the_file_that_transforms_photos_needs_nothing_of_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write_transform()
    assert "accel_trainer" not in source
    assert not re.search(r"^\s*from \.", source, re.MULTILINE)
    transform: Any = ModuleType("transform")
    monkeypatch.setitem(sys.modules, "transform", transform)
    exec(compile(source, "transform.py", "exec"), vars(transform))
    with pytest.raises(transform.DataError, match=r"a\.jpg cannot be decoded"):
        transform.decode_photo(b"no photo", "a.jpg")
    with pytest.raises(transform.ConfigError, match="not an evaluation transform"):
        transform.EvalTransform.from_dict({})


@pytest.mark.slow
@pytest.mark.usefixtures("python_is_forked")
def test_the_card_of_an_own_model_classifies_photos_as_predict_does(
    photo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    code, _, err = run_command(capsys, ["export", photo_run, "--to", tmp_path / "ours", "--onnx"])
    assert (code, err) == (0, "")
    run = tmp_path / "run"
    export = run / "export"
    export.mkdir(parents=True)
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "result.json"):
        (run / name).write_bytes((photo_run / name).read_bytes())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    del config["model"]  # as for a class that only a recipe has
    for name in ("model.safetensors", "model.onnx"):
        (export / name).write_bytes((tmp_path / "ours" / name).read_bytes())
    (export / "example.safetensors").write_bytes(b"")
    config |= dict.fromkeys(ONNX_FILES.values(), "") | {"onnx_sha256": config["onnx_sha256"]}
    (export / "config.json").write_text(json.dumps(config))
    assert run_command(capsys, ["export", run, "--to", tmp_path / "model"])[0] == 0
    files = write_pictures(tmp_path / "pictures")
    _, out, _ = run_command(capsys, ["predict", tmp_path / "model", tmp_path / "pictures"])
    predicted = {line.split("  ")[0]: line.split("  ")[1].split() for line in out.splitlines()}
    assert run_card(tmp_path / "model", files, name="image.jpg") == predicted
