"""Writes `model.onnx`: what an evaluation computes, from what the model takes to its outputs."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import safetensors.torch
import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..checkpoint.serialization import Tensors
from ..checkpoint.state_dict import load_weights
from ..core.types import EvalSource, Task, eval_step_of

_EXAMPLE_SIZE = 8  # samples
ONNX_FILES = {"model.onnx": "onnx_sha256", "example.safetensors": "example_sha256"}
"""What `--onnx` adds to an export, and the names of the hashes in its `config.json`."""


_VALUES = {
    "normalized_images": "float32 [B, C, H, W]: (pixels / 255 - mean) / std",
    "logits": "float32 [B, K], averaged over the views of any test-time augmentation",
}
"""What the input and the output of a classifier of images are, by their names."""


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a model's forward."""


class OnnxFiles(NamedTuple):
    """What `--onnx` adds to an export."""

    contents: dict[str, bytes]
    """The contents of `ONNX_FILES`, by name."""
    config: dict[str, Any]
    """Their hashes, and what the named inputs and outputs are, for `config.json`."""


class OnnxExport(NamedTuple):
    """What an ONNX file is made from: the model, and a task and a loader that show its use."""

    model: nn.Module
    """A copy of the model on the CPU."""
    task: Task
    loader: EvalSource

    def call(self) -> Call:
        """Return the arguments with which the task calls the model for some samples."""
        batch = next(batch for batch in self.loader.batches() if len(batch))
        # The exporter takes an axis of size 1 for a constant: a small batch is repeated.
        some = torch.arange(_EXAMPLE_SIZE) % len(batch)
        batch = batch.map(lambda tensor: tensor[some].to("cpu"))
        calls: list[Call] = []
        model = self.model.eval()
        with model.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True):
            eval_step_of(self.task)(model, batch)
        return calls[0]

    def files(self, weights: Tensors, config: Mapping[str, Any]) -> OnnxFiles:
        """Return the files of the model with these weights, as `write_onnx`."""
        load_weights(self.model, weights)
        call = self.call()
        evaluated = getattr(self.task, "evaluated", lambda model: model)
        return write_onnx(evaluated(self.model), call, config)


def write_onnx(model: nn.Module, call: Call, config: Mapping[str, Any]) -> OnnxFiles:
    """Return the files for batches of any size, with this call of the model as the example.

    `config` is the `config.json` of the export: its classes and its normalisation are in the ONNX
    file as well. Raises ValueError if an input or output has no batch dimension.
    """
    # The exporter warns if torchvision is missing (torch 2.13).
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        # The exporter causes warnings about torch's internals (torch 2.13).
        warnings.simplefilter("ignore")
        inputs = _tensors(call)
        outputs = _tensors(model.eval()(*call[0], **call[1]))
        is_classifier = {"normalization", "class_names"} <= config.keys()
        values = _VALUES if is_classifier and len(inputs) == len(outputs) == 1 else {}
        program = torch.onnx.export(
            _traced(model, call, inputs),
            verbose=False,
            input_names=[*values][:1] or None,
            output_names=[*values][1:] or None,
        )
    assert program is not None
    facts = {name: config[name] for name in ("class_names", "image_size") if name in config}
    facts |= config.get("normalization", {})
    texts = {name: json.dumps(fact) for name, fact in facts.items()}
    program.model.metadata_props.update(texts | values)
    proto = program.model_proto
    sizes = {
        value.name: value.type.tensor_type.shape.dim
        for value in (*proto.graph.input, *proto.graph.output)
    }
    if any(size[:1] != next(iter(sizes.values()))[:1] for size in sizes.values()):
        raise ValueError("its inputs and outputs are not all of one sample each, [B, ...]")
    # safetensors refuses tensors with gaps and tensors that share memory.
    copies = [tensor.contiguous().clone() for tensor in (*inputs, *outputs)]
    example = safetensors.torch.save(dict(zip(sizes, copies, strict=True)))
    files = dict(zip(ONNX_FILES, (proto.SerializeToString(), example), strict=True))
    hashes = {ONNX_FILES[name]: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return OnnxFiles(files, {**hashes, "onnx": values})


def _traced(model: nn.Module, call: Call, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    shapes = torch.export.ShapesCollection()
    for tensor in inputs:
        others = {axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size > 1}
        shapes[tensor] = others | ({0: batch} if tensor.ndim else {})
    return torch.export.export(model, *call, dynamic_shapes=shapes.dynamic_shapes(model, *call))


def _tensors(data: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in their order."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found
