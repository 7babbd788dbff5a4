"""Exactness on a GPU: equal runs, runs that are killed and resumed, splits of a batch, and who
lacks what kernel."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from accel_trainer.distributed.determinism import choose_kernels, nondeterminism_named, prepare_cuda
from accel_trainer.vision import ModelConfig, build_model

from .. import results
from . import copies
from .checks import list_warnings
from .page import Page, Setting
from .runs import SMALL, hashes, kill_and_resume, train

CASES: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bf16": ("--mixed-precision", "bf16"),
    "fp16": ("--mixed-precision", "fp16"),
    "AdamW": ("--optimizer.name", "adamw"),
    "without workers": ("--batch.num-workers", "0"),
    "EMA and clipping": ("--ema", "0.99", "--trainer.max-grad-norm", "1"),
    "compiled": ("--compile",),
    "compiled, bf16": ("--compile", "--mixed-precision", "bf16"),
}
OURS = ("resnet18", "resnet50", "airbench94")
TIMM = (
    *(
        "resnet50",
        "resnext50_32x4d",
        "efficientnet_b0",
        "mobilenetv3_small_100",
        "convnext_atto",
        "regnety_002",
    ),
    *(
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "mixer_s32_224",
    ),
    *(
        "densenet121",
        "vgg11_bn",
        "xception41",
        "inception_v3",
        "nfnet_f0",
        "resnetv2_50",
        "seresnet18",
        "coatnet_0_224",
    ),
    *("poolformer_s12", "maxvit_tiny_tf_224"),
)


def run(page: Page, setting: Setting) -> None:
    for model in setting.some(OURS):
        make = partial(build_model, ModelConfig(name=model), in_channels=3, num_classes=10)
        page.attempt(model, partial(_name_operations, page, setting, model, make))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_steps = 8 if setting.is_tiny else 400
        checks = {
            "warnings": partial(list_warnings, page, setting, folder),
            "--reduce exact": partial(_split, page, setting, folder, num_steps),
            "checkpoints while it trains": partial(
                _save_in_training, page, setting, folder, num_steps
            ),
        }
        for case in reversed(setting.some(list(CASES))):  # what takes longest begins first
            if case == "fp16" and setting.device == "cpu":
                continue  # refused: it needs a GPU
            own = folder / case.replace(" ", "-")
            checks[case] = partial(compare, page, setting, own, case, CASES[case], num_steps)
        page.attempt_together(checks)
    page.attempt("pixels that are copied late", partial(copies.compare_pixels, page, setting))
    for model in setting.some(TIMM):
        page.attempt(
            f"timm {model}",
            partial(_name_operations, page, setting, f"timm/{model}", partial(_timm, model)),
        )
    page.attempt(
        "segmentation", partial(_name_operations, page, setting, "segmentation", _segmentation)
    )
    page.attempt(
        "text",
        partial(_name_operations, page, setting, "a transformer for text", _text, is_text=True),
    )


def compare(
    page: Page, setting: Setting, folder: Path, case: str, flags: tuple[str, ...], num_steps: int
) -> None:
    """Train twice, and once killed in the middle: the tensors of the last checkpoint must be the
    same."""
    folder.mkdir()
    steps = (*SMALL, "--max-steps", str(num_steps), *flags)
    with ThreadPoolExecutor(1 if setting.is_tiny else 3) as pool:
        twice = [pool.submit(train, setting, folder / name, *steps) for name in ("one", "two")]
        killed_at = pool.submit(
            kill_and_resume, setting, folder / "killed", *steps, at_step=num_steps // 2
        ).result()
    for training in twice:
        training.result()
    one, two, killed = (hashes(folder / name) for name in ("one", "two", "killed"))
    page.add(
        f"{num_steps} steps, twice and killed in the middle",
        {
            "run": case,
            "two runs equal": one == two,
            "killed after the checkpoint of": killed_at,
            "killed and resumed equal": one == killed,
        },
    )
    page.judge(
        f"{case}: the same bits in two runs and after a SIGKILL",
        holds=one == two == killed and killed_at is not None,
    )


def _save_in_training(page: Page, setting: Setting, folder: Path, num_steps: int) -> None:
    """Compare a checkpoint that was written while training went on with that of a run that had
    ended there."""
    flags = (*SMALL, "--schedule.shape", "constant", "--ema", "0.99")
    kept = (
        "--checkpoint.every-n-steps",
        "1",
        "--checkpoint.keep-every-n-steps",
        str(num_steps // 2),
    )
    train(setting, folder / "going-on", *flags, *kept, "--max-steps", str(num_steps))
    train(setting, folder / "at-rest", *flags, "--max-steps", str(num_steps // 2))
    going_on, at_rest = hashes(folder / "going-on", step=num_steps // 2), hashes(folder / "at-rest")
    row = {"step": num_steps // 2, "files": len(at_rest), "equal": going_on == at_rest}
    page.add("A checkpoint of a run that trains on, and of one that ended", row)
    page.judge(
        "a checkpoint saved during training has the bytes of one saved at rest",
        holds=going_on == at_rest,
    )


def _split(page: Page, setting: Setting, folder: Path, num_steps: int) -> None:
    """The same parts of a batch on 1, 2 and 4 processes that share the device; the last step of an
    epoch is short."""
    hashes_of = set()
    for num_processes in (1, 2) if setting.is_tiny else (1, 2, 4):
        name = folder / f"split-{num_processes}"
        flags = (
            "--model",
            "resnet8",
            "--seed",
            "0",
            "--quiet",
            "--reduce",
            "exact",
            "--global-batch-size",
            "96",
        )
        more = ("--batch-size", "24", "--max-steps", str(num_steps))
        share = ("--runtime.backend", "gloo") if num_processes > 1 else ()
        environ = {"ACCELERATE_USE_CPU": "true"} if setting.device == "cpu" else {}
        train(setting, name, *flags, *more, *share, num_processes=num_processes, environ=environ)
        hashes_of.add(hashes(name)["model.safetensors"])
        row = {
            "processes": num_processes,
            "SHA-256 of the weights": hashes(name)["model.safetensors"][:16],
        }
        page.add("--reduce exact, a batch of 4 x 24, processes on one device", row)
    page.judge(
        "--reduce exact: the same bits on any number of processes", holds=len(hashes_of) == 1
    )


def _timm(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10)
    return model


def _segmentation() -> nn.Module:
    """Return a net whose classes [B, 10, H, W] are enlarged to the pixels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 10, 1)),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )


def _text() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 10))


def _name_operations(
    page: Page, setting: Setting, name: str, make: Callable[[], nn.Module], *, is_text: bool = False
) -> None:
    """Take a step under deterministic kernels, and list the operations that have none."""
    torch.manual_seed(0)
    prepare_cuda()
    choose_kernels(True)
    model = make().to(setting.device)
    size = 299 if "inception" in name else 224
    shape = (2, 3, 32, 32) if name in ("airbench94", "resnet18") else (2, 3, size, size)
    inputs = torch.randint(0, 100, (2, 16)) if is_text else torch.randn(shape)
    with nondeterminism_named() as operations:
        outputs = model(inputs.to(setting.device))
        logits = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).float()
        if logits.ndim == 4:  # a class for each pixel
            F.cross_entropy(logits, logits.argmax(1)).backward()
        else:
            logits.square().mean().backward()
    row: results.Row = {
        "net": name,
        "without a deterministic kernel": ", ".join(sorted(operations)) or "none",
    }
    page.add("Operations without a deterministic kernel", row)
