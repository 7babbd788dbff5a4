"""Writes a model and its image transform as files of plain torch, from the package's sources."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ...vision.data import eval_transform, photo_decode, pixels
from ...vision.models import blocks
from ...vision.models.timm_nets import PREFIX
from ...vision.models.zoo import model_call
from ...vision.pretrained import ExportConfig

_TRANSFORM_HEADER = '''\
"""From a photo to the input of the model beside this file. Needs torch, numpy and Pillow.

Also install simplejpeg if the model was evaluated with it: then every pixel is the same.
"""
'''
_ERRORS = '''class DataError(Exception):
    """A photo cannot be used."""


class ConfigError(Exception):
    """The numbers in config.json describe no transform."""


'''
_HEADER = '"""The architecture of model.safetensors beside this file. Needs only torch."""\n'


def write_source(config: ExportConfig) -> str:
    """Return a Python file with `build_model() -> nn.Module`."""
    assert config.model is not None
    if config.model.name.startswith(PREFIX):
        arguments = [
            repr(config.model.name.removeprefix(PREFIX)),
            "pretrained=False",
            f"num_classes={len(config.class_names)}",
            f"in_chans={config.in_channels}",
        ]
        header = _HEADER.replace("only torch", "torch and timm")
        build = _build_function("timm.create_model", arguments)
        return f"{header}\nimport timm\nfrom torch import nn\n\n\n{build}"
    call = model_call(
        config.model,
        in_channels=config.in_channels,
        num_classes=len(config.class_names),
        image_size=config.image_size,
    )
    modules = [blocks, sys.modules[call.func.__module__]]
    imports, bodies = zip(*(_split(module) for module in modules), strict=True)
    future, *others = _merged(imports)
    arguments = [_spell(value) for value in call.args]
    arguments += [f"{name}={_spell(value)}" for name, value in call.keywords.items()]
    build = _build_function(call.func.__name__, arguments)
    return "\n".join([_HEADER, future, "", *others, "\n", *bodies, build])


def write_transform() -> str:
    """Return a Python file with `EvalTransform`, by which `accel-trainer predict` reads a photo."""
    parts = [_split(photo_decode), _split(eval_transform)]
    future, *others = _merged([imports for imports, _ in (*parts, _split(pixels))])
    normalizer = "\n\n".join(
        inspect.getsource(part) for part in (pixels.normalize, pixels.Normalizer)
    )
    bodies = [body for _, body in parts]
    text = "\n".join(
        [_TRANSFORM_HEADER, future, "", *others, "\n", _ERRORS + normalizer, "", *bodies]
    )
    return text.rstrip() + "\n"


def _build_function(called: str, arguments: Sequence[str]) -> str:
    return (
        "def build_model() -> nn.Module:\n"
        '    """Build the model with random weights."""\n'
        f"    return {called}({', '.join(arguments)})\n"
    )


def _split(module: ModuleType) -> tuple[list[str], str]:
    """Return the imports of a module, except from this package, and the rest of its source."""
    source = inspect.getsource(module)
    statements = ast.parse(source).body
    imports = list(_foreign_imports(statements))
    first = next(
        node for node in statements[1:] if not isinstance(node, ast.Import | ast.ImportFrom)
    )
    return imports, "\n".join(source.splitlines()[first.lineno - 1 :]) + "\n\n"


def _foreign_imports(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            yield ast.unparse(node)


def _merged(imports: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines sorted and without repetitions, with one `from` line per module."""
    lines = set[str]()
    names = dict[str, set[str]]()
    for line in itertools.chain.from_iterable(imports):
        if line.startswith("from "):
            module, _, listed = line.partition(" import ")
            names.setdefault(module, set()).update(listed.split(", "))
        else:
            lines.add(line)
    merged = [f"{module} import {', '.join(sorted(found))}" for module, found in names.items()]
    return sorted([*lines, *merged], key=_import_order)


def _import_order(line: str) -> tuple[bool, bool, bool, str]:
    return "__future__" not in line, "torch" in line, line.startswith("from"), line


def _spell(value: Any) -> str:
    """Return a value as Python source."""
    if isinstance(value, type):
        return value.__name__
    return json.dumps(value) if isinstance(value, str) else repr(value)
