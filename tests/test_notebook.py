"""The notebook as users run it: a new kernel executes every cell, with one process and with two."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from .training.test_exactness import history

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "debug.ipynb"


def execute(run: Path, *, num_processes: int) -> Any:
    """Return the executed notebook; its first cell sets processes, folder and a few steps."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
    flags = "--max-steps 1 --model.norm group --lr 0.01 --runtime.num-threads 1"
    changes = {
        "PROCESSES = 1": f"PROCESSES = {num_processes}",
        "../runs/debug": str(run),
        "--epochs 5": flags,
    }
    for old, new in changes.items():
        assert old in settings.source
        settings.source = settings.source.replace(old, new)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    return notebook


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def pictures(notebook: Any) -> list[Image.Image]:
    outputs = [
        output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    encoded = [data["image/png"] for data in outputs if "image/png" in data]
    return [Image.open(io.BytesIO(base64.b64decode(picture))).convert("L") for picture in encoded]


@pytest.mark.slow
def test_the_notebook_trains_the_same_model_in_one_process_and_in_two(tmp_path: Path) -> None:
    for num_processes in (1, 2):
        notebook = execute(tmp_path / str(num_processes), num_processes=num_processes)
        text = printed(notebook)
        assert f"{num_processes} x cpu" in text
        assert re.search(r"^[1-9]\d* of 359 are wrong$", text, re.MULTILINE)
        drawn = pictures(notebook)
        assert len(drawn) == 4, "curves, wrong predictions, confusion, gradients"
        assert all(len(set(picture.tobytes())) > 20 for picture in drawn), "none is empty"
    one, two = (load_file(tmp_path / run / "export" / "model.safetensors") for run in "12")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= 1e-6
    for mine, theirs in zip(history(tmp_path / "1"), history(tmp_path / "2"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_no_output_is_committed() -> None:
    cells = [
        cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"
    ]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
