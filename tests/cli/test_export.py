"""`accel-trainer export`, `verify` and `predict` on a real run, also when somebody changed
something."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from PIL import Image
from safetensors.torch import load_file, save_file

from accel_trainer import EvalLoader
from accel_trainer.cli.runs.run_reader import read_run
from accel_trainer.cli.share.export import reported_metrics
from accel_trainer.cli.share.plain_model import write_source
from accel_trainer.cli.share.predict import read_image
from accel_trainer.cli.share.verify import compare, evaluate_apart
from accel_trainer.core.errors import CheckpointError, ConfigError
from accel_trainer.vision import (
    MODEL_NAMES,
    ImageReader,
    ModelConfig,
    Normalization,
    build_model,
    load_images,
)
from accel_trainer.vision.pretrained import ExportConfig, from_pretrained, read_export_config
from tests.cli.conftest import run_command
from tests.cli.local_hub import local_hub

ROOT = Path(__file__).parents[2]


def verify(folder: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code, out, err = run_command(capsys, ["verify", folder, "--cache-dir", runs.parent / "cache"])
    return code, out + err


def digit(runs: Path, path: Path) -> torch.Tensor:
    """Write the first test image to `path` and return it."""
    image = load_images("digits", cache_dir=runs.parent / "cache").test.images[0]
    Image.fromarray(image[0].numpy()).save(path)
    return image


# --- export ---


def test_an_export_loads_back_as_the_module_that_was_trained(runs: Path, model: Path) -> None:
    names = [
        "README.md",
        "SHA256SUMS",
        "accuracy.png",
        "config.json",
        "loss.png",
        "model.py",
        "model.safetensors",
        "transform.py",
    ]
    assert sorted(path.name for path in model.iterdir()) == names
    expected = load_file(runs / "fast" / "export" / "model.safetensors")
    for place in (model, str(model), runs / "fast"):
        loaded = from_pretrained(place)
        assert not loaded.training
        weights = loaded.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_export_replaces_an_export_and_no_other_file(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("mine")
    command = ["export", runs / "fast", "--to", tmp_path]
    code, _, err = run_command(capsys, command)
    assert (code, "README.md would be overwritten, and" in err) == (73, True)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    (tmp_path / "README.md").unlink()
    assert run_command(capsys, command)[0] == 0
    assert run_command(capsys, command)[0] == 0, "an export may be written again"
    (tmp_path / "README.md").write_text("mine again")
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = run_command(capsys, command)
    assert (code, "README.md would be overwritten, and" in err) == (73, True)
    assert (tmp_path / "README.md").read_text() == "mine again"


@pytest.mark.parametrize("place", ["", "export", "checkpoints", "link"])
def test_an_export_into_a_run_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    run = shutil.copytree(runs / "fast", tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    target = tmp_path / "link" if place == "link" else run / place
    code, _, err = run_command(capsys, ["export", runs / "fast", "--to", target])
    assert (code, "is part of the run" in err) == (73, True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_card_reports_the_numbers_of_the_run(runs: Path, model: Path) -> None:
    data = ModelCard.load(model / "README.md").data
    best = json.loads((runs / "fast" / "result.json").read_text())["best"]
    reported = {result.metric_type: result for result in data.eval_results}
    assert reported["accuracy"].metric_value == best["value"]
    assert reported["accuracy"].dataset_type == "digits"
    assert (
        reported["accuracy"].dataset_revision
        == load_images("digits", cache_dir=runs.parent / "cache").fingerprint
    )
    assert data.pipeline_tag == "image-classification"
    assert f"| accuracy | {best['value']:.2%} |" in (model / "README.md").read_text()


def test_the_card_says_how_the_weights_were_trained(model: Path) -> None:
    text = " ".join((model / "README.md").read_text().split())
    assert (
        "Measured on 359 test images in float32. The averaged weights of the best checkpoint step-"
        in text
    )
    assert "of 2 epochs and 2,876 images, trained with torch" in text
    assert "With `sgd`, a peak learning rate of 0.1 and 64 images per step, seed 0." in text
    settings = re.findall(
        r"^\| `(\S+)` \| (.+) \|$", (model / "README.md").read_text(), re.MULTILINE
    )
    assert ("model.norm", "group") in settings
    assert ("dataset", "digits") in settings
    assert not {"optimizer.learning_rate", "run.output_dir"} & dict(settings).keys(), (
        "as by default"
    )


def test_the_metadata_of_the_card_is_what_the_hub_reads(model: Path) -> None:
    stored = metadata_load(model / "README.md")
    assert stored is not None
    name, results = model_index_to_eval_results(stored["model-index"])
    assert name == stored["model-index"][0]["name"] == "resnet8 on digits"
    assert eval_results_to_model_index(name, results) == stored["model-index"], (
        "nothing is lost on the way"
    )
    assert {result.metric_type for result in results} == {"accuracy", "loss", "top5_accuracy"}
    assert all(result.task_type == "image-classification" for result in results)


def test_the_pictures_of_the_card_lie_beside_it(model: Path) -> None:
    shown = re.findall(r"!\[.*?\]\((.*?)\)", (model / "README.md").read_text())
    assert shown == ["loss.png", "accuracy.png"]
    for name in shown:
        with Image.open(model / name) as image:
            assert image.size[0] == 920


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_source_in_an_export_builds_the_same_model(name: str, tmp_path: Path) -> None:
    config = ModelConfig(name=name, width=8, norm="group" if name.endswith("8") else "batch")
    normalization = Normalization(mean=(0.5,), std=(0.5,))
    described = ExportConfig(config, 3, ("a", "b", "c"), normalization, None)
    (tmp_path / "model.py").write_text(write_source(described))
    assert "accel_trainer" not in (tmp_path / "model.py").read_text()
    module = load_module(tmp_path / "model.py")
    plain, ours = (
        module.build_model().eval(),
        build_model(config, in_channels=3, num_classes=3).eval(),
    )
    plain.load_state_dict(ours.state_dict())
    image = torch.arange(3 * 16 * 16).reshape(1, 3, 16, 16) / 768
    with torch.inference_mode():
        assert torch.equal(plain(image), ours(image))
    assert str(plain) == str(ours)


def test_the_source_of_a_timm_model_builds_it_without_a_download() -> None:
    normalization = Normalization(mean=(0.5,), std=(0.5,))
    described = ExportConfig(
        ModelConfig(name="timm/resnet18.a1_in1k"), 3, ("a", "b", "c"), normalization, None
    )
    tree = ast.parse(write_source(described))
    assert [
        name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names
    ] == ["timm"]
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert function.name == "build_model"
    expected = (
        "return timm.create_model('resnet18.a1_in1k', pretrained=False, num_classes=3, in_chans=3)"
    )
    assert ast.unparse(function.body[-1]) == expected


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_apart(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call `accel-trainer` in a new process, because the hub's client reads its settings on
    import."""
    code = "import sys; from accel_trainer.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *map(str, argv)]
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.usefixtures("python_is_forked")
def test_others_predict_with_what_was_pushed_to_the_hub(
    runs: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digit(runs, tmp_path / "digit.png")
    with local_hub() as hub:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_local",
        }
        hub.files |= {path.name: path.read_bytes() for path in model.iterdir()}
        downloaded = call_apart("predict", "me/digits", tmp_path / "digit.png", **settings)
        options = ["--dataset", "digits", "--cache-dir", runs.parent / "cache"]
        measured = call_apart("evaluate", "me/digits", *options, **settings)
    assert downloaded.returncode == measured.returncode == 0, downloaded.stderr + measured.stderr
    assert downloaded.stdout == run_command(capsys, ["predict", model, tmp_path / "digit.png"])[1]


@pytest.mark.usefixtures("python_is_forked")
def test_a_name_that_is_neither_here_nor_on_the_hub_is_one_line(tmp_path: Path) -> None:
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    refused = call_apart("predict", "me/digits", "digit.png", **nobody)
    assert refused.returncode == 74
    assert (
        "error[EXPORT]: me/digits is not a folder and cannot be downloaded from the hub ("
        in refused.stderr
    )
    assert refused.stderr.count("\n") == 1


@pytest.mark.usefixtures("python_is_forked")
def test_the_onnx_of_an_export_gives_the_logits_of_its_model(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    code, _, err = run_command(
        capsys, ["export", runs / "fast", "--to", tmp_path / "model", "--onnx"]
    )
    assert (code, err) == (0, "")
    images = load_images("digits", cache_dir=runs.parent / "cache")
    pixels = images.test.images[:7] / 255  # another number than the one it was traced with
    mean, std = (
        torch.tensor(value)[:, None, None] for value in vars(images.normalization).values()
    )
    inputs = (pixels - mean) / std
    with torch.inference_mode():
        expected = from_pretrained(tmp_path / "model")(inputs)
    session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx")
    (logits,) = session.run(None, {"normalized_images": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)

    code, text = verify(tmp_path / "model", runs, capsys)
    assert code == 0
    assert re.search(r"^model\.onnx +sha256 \w+  ok$", text, re.MULTILINE)
    with (tmp_path / "model" / "model.onnx").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    code, text = verify(tmp_path / "model", runs, capsys)
    assert code == 1
    assert re.search(r"^model\.onnx +sha256 \w+  CHANGED$", text, re.MULTILINE)


# --- verify ---


def test_a_measured_loss_of_zero_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare({"loss": 0.0}, {"loss": 0.0}, 5e-4)
    assert not compare({"loss": 0.1}, {"loss": 0.0}, 5e-4)
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.usefixtures("python_is_forked")
def test_an_export_and_a_run_are_verified(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (model, runs / "fast"):
        code, text = verify(folder, runs, capsys)
        assert code == 0, text
        lines = text.splitlines()
        assert all(line.endswith("  ok") for line in lines[:4]), "the weights and three numbers"
        if folder == model:
            assert len(lines) == 4
            continue
        kept = [*(folder / "checkpoints").glob("step-*")]
        measured = [f"{weights} of {each.name}:" for each in kept for weights in ("model", "ema")]
        assert {*measured} <= {*lines}
        assert f"{len(measured)} of {len(measured)} evaluated" in lines[-1]


@pytest.mark.usefixtures("python_is_forked")
def test_a_checkpoint_with_another_row_or_another_bit_fails(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(runs, model)
    rows = (folder / "metrics.jsonl").read_text()
    first = read_run(folder).evaluations()[0]
    better = rows.replace(str(first["eval/accuracy"]), str(first["eval/accuracy"] + 0.01))
    (folder / "metrics.jsonl").write_text(better)
    code, text = verify(folder, runs, capsys)
    assert code == 1, text
    (folder / "metrics.jsonl").write_text(rows)
    path = min((folder / "checkpoints").glob("step-*/model.safetensors"))
    flip_the_last_bit(path)
    code, text = verify(folder, runs, capsys)
    assert code == 1
    assert f"{path.parent.name}/{path.name}: its sha256" in text
    assert "CHANGED" not in text
    flip_the_last_bit(folder / "export" / "model.safetensors")
    code, text = verify(folder, runs, capsys)
    assert code == 1
    assert "CHANGED" in text


def flip_the_last_bit(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)


@pytest.mark.usefixtures("python_is_forked")
def test_one_changed_weight_fails(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_the_last_bit(model / "model.safetensors")  # of the last number: no metric can tell
    code, text = verify(model, runs, capsys)
    assert code == 1
    assert "CHANGED" in text


@pytest.mark.usefixtures("python_is_forked")
def test_other_weights_fail_also_with_their_own_hash(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(model / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"].flip(0)
    save_file(weights, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["sha256"] = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    (model / "config.json").write_text(json.dumps(config))
    code, text = verify(model, runs, capsys)
    assert code == 1
    assert "CHANGED" not in text
    assert re.search(r"accuracy .* DIFFERS", text)


@pytest.mark.usefixtures("python_is_forked")
def test_a_better_number_in_the_card_fails(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = (model / "README.md").read_text()
    accuracy = re.search(r"type: accuracy\n +value: (\S+)", card)
    assert accuracy is not None
    better = float(accuracy[1]) + 1 / 359
    (model / "README.md").write_text(card.replace(accuracy[1], str(better)))
    code, text = verify(model, runs, capsys)
    assert code == 1, "a single image more"
    assert [line.split()[0] for line in text.splitlines() if "DIFFERS" in line] == ["accuracy"]


def test_a_better_number_in_a_run_fails(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(runs, model)
    result = json.loads((folder / "result.json").read_text())
    result["best"]["value"] += 0.01
    (folder / "result.json").write_text(json.dumps(result))
    code, text = verify(folder, runs, capsys)
    assert code == 73
    assert "error[RUN_CHANGED]" in text


def test_a_stopped_run_is_reported_by_the_evaluation_after_its_resume(runs: Path) -> None:
    run = read_run(runs / "fast")
    row = run.evaluations()[0]
    step = row["optimizer_step"]
    before = {"eval_ema/loss": row["eval_ema/loss"] + 1, "eval/loss": row["eval/loss"] + 1}
    result = {"state": "preempted", "optimizer_step": step, "metrics": before}
    weights = {"weights": f"ema of step-{step:010d}-epoch-00001"}
    found = reported_metrics(replace(run, result=result), weights)
    assert found["loss"] == row["eval_ema/loss"]


def test_other_data_than_reported_on_are_refused(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = model / "README.md"
    card.write_text(re.sub(r"revision: \w+", "revision: " + "a" * 64, card.read_text()))
    code, text = verify(model, runs, capsys)
    assert code == 65
    assert "digits is not the data of the reported numbers (aaaaaaaaaaaa, here " in text


def test_a_python_without_this_package_gets_the_reported_numbers(
    runs: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # A folder of links with only torch and safetensors, without this package.
    for installed in {Path(torch.__file__).parents[1], Path(safetensors.__file__).parents[1]}:
        for path in installed.iterdir():
            if (
                not path.name.startswith(("accel_trainer", "__editable__"))
                and path.suffix != ".pth"
            ):
                (site / path.name).symlink_to(path)
    found = subprocess.run(
        [python, "-I", "-c", "import accel_trainer"], capture_output=True, text=True, check=False
    )
    assert "No module named 'accel_trainer'" in found.stderr
    arguments = [model, "--cache-dir", runs.parent / "cache", "--python", python]
    code, out, err = run_command(capsys, ["verify", *arguments])
    assert code == 0, err
    assert out.count("  ok") == 4


def test_a_python_that_does_not_exist_is_named(model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "python9"
    with pytest.raises(ConfigError, match=f"--python {missing} cannot be started"):
        evaluate_apart(model, python=str(missing))


def test_the_process_that_verifies_cannot_import_this_package(model: Path, tmp_path: Path) -> None:
    source = (model / "model.py").read_text()
    future = "from __future__ import annotations\n"
    (model / "model.py").write_text(
        source.replace(future, future + "import accel_trainer.vision.pretrained\n")
    )
    with pytest.raises(CheckpointError, match="No module named .accel_trainer"):
        evaluate_apart(model, tmp_path / "data")


def test_the_separate_evaluation_imports_only_torch_and_safetensors() -> None:
    tree = ast.parse(
        (Path(evaluate_apart.__code__.co_filename).parent / "plain_evaluation.py").read_text()
    )
    named = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    named |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name.partition(".")[0] for name in named} - set(sys.stdlib_module_names)
    assert outside == {"torch", "safetensors", "onnxruntime"}, "the last for models of one's own"


def copy(runs: Path, model: Path) -> Path:
    shutil.copytree(runs / "fast", model.parent / "run", dirs_exist_ok=True)
    return model.parent / "run"


# --- predict ---


def test_a_picture_gets_labels_with_confidence(
    runs: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = digit(runs, tmp_path / "digit.png")
    images = load_images("digits", cache_dir=runs.parent / "cache")
    mean, std = (float(value[0]) for value in vars(images.normalization).values())
    with torch.inference_mode():
        expected = from_pretrained(model)(((image / 255 - mean) / std)[None])[0].softmax(0)
    Image.fromarray(np.full((40, 30, 3), 200, dtype=np.uint8)).save(tmp_path / "large.jpg")
    _, out, _ = run_command(
        capsys,
        ["predict", runs / "fast", tmp_path / "digit.png", tmp_path / "large.jpg", "--top", "3"],
    )
    first, second = (line.split("  ") for line in out.splitlines())
    assert first[1] == f"{int(expected.argmax())} {float(expected.max()):.1%}"
    assert len(first) == len(second) == 4, (
        "the path and three labels, also of a colour image of another size"
    )


def test_a_picture_gets_the_mean_over_the_views_of_the_evaluation(
    runs: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digit(runs, tmp_path / "digit.png")
    inputs = read_image(tmp_path / "digit.png", read_export_config(model))[None]
    config = json.loads((model / "config.json").read_text())
    with torch.inference_mode():
        views = [from_pretrained(model)(view)[0] for view in (inputs, inputs.flip(-1))]
    found = []
    for tta, logits in (("none", views[0]), ("flip", (views[0] + views[1]) / 2)):
        config["evaluation"]["tta"] = tta
        (model / "config.json").write_text(json.dumps(config))
        _, out, _ = run_command(capsys, ["predict", model, tmp_path / "digit.png", "--jsonl"])
        found.append(json.loads(out)["predictions"][0]["probability"])
        assert found[-1] == pytest.approx(float(logits.softmax(0).max()), abs=1e-6)
    assert found[0] != found[1]


def test_a_picture_is_read_as_an_evaluation_reads_it(
    runs: Path, model: Path, tmp_path: Path
) -> None:
    digit(runs, tmp_path / "digit.png")
    images = load_images("digits", cache_dir=runs.parent / "cache")
    cpu = torch.device("cpu")
    reader = ImageReader(images.test, normalization=images.normalization, device=cpu)
    loader = EvalLoader(reader, batch_size=1, device=cpu)
    expected = next(iter(loader.batches())).inputs[0]
    read = read_image(tmp_path / "digit.png", read_export_config(model))
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-6)


def test_a_picture_is_resized_to_the_size_of_the_training_images(
    model: Path, tmp_path: Path
) -> None:
    pixels = np.zeros((40, 30), dtype=np.uint8)
    pixels[:, 15:] = 255  # the right half is white
    Image.fromarray(pixels).save(tmp_path / "halves.png")
    config = replace(
        read_export_config(model),
        image_size=(8, 20),
        normalization=Normalization(mean=(0.0,), std=(1.0,)),
    )
    read = read_image(tmp_path / "halves.png", config)
    assert read.shape == (1, 8, 20)
    assert read[0, :, :8].max() < 0.1 < 0.9 < read[0, :, 12:].min()


def test_what_is_not_a_picture_or_a_model_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("no image")
    code, _, err = run_command(capsys, ["predict", runs / "fast", tmp_path / "text.png"])
    assert code == 65
    assert "text.png cannot be decoded (it is not an image in JPEG, " in err
    code, _, err = run_command(capsys, ["predict", tmp_path, tmp_path / "text.png"])
    assert code == 74
    assert "has no model.safetensors: give a finished run or an exported model" in err


def test_an_own_model_has_no_source_and_onnx_only_if_its_run_wrote_it(
    runs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(runs, model)
    (folder / "export" / "config.json").write_text('{"weights": "model after step 46"}')
    code, _, err = run_command(capsys, ["export", folder, "--to", model.parent / "again", "--onnx"])
    assert code == 74
    assert (
        "has no model.onnx, and only the recipe has the class: start its recipe again with --onnx"
        in err
    )
    assert not (model.parent / "again").exists()
    assert run_command(capsys, ["export", folder, "--to", model.parent / "again"])[0] == 0
    assert not (model.parent / "again" / "model.py").exists()
    code, _, err = run_command(capsys, ["evaluate", folder])
    assert (
        code,
        "a custom model, which only its recipe can evaluate: start the recipe with" in err,
    ) == (74, True)
