"""timm on a machine where torchvision's wheel does not load beside a CPU build of torch.

The wheel on PyPI is built for CUDA: its operators do not load, and it registers shapes for two of
them when it is imported. Declaring the two is enough: no timm model calls them. Where they do load,
another declaration would abort the interpreter, so it is imported first.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import library


def import_timm() -> Any:
    """Return timm; skip the test if it is not installed."""
    try:
        pytest.importorskip("torchvision")
    except RuntimeError:  # an operator that does not exist
        for name in ("nms", "qnms"):
            library.define(
                f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            )
        import torchvision  # noqa: F401
    return pytest.importorskip("timm")
