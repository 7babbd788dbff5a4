"""What an evaluation costs beyond the model's forward: loss and accuracy of 10,000 samples, in
batches of 500."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import (
    Batch,
    ClassificationTask,
    Evaluator,
    MeanLoss,
    Metric,
    TopKAccuracy,
    run_evaluation,
)

from . import results

NUM_SAMPLES, BATCH_SIZE = 10_000, 500
RESOLUTION_US = time.get_clock_info("thread_time").resolution * 1e6
LOCAL_METRIC = '''
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """The accuracy metric of the hub, without the network."""

    def _info(self):
        labels = datasets.Value("int32")
        return evaluate.MetricInfo(
            description="",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": labels, "references": labels}),
        )

    def _compute(self, predictions, references):
        from sklearn.metrics import accuracy_score

        return {"accuracy": float(accuracy_score(references, predictions))}
'''


class Shards:
    """The same ready-made batches, for our evaluator."""

    num_samples = NUM_SAMPLES

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        parts = (part.split(BATCH_SIZE) for part in (inputs, targets, torch.arange(NUM_SAMPLES)))
        self._batches = [Batch(*part) for part in zip(*parts, strict=True)]

    def batches(self) -> Iterator[Batch]:
        return iter(self._batches)


def make_ways(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the evaluations to compare, and a bare forward; each returns the accuracy."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 32, generator=generator)
    targets = torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(32, 10).eval()
    batches = list(zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True))
    shards, task = Shards(inputs, targets), ClassificationTask()

    def ours(*metrics: Metric) -> Callable[[], Any]:
        evaluator = Evaluator(shards, task=task, metrics=metrics, accelerator=accelerator)
        return lambda: run_evaluation(evaluator, model, accelerator)["accuracy"]

    prepared = accelerator.prepare(
        DataLoader(TensorDataset(inputs, targets), batch_size=BATCH_SIZE)
    )

    @torch.inference_mode()
    def bare() -> Any:
        for images, labels in batches:
            F.cross_entropy(model(images), labels)

    @torch.inference_mode()
    def gathered(loader: Any) -> Any:
        """Gather and read both numbers for each batch."""
        hits, losses = 0, 0.0
        for images, labels in loader:
            logits = model(images)
            loss = F.cross_entropy(logits, labels, reduction="none")
            predictions, references, loss = accelerator.gather_for_metrics(
                (logits.argmax(1), labels, loss)
            )
            hits += int((predictions == references).sum().item())
            losses += loss.sum().item()
        return hits / NUM_SAMPLES

    ways = {
        "bare forward and loss": bare,
        "ours": ours(MeanLoss(), TopKAccuracy()),
        "ours, accuracy only": ours(TopKAccuracy()),
        "gather_for_metrics per batch": lambda: gathered(batches),
        "the same, accelerate's loader": lambda: gathered(prepared),
    }
    try:
        import evaluate
    except ImportError:
        return ways
    script = folder / "local_accuracy.py"
    script.write_text(LOCAL_METRIC)
    metric = evaluate.load(str(script), cache_dir=str(folder))

    @torch.inference_mode()
    def add_batch() -> Any:
        for images, labels in batches:
            logits = model(images)
            F.cross_entropy(logits, labels)
            predictions, references = accelerator.gather_for_metrics((logits.argmax(1), labels))
            metric.add_batch(predictions=predictions, references=references)
        return metric.compute()["accuracy"]

    return ways | {"evaluate's add_batch, accuracy only": add_batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = results.environment()
    with tempfile.TemporaryDirectory() as folder:
        ways = make_ways(Path(folder))
        accuracies = {way() for name, way in ways.items() if name != "bare forward and loss"}
        if len(accuracies) != 1:
            raise RuntimeError(f"the ways disagree: {accuracies}")

        def measure(name: str) -> results.Row:
            start = time.thread_time()
            ways[name]()
            return {"us": (time.thread_time() - start) * 1e6 * BATCH_SIZE / NUM_SAMPLES}

        measured = {
            name: [row["us"] for row in rows]
            for name, rows in results.interleave(
                list(ways), measure, repeats=options.repeats
            ).items()
        }
    costs = {name: sorted(samples)[len(samples) // 10] for name, samples in measured.items()}
    bare = costs["bare forward and loss"]
    # Noise can put a way below the bare forward: it then costs less than the clock resolves.
    beyond = {name: max(RESOLUTION_US, cost - bare) for name, cost in costs.items()}
    rows = [
        {
            "evaluation": name,
            "us/batch": costs[name],
            "lowest": min(samples),
            "highest": max(samples),
            "us beyond the forward": beyond[name],
            "of ours": beyond[name] / beyond["ours"],
            "n": len(samples),
            "samples": samples,
        }
        for name, samples in measured.items()
    ]
    goals = [
        "Ours needs one collective and one host sync per evaluation, whatever its length. With "
        "one process on a CPU neither costs anything, so gathering every batch is as cheap. "
        "All variants give the same accuracy."
    ]
    if (others := beyond.get("evaluate's add_batch, accuracy only")) is not None:
        alone, both = (others / beyond[name] for name in ("ours, accuracy only", "ours"))
        goals.append(
            f"At most 1/30 of evaluate's add_batch: 1/{alone:.0f}, and 1/{both:.0f} with the loss."
        )
    results.write(
        "evaluation",
        title="Evaluation",
        how="Loss and accuracy of Linear(32, 10) on one thread. CPU time of the thread, measured "
        "in interleaved rounds; the lower decile of n evaluations, because other load and a "
        "lower clock rate can only add time.",
        tables={"One process on a CPU": rows},
        goals=goals,
        started=started,
    )


if __name__ == "__main__":
    main()
