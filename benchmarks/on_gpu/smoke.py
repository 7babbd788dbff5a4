"""What decides whether the rest is worth its time: losses like a CPU's in every precision,
and a killed run that resumes to the same bits."""

from __future__ import annotations

import math
import tempfile
from functools import partial
from pathlib import Path

from . import checks, exact
from .page import Page, Setting
from .runs import SMALL, rows, train


def run(page: Page, setting: Setting) -> None:
    num_steps = 8 if setting.is_tiny else 400  # 20 are over before a kill
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bf16 = ("--mixed-precision", "bf16")
        page.attempt_together(
            {
                "first steps": partial(checks.compare_first_steps, page, setting, folder),
                "killed and resumed": partial(
                    exact.compare, page, setting, folder / "killed", "bf16", bf16, num_steps
                ),
                **{
                    precision: partial(_train_in, page, setting, folder, precision)
                    for precision in (("bf16",) if setting.device == "cpu" else ("bf16", "fp16"))
                },
            }
        )


def _train_in(page: Page, setting: Setting, folder: Path, precision: str) -> None:
    flags = ("--max-steps", "20", "--lr", "0.01", "--trainer.log-every-n-steps", "1")
    train(setting, folder / precision, *SMALL, *flags, "--mixed-precision", precision)
    losses = rows(folder / precision, "train/loss")
    page.add("20 steps", {"precision": precision, "first loss": losses[0], "last": losses[-1]})
    page.judge(f"20 losses in {precision} are finite", holds=all(map(math.isfinite, losses)))
