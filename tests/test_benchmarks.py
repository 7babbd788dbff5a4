import importlib
import sys
from pathlib import Path

import pytest

from accel_trainer.vision import load_images
from benchmarks import gpu_cifar, gpu_records, results
from benchmarks.__main__ import NAMES
from benchmarks.input_pipeline import write_noise

pytestmark = pytest.mark.timeout(300)  # most start whole trainings in processes of their own

# What airbench94_muon prints, of the images where it reads them: a run is named in its first row alone.
AIRBENCH94 = """
import torch
data = torch.load("cifar10/train.pt")
assert data["images"].shape == (256, 32, 32, 3) and data["images"].dtype == torch.uint8
print("|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |")
for run in ("warmup", 0, 1, 2):
    print(f"|  {run}  |  0  |  0.5  |  0.5  |    |  1.0  |")
    print("|    |  1  |  0.5  |  0.5  |    |  2.0  |")
    print(f"|    |  eval  |  0.9  |  0.9  |  0.94{0 if run == 'warmup' else run}  |  2.5  |", flush=True)
while True:
    pass
"""
# And airbench96, which has no warm-up and a column more.
AIRBENCH96 = """
print("|  run     |  epoch  |  train_loss  |  train_acc  |  val_acc  |  tta_val_acc  |  total_time_seconds  |")
for run in range(25):
    print(f"|  {run}  |  0  |  1.0  |  0.5  |  0.5  |    |  1.0  |")
    print(f"|    |  eval  |  0.3  |  0.9  |  0.9  |  0.94{run}  |  2.5  |", flush=True)
"""
TINY_RECIPE = "model: {name: resnet8}\ntrainer: {num_epochs: 1}\n"

OURS = ("ours, all on", "ours, the others' optimizer")
TINY = {
    "overhead": ["--loops", "raw", *OURS, "--repeats", "1", "--steps", "8", "--resnet-repeats", "0"],
    "input_pipeline": ["--images", "1024", "--repeats", "1", "--workers", "0"],
    "evaluation": ["--repeats", "1"],
    "checkpointing": ["--repeats", "2"],
    "startup": ["--repeats", "1"],
    "cpu_cifar": ["--seeds", "1", "--max-steps", "1"],
    "scaling": ["--repeats", "1", "--steps", "2"],
    "gpu_cifar": [],
    "gpu_records": [],
}


def test_the_tables_are_those_of_the_committed_results() -> None:
    assert (results.FOLDER / "README.md").read_text() == results.readme(), "make it anew: python -m benchmarks.results"


def test_each_benchmark_is_tried() -> None:
    assert set(TINY) == set(NAMES)


@pytest.mark.filterwarnings("default")  # of packages that are compared with
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "scaling")) for name in NAMES])
def test_a_benchmark_runs_with_tiny_sizes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TINY[name]
    if name == "cpu_cifar":
        write_noise(tmp_path, num_train=256)
        options = [*options, "--dataset", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *options])
    importlib.import_module(f"benchmarks.{name}").main()
    is_measured = name not in ("cpu_cifar", "gpu_cifar", "gpu_records")  # cut short, and without a GPU
    assert (tmp_path / "results" / f"{name}.json").exists() == is_measured
    if is_measured:
        assert results.readme() == (tmp_path / "README.md").read_text()


def test_what_a_time_limit_cut_off_goes_on_with_the_parts_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    now = results.environment()
    assert results.measured_before("part", now=now) == {}
    tables = {"one": [{"loop": "ours", "n": 1}]}
    results.write("part", title="", how="", tables=tables, started=now)
    assert results.measured_before("part", now={**now, "load_average": 9.0}) == tables
    for other in ("cpu", "gpu", "versions", "commit"):
        assert results.measured_before("part", now={**now, other: "another"}) == {}


def test_a_measured_part_on_a_gpu_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_cifar, "measure", lambda *part, **sizes: [{"loop": part[0], "n": 1}])
    gpu_cifar.write({"resnet8, batch 8": [{"loop": "earlier", "n": 1}]}, results.environment())
    monkeypatch.setattr(gpu_cifar, "write", lambda tables, started: written.append(list(tables)))
    monkeypatch.setattr(gpu_cifar, "HAS_GPU", True)
    monkeypatch.setattr(gpu_cifar, "noise", lambda num: None)
    monkeypatch.setattr(sys, "argv", ["gpu_cifar", "--models", "resnet8", "--batch-sizes", "8", "16"])
    written: list[list[str]] = []
    gpu_cifar.main()
    assert written == [["resnet8, batch 8", "resnet8, batch 16"]]


@pytest.mark.parametrize("script", [AIRBENCH94, AIRBENCH96])
def test_airbench_runs_beside_the_recipe_and_a_second_start_trains_the_seeds_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    write_noise(tmp_path, num_train=256)
    (tmp_path / "airbench.py").write_text(script)
    (tmp_path / "recipe.yaml").write_text(TINY_RECIPE)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    arguments = ["gpu_records", "--dataset", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    arguments += ["--airbench", str(tmp_path / "airbench.py"), "--config", str(tmp_path / "recipe.yaml")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--seeds", "2"])
    images = load_images(str(tmp_path), cache_dir=tmp_path / "cache")
    theirs = gpu_records.run_airbench(tmp_path / "airbench.py", images, 2)
    assert [(run["accuracy"], run["training_s"]) for run in theirs] == [(0.940, 2.5), (0.941, 2.5)]
    part, other = gpu_records.part_of(tmp_path / "recipe.yaml"), {"ours": [theirs[0]]}
    gpu_records.write({part: {"airbench": theirs, "ours": [theirs[0]]}, "other": other}, results.environment())
    gpu_records.main()
    measured = gpu_records.read(results.environment())
    assert measured["other"] == other, "of another recipe, and kept"
    assert measured[part]["airbench"] == theirs
    assert len(measured[part]["ours"]) == 2
    assert measured[part]["ours"][1]["training_s"] > 0
