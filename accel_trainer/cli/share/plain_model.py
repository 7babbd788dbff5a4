"""Writes a model as one file of plain torch: the source of its modules and a function that builds it."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from ...vision.models import blocks
from ...vision.models.timm_nets import PREFIX
from ...vision.models.zoo import model_call
from ...vision.pretrained import ExportConfig

_HEADER = '"""The architecture of model.safetensors beside this file. Needs only torch."""\n'


def write_source(config: ExportConfig) -> str:
    """Return a Python file with `build_model() -> nn.Module`."""
    assert config.model is not None
    if config.model.name.startswith(PREFIX):
        arguments = [repr(config.model.name.removeprefix(PREFIX)), "pretrained=False"]
        arguments += [f"num_classes={len(config.class_names)}", f"in_chans={config.in_channels}"]
        header = _HEADER.replace("only torch", "torch and timm")
        return f"{header}\nimport timm\nfrom torch import nn\n\n\n{_build_function('timm.create_model', arguments)}"
    call = model_call(
        config.model,
        in_channels=config.in_channels,
        num_classes=len(config.class_names),
        image_size=config.image_size,
    )
    modules = [blocks, sys.modules[call.func.__module__]]
    imports, bodies = zip(*(_split(module) for module in modules), strict=True)
    future, *others = sorted({line for lines in imports for line in lines}, key=_import_order)
    arguments = [_spell(value) for value in call.args]
    arguments += [f"{name}={_spell(value)}" for name, value in call.keywords.items()]
    build = _build_function(call.func.__name__, arguments)
    return "\n".join([_HEADER, future, "", *others, "\n", *bodies, build])


def _build_function(called: str, arguments: Sequence[str]) -> str:
    return (
        "def build_model() -> nn.Module:\n"
        '    """Build the model with random weights."""\n'
        f"    return {called}({', '.join(arguments)})\n"
    )


def _split(module: ModuleType) -> tuple[list[str], str]:
    """Return the imports of a module, except from our package, and the rest of its source."""
    source = inspect.getsource(module)
    statements = ast.parse(source).body
    imports = list(_outside(statements))
    first = next(node for node in statements[1:] if not isinstance(node, ast.Import | ast.ImportFrom))
    return imports, "\n".join(source.splitlines()[first.lineno - 1 :]) + "\n\n"


def _outside(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            yield ast.unparse(node)


def _import_order(line: str) -> tuple[bool, bool, bool, str]:
    return "__future__" not in line, "torch" in line, line.startswith("from"), line


def _spell(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else json.dumps(value) if isinstance(value, str) else repr(value)
