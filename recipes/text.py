"""Classify documentation as numpy's, torch's or scikit-learn's with a small transformer.

The texts are of any length; a batch is padded to its longest text.

python recipes/text.py    # needs transformers; downloads nothing
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer import (
    Batch,
    DatasetOptions,
    MeanLoss,
    OptimizerConfig,
    RecipeConfig,
    RunResult,
    StepOutput,
    TopKAccuracy,
    WholeSetMetric,
    build_trainer,
    main,
    start_run,
)

import numpy as np
import sklearn.metrics
import torch
from torch import nn

try:
    import evaluate
    import transformers as hf
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
except ImportError as missing:
    raise SystemExit(
        f"recipes/text.py needs {missing.name}: pip install 'accel-trainer[hf]'"
    ) from None

LIBRARIES = (np, torch, sklearn.metrics)
VOCABULARY = 2000
MAX_TOKENS = 64


@dataclass(frozen=True)
class Config(RecipeConfig):
    """The settings of every recipe, with AdamW."""

    optimizer: OptimizerConfig = OptimizerConfig(name="adamw")


class TextTask:
    """Classification by a model of `transformers`: it takes a dict, its output has `logits`."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] and the logits [B, K]."""
        logits = model(**batch.inputs).logits
        losses = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        return StepOutput(losses, logits)


def read_documentation() -> Dataset:
    """Return the docstrings of the libraries as a table of `text` and `library`."""
    found = set()
    for label, library in enumerate(LIBRARIES):
        for member in list(vars(library).values()):
            if callable(member) and (text := inspect.getdoc(member)):
                found.add((text, label))
    texts, labels = zip(*sorted(found), strict=True)
    return Dataset.from_dict({"text": texts, "library": labels})


def make_tokenizer(texts: Sequence[str]) -> hf.PreTrainedTokenizerFast:
    """Return a tokenizer for the most frequent words of `texts`."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator(texts, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        model_max_length=MAX_TOKENS,
    )


def make_model() -> nn.Module:
    """Return a small DistilBERT with random weights."""
    size = hf.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=64,
        hidden_dim=128,
        n_layers=2,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=len(LIBRARIES),
    )
    return hf.DistilBertForSequenceClassification(size)


class Collator:
    """Turns a list of (text, label) into tokens, padded to the longest text, and labels."""

    def __init__(self, tokenizer: hf.PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def __call__(self, samples: list[tuple[str, int]]) -> tuple[Any, torch.Tensor]:
        """Return the tokens as a dict of int64 [B, T], and the labels [B]."""
        texts, labels = zip(*samples, strict=True)
        tokens = self._tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
        return dict(tokens), torch.tensor(labels)


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    parts = read_documentation().train_test_split(test_size=0.5, seed=0)
    tokenizer = make_tokenizer(parts["train"]["text"])
    metric = evaluate.load(str(Path(__file__).parent / "metrics/macro_f1.py"))

    def macro_f1(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return metric.compute(predictions=logits.argmax(1).numpy(), references=labels.numpy())

    with start_run(config, recipe="text") as run:
        trainer = build_trainer(
            run,
            model=make_model(),
            task=TextTask(),
            train_set=parts["train"],
            eval_sets=parts["test"],
            options=DatasetOptions(columns=("text", "library"), collate=Collator(tokenizer)),
            metrics=[
                WholeSetMetric(macro_f1, len(LIBRARIES), higher_is_better={"macro_f1": True}),
                TopKAccuracy(),
                MeanLoss(),
            ],
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
