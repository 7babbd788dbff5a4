"""timm on a machine where torchvision's wheel does not load beside a CPU build of torch.

The wheel on PyPI is built for CUDA: its operators do not load, and it registers shapes for two of them when it is
imported. Declaring the two is enough: no timm model calls them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library


def import_timm() -> Any:
    """Return timm; skip the test if it is not installed."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    pytest.importorskip("torchvision")
    return pytest.importorskip("timm")
