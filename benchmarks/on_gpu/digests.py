"""What digests of the weights, the optimizer and the samples cost: each by itself, and a step with
and without them."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from accel_trainer.core.digest import digest_of, flatten

from .. import loops, results
from ..digests import WITH, WITHOUT
from .page import Page, Setting

NETS = ("tiny", "resnet20", "resnet18")
EVERY = 200  # the default of --trainer.digest-every-n-steps
# Steps of which at least one has a digest in the three quarters that are timed.
STEPS = {"tiny": 4000, "resnet20": 1000, "fast resnet18": 800}
TINY_STEPS = {"tiny": 400, "resnet8": 8, "fast resnet8": 8}
MAX_OF_STEP = 1.05


def run(page: Page, setting: Setting) -> None:
    for net in NETS[:2] if setting.is_tiny else NETS:
        page.attempt(f"a digest of {net}", partial(_time_digest, page, setting, net))
    num_steps = TINY_STEPS if setting.is_tiny else STEPS
    for model in setting.some(list(num_steps)):
        page.attempt(
            f"steps of {model}", partial(_compare_steps, page, setting, model, num_steps[model])
        )


def _time_digest(page: Page, setting: Setting, net: str) -> None:
    """Time digests of a net and its optimizer, whose tensors lie on the device."""
    model = loops.make_model(net).to(setting.device)
    optimizer = loops.make_optimizer(model)
    inputs = torch.randn(8, *loops.input_shape(net), device=setting.device)
    targets = torch.zeros(8, dtype=torch.long, device=setting.device)
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
    }
    times_ms = []
    for _ in range(3 if setting.is_tiny else 20):
        start_s = time.perf_counter()
        digest_of(state)
        times_ms.append(1000 * (time.perf_counter() - start_s))
    tensors = [leaf for leaf in flatten(state).values() if isinstance(leaf, torch.Tensor)]
    row = {
        "net": net,
        "MB": sum(tensor.nbytes for tensor in tensors) / 1e6,
        "tensors": len(tensors),
        "ms": statistics.median(times_ms),
        f"us per step, every {EVERY} steps": 1000 * statistics.median(times_ms) / EVERY,
    }
    page.add("A digest of the weights and the optimizer", row)


def _compare_steps(page: Page, setting: Setting, model: str, num_steps: int) -> None:
    measured = results.interleave(
        (WITH, WITHOUT),
        lambda loop: results.in_process("loops", loop, model, str(num_steps), setting.device),
        repeats=1 if setting.is_tiny else 3,
    )
    ratios = [
        one["mean_step_us"] / other["mean_step_us"]
        for one, other in zip(measured[WITH], measured[WITHOUT], strict=True)
    ]
    ratio = statistics.median(ratios)
    row = {
        "model": model,
        "steps": num_steps,
        "with, us": statistics.median(row["mean_step_us"] for row in measured[WITH]),
        "without, us": statistics.median(row["mean_step_us"] for row in measured[WITHOUT]),
        "ratio": ratio,
        "lowest": min(ratios),
        "highest": max(ratios),
        "n": len(ratios),
    }
    page.add(f"A step with a digest every {EVERY} steps, and one without", row)
    page.judge(
        f"with digests, a step of {model} takes {ratio:.2f} times as long, at most {MAX_OF_STEP}",
        holds=ratio <= MAX_OF_STEP,
    )
