"""Flags of HF Trainer, Lightning, timm, torchvision, Ultralytics and the launchers, and their names here."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_PROCESSES = "the launcher makes the processes: accelerate launch --multi_gpu --num_processes N RECIPE"
_DEVICE = "a GPU is found by itself: CUDA_VISIBLE_DEVICES chooses one, ACCELERATE_USE_CPU=true takes the CPU"
_SHARDING = "the launcher chooses it: accelerate launch --config_file accelerate_configs/fsdp.yaml RECIPE"
_SIZE = "images keep the size that they have: save them smaller or larger first"

# Our flag, perhaps with a value, or advice; and its names elsewhere.
_NAMES = {
    "--lr": "learning-rate base-lr init-lr lr0 blr",
    "--optimizer.name": "opt optim optimizer",
    "--optimizer.weight-decay": "weight-decay wd",
    "--optimizer.momentum": "momentum",
    "--optimizer.betas": "betas opt-betas adam-beta1 adam-beta2",
    "--optimizer.eps": "opt-eps adam-epsilon",
    "--schedule.shape": "sched scheduler lr-scheduler lr-scheduler-type cos-lr",
    "--schedule.warmup-epochs": "warmup warmup-epochs warmup-steps warmup-ratio num-warmup-steps lr-warmup-epochs",
    "--schedule.min-fraction": "min-lr lr-min lrf",
    "--schedule.milestones": "milestones decay-milestones lr-steps decay-epochs",
    "--schedule.gamma": "gamma lr-gamma decay-rate",
    "--epochs": "num-train-epochs num-epochs max-epochs n-epochs",
    "--max-steps": "max-train-steps max-iters iterations",
    "--trainer.max-grad-norm": "clip-grad clip-grad-norm grad-clip max-grad-norm gradient-clip-val",
    "--trainer.evaluate-every-n-epochs": "eval-steps eval-strategy val-interval check-val-every-n-epoch",
    "--trainer.log-every-n-steps": "logging-steps log-interval log-every-n-steps print-freq",
    "--trainer.monitor": "monitor eval-metric metric-for-best-model",
    "--trainer.patience": "patience early-stopping-patience",
    "--ema": "model-ema model-ema-decay ema-decay",
    "--batch-size": "b batch bs train-batch-size per-device-train-batch-size micro-batch-size",
    "--batch.eval-batch-size": "eval-batch-size val-batch-size validation-batch-size per-device-eval-batch-size",
    "--accumulate": "gradient-accumulation-steps accumulate-grad-batches grad-accum-steps accum-iter",
    "--fit-batch": "auto-find-batch-size auto-scale-batch-size",
    "--batch.num-workers": "j workers num-workers dataloader-num-workers",
    "--checkpoint-every-n-steps": "save-steps save-interval save-freq every-n-train-steps",
    "--checkpoint.keep-last-n": "save-total-limit checkpoint-hist save-top-k",
    "--mixed-precision bf16": "amp use-amp bf16 autocast",
    "--mixed-precision fp16": "fp16 half",
    "--mixed-precision": "precision amp-dtype",
    "--runtime.tf32": "tf32",
    "--runtime.loss-scale": "loss-scale init-scale initial-scale-power",
    "--runtime.sync-batch-norm": "sync-bn sync-batchnorm",
    "--runtime.channels-last": "channels-last",
    "--runtime.deterministic": "deterministic use-deterministic-algorithms",
    "--runtime.find-unused-parameters": "find-unused-parameters ddp-find-unused-parameters",
    "--runtime.backend": "backend dist-backend ddp-backend",
    "--runtime.timeout-s": "ddp-timeout",
    "--compile": "torchcompile torch-compile",
    "--output-dir": "output out-dir save-dir logdir log-dir work-dir default-root-dir project",
    "--resume": "resume-from resume-from-checkpoint ckpt-path",
    "--init-from": "pretrained weights finetune initial-checkpoint",
    "--track": "report-to logger log-wandb wandb",
    "--dry-run": "fast-dev-run",
    "--epochs 0": "evaluate eval-only test-only",
    "--quiet": "disable-tqdm silent",
    "--profile": "profiler",
    "--seed": "manual-seed random-seed",
    "--dataset": "data data-dir data-path dataset-name train-dir root",
    "--model": "a arch net model-name",
    "--model.dropout": "drop dropout",
    "--model.activation-checkpointing": "gradient-checkpointing grad-checkpointing activation-checkpointing",
    "--augment.mixup": "mixup mixup-alpha",
    "--augment.cutmix": "cutmix cutmix-alpha",
    "--augment.cutout": "cutout reprob random-erase",
    "--augment.flip": "hflip fliplr",
    "--task.label-smoothing": "smoothing label-smoothing label-smoothing-factor",
    _PROCESSES: "world-size nproc-per-node num-processes nnodes num-nodes num-gpus n-gpus ngpus gpus devices ddp "
    "distributed multi-gpu strategy rank dist-url",
    _DEVICE: "device gpu gpu-id gpu-ids cuda no-cuda cpu use-cpu accelerator mps",
    _SHARDING: "fsdp deepspeed zero-stage",
    _SIZE: "img-size imgsz image-size input-size resize crop-size train-crop-size",
}
FAMILIAR = {name: here for here, names in _NAMES.items() for name in names.split()}


def find_familiar(flag: str, known: Collection[str]) -> str | None:
    """Return what to use instead of another toolkit's `flag`, if that is `known`; None for any other flag."""
    here = FAMILIAR.get(flag.lstrip("-").replace("_", "-").lower()) if flag.startswith("-") else None
    if here is None or not here.startswith("--"):
        return here
    return f"did you mean {here}?" if here.split()[0] in known else "see --help"


def suggest(name: str, known: Collection[str]) -> str:
    """Return what to use instead of an unknown name: our name of another toolkit's flag, or the nearest name."""
    if familiar := find_familiar(name, known):
        return familiar
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else "see --help"
