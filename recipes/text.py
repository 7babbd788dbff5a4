"""Classify documentation as numpy's, torch's or scikit-learn's with a small transformer.

The texts are of any length; a batch is padded to its longest text.

python recipes/text.py --optimizer.name adamw --epochs 10    # needs transformers; downloads nothing
"""

import inspect

import numpy as np
import sklearn.metrics
import torch
from torch import nn

from accel_trainer import (
    Batch,
    MeanLoss,
    RecipeConfig,
    RunResult,
    StepOutput,
    TopKAccuracy,
    build_dataset_loaders,
    build_trainer,
    main,
    start_run,
)

try:
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
except ImportError as missing:
    raise SystemExit(f"recipes/text.py needs {missing.name}: pip install transformers") from None

LIBRARIES = (np, torch, sklearn.metrics)
VOCABULARY = 2000
MAX_TOKENS = 64


class TextTask:
    """Classification by a model of `transformers`: it takes a dict, its output has `logits`."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cross-entropies [B] and the logits [B, K]."""
        logits = model(**batch.inputs).logits
        losses = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        return StepOutput(losses, logits)


def read_documentation() -> list[tuple[str, int]]:
    """Return the docstrings of the libraries, each with the number of its library, sorted."""
    found = set()
    for label, library in enumerate(LIBRARIES):
        for member in list(vars(library).values()):
            if callable(member) and (text := inspect.getdoc(member)):
                found.add((text, label))
    return sorted(found)


def make_tokenizer(texts: list[str]) -> hf.PreTrainedTokenizerFast:
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


def train(config: RecipeConfig) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    texts = read_documentation()
    tokenizer = make_tokenizer([text for text, _ in texts[::2]])
    samples = [{**tokenizer(text, truncation=True), "labels": label} for text, label in texts]
    with start_run(config, recipe="text") as run:
        loader, eval_loader = build_dataset_loaders(
            samples[::2],
            samples[1::2],
            run.config.batch,
            seed=config.seed,
            accelerator=run.accelerator,
            collate=hf.DataCollatorWithPadding(tokenizer),
        )
        trainer = build_trainer(
            run,
            model=make_model(),
            task=TextTask(),
            train_set=loader,
            eval_sets=eval_loader,
            metrics=[TopKAccuracy(), MeanLoss()],
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, RecipeConfig, description=__doc__.splitlines()[0])
