"""Writes `docs/reference/flags.md` from the `--help-all` of a recipe, with flags of other toolkits.

`python -m tests.docs.flags_page` writes the page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from accel_trainer import ConfigError, parse_config
from recipes import images

from .commands import shown
from .pages import GENERATED, ROOT

PAGE = ROOT / "docs" / "reference" / "flags.md"
TOP = f"""# Flags

{GENERATED}python -m tests.docs.flags_page -->
The flags of `recipes/images.py`, as `--help-all` prints them; `--help` lists those with a short
name. Each setting has the same nested name on the command line (`--optimizer.weight-decay`), in
YAML (`--config FILE`) and in Python. All but `model`, `augment`, `photos` and `task` work with
every recipe, including your own. In Python, settings of every recipe whose flag is one word are
keywords, instead of a config: `start_run(recipe="digits", epochs=20, lr=0.1, batch_size=32)`.
Editors complete them, and mypy knows their types.
"""
OTHERS = """
## Flags of other toolkits

If you type one of these flags and it is not also ours, the error names ours before any work.

"""
TYPED = {
    "HF Trainer": (
        "--learning_rate 1e-3",
        "--weight_decay 0.01",
        "--num_train_epochs 3",
        "--max_steps 100",
        "--per_device_train_batch_size 8",
        "--per_device_eval_batch_size 8",
        "--gradient_accumulation_steps 4",
        "--warmup_ratio 0.1",
        "--lr_scheduler_type cosine",
        "--optim adamw_torch",
        "--bf16",
        "--max_grad_norm 1",
        "--save_steps 500",
        "--resume_from_checkpoint last",
        "--report_to wandb",
    ),
    "Lightning": (
        "--max_epochs 10",
        "--max_steps 100",
        "--accelerator gpu",
        "--devices 4",
        "--strategy ddp",
        "--num_nodes 2",
        "--precision bf16-mixed",
        "--accumulate_grad_batches 4",
        "--gradient_clip_val 1",
        "--check_val_every_n_epoch 1",
        "--log_every_n_steps 50",
        "--default_root_dir runs",
        "--ckpt_path last",
        "--fast_dev_run",
        "--trainer.max_epochs 10",
    ),
    "timm": (
        "--opt adamw",
        "--lr 1e-3",
        "--weight-decay 0.05",
        "--sched cosine",
        "--warmup-epochs 5",
        "--min-lr 1e-5",
        "--smoothing 0.1",
        "--mixup 0.2",
        "--reprob 0.25",
        "--model-ema",
        "--amp",
        "--clip-grad 1",
        "--workers 8",
        "--img-size 224",
        "--aa rand-m9",
    ),
    "Ultralytics": (
        "--imgsz 640",
        "--batch 16",
        "--lr0 0.01",
        "--lrf 0.01",
        "--cos_lr",
        "--epochs 100",
        "--weight_decay 0.0005",
        "--warmup_epochs 3",
        "--device 0",
        "--workers 8",
        "--project runs",
        "--patience 50",
        "--optimizer SGD",
        "--pretrained",
        "--half",
    ),
}


# A recipe takes the flag, which means something else there.
DIFFERENT = {
    "--max_steps 100": "`--steps 100`; `--max-steps` stops there, on the schedule of the epochs"
}


def answer(typed: str) -> str:
    """Return what a recipe says to a flag: that it works, ours, or advice."""
    if typed in DIFFERENT:
        return DIFFERENT[typed]
    try:
        parse_config(images.Config, typed.split(), description="")
    except ConfigError as error:
        said = str(error).partition(": ")[2].partition(": ")[2]
        ours = said.removeprefix("did you mean ").removesuffix("?")
        flag, _, unit = ours.partition(" (")
        return said if said == ours else f"`{flag}` ({unit}" if unit else f"`{flag}`"
    return "works"


def table() -> str:
    """Return a row for each flag."""
    rows = [
        f"| {toolkit} | `{typed}` | {answer(typed)} |\n"
        for toolkit, everything in TYPED.items()
        for typed in everything
    ]
    return "".join(["| from | you type | here |\n|---|---|---|\n", *rows])


def options() -> Iterator[str]:
    """Yield a line for each heading and each flag that `--help-all` prints."""
    printed = shown(lambda: parse_config(images.Config, ["--help-all"], description=""))
    for group in re.split(r"^ (?=(?:.* )?options +$)", printed, flags=re.MULTILINE)[1:]:
        title = group.partition("options")[0].strip() or "the recipe"
        yield f"\n## {title}\n\n| flag | meaning |\n|---|---|\n"
        for entry in re.split(r"^  (?=-)(?!-h|---)", group, flags=re.MULTILINE)[1:]:
            flags, *text = entry.replace("{None}|", "").replace("|", " or ").splitlines()
            names = "`, `".join(re.split(r", (?=--)", flags.strip()))
            yield f"| `{names}` | {' '.join(' '.join(text).split())} |\n"


def page() -> str:
    """Return the page."""
    return "".join([TOP, *options(), OTHERS, table()])


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    PAGE.write_text(page())
