"""Evaluates an exported model with only torch and safetensors, as a script in its own process.

Usage: plain_evaluation.py EXPORT DATA, where DATA is a folder of safetensors files, each with uint8
images [N, C, H, W] and their labels [N]. If there is a `model.onnx`, onnxruntime runs it on some of
them, and its logits are compared with the model's. Without DATA, it runs on the example inputs that
the training run has stored, and the outputs are compared with the stored ones.
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BATCH_SIZE = 500
_ONNX_INPUT = "normalized_images"
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}


def evaluate(folder: Path, data: Path) -> dict[str, float]:
    """Return loss, accuracy and top-5 accuracy of the model in `folder`.

    Also the largest difference of `model.onnx`, if there is one.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn import functional as F

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build_model().eval().to(memory_format=torch.channels_last)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    mean, std = (
        torch.tensor(config["normalization"][name])[:, None, None] for name in ("mean", "std")
    )
    precision = _PRECISIONS.get(config["evaluation"]["mixed_precision"])
    loss_sum = 0.0
    num_correct = 0
    num_in_top5 = 0
    total = 0
    onnx: dict[str, float] = {}
    has_onnx = (folder / "model.onnx").exists()
    with torch.inference_mode():
        for images, labels in _batches(data, config["evaluation"].get("ignore_index")):
            inputs = ((images / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
            autocast = (
                torch.autocast("cpu", getattr(torch, precision))
                if precision
                else contextlib.nullcontext()
            )
            with autocast:
                views = _views(inputs, config["evaluation"]["tta"])
                logits = torch.stack([model(view).float() for view in views]).mean(0)
            if has_onnx and not onnx and len(labels):
                expected = torch.stack([model(view) for view in views]).mean(0)
                (found,) = _session(folder).run(None, {_ONNX_INPUT: inputs.contiguous().numpy()})
                onnx["model.onnx"] = _difference(found, expected.numpy())
            ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss_sum += float(F.cross_entropy(logits, labels, reduction="sum"))
            num_correct += int(ranked[:, 0].sum())
            num_in_top5 += int(ranked.sum())
            total += len(labels)
    return {
        "loss": loss_sum / total,
        "accuracy": num_correct / total,
        "top5_accuracy": num_in_top5 / total,
    } | onnx


def compare_example(folder: Path) -> dict[str, float]:
    """Return the largest difference of each output, for the whole batch and for one sample.

    Differences are absolute for values up to 1, and relative above.
    """
    from safetensors.numpy import load_file

    session = _session(folder)
    example = load_file(folder / "example.safetensors")
    names = [value.name for value in session.get_outputs()]
    differences: dict[str, float] = dict.fromkeys(names, 0.0)
    for size in (None, 1):
        inputs = {value.name: example[value.name][:size] for value in session.get_inputs()}
        found = session.run(None, inputs)
        for name, output in zip(names, found, strict=True):
            expected = example[name][:size]
            differences[name] = max(differences[name], _difference(output, expected))
    return differences


def _session(folder: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def _difference(found: Any, expected: Any) -> float:
    return float((abs(found - expected) / abs(expected).clip(1)).max())


def _batches(data: Path, ignored: int | None) -> Iterator[tuple[Any, Any]]:
    """Yield images and labels, without the samples whose label is `ignored`."""
    from safetensors.torch import load_file

    for file in sorted(data.iterdir()):
        tensors = load_file(file)
        keep = [label != ignored for label in tensors["labels"].tolist()]
        images = tensors["images"][keep].split(_BATCH_SIZE)
        labels = tensors["labels"][keep].split(_BATCH_SIZE)
        yield from zip(images, labels, strict=True)


def _views(images: Any, tta: str) -> list[Any]:
    """Return the views to average over: mirrored for `flip`, also shifted for `flip_crop`."""
    views = [images]
    if tta == "flip_crop":
        from torch.nn.functional import pad

        padded = pad(images, (1, 1, 1, 1), mode="reflect")
        height, width = images.shape[2:]
        views += [padded[..., :height, :width], padded[..., 2:, 2:]]
    if tta == "none":
        return views
    return [mirrored for view in views for mirrored in (view, view.flip(-1))]


if __name__ == "__main__":
    sys.modules["accel_trainer"] = None  # type: ignore[assignment]  # importing it is now an error
    export, *data = map(Path, sys.argv[1:])
    print(json.dumps(evaluate(export, *data) if data else compare_example(export)))
