"""Train a character language model on Python's own documentation: the loss is a mean over characters, not samples.

python recipes/characters.py --epochs 3
"""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from accel_trainer import (
    Batch,
    EvalOutput,
    MeanLoss,
    RecipeConfig,
    RunResult,
    StepOutput,
    build_dataset_loaders,
    build_trainer,
    main,
    start_run,
)

PADDING, MAX_LENGTH = 0, 200


class CharacterModel(nn.Module):
    """Predicts the next byte: int64 [B, T] -> logits [B, T, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.head = (
            nn.Embedding(128, 32),
            nn.GRU(32, 128, batch_first=True),
            nn.Linear(128, 128),
        )

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the character after each one."""
        return self.head(self.gru(self.embedding(characters))[0])


class NextCharacter:
    """Cross-entropy per character that is no padding; B paragraphs of at most T characters."""

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the loss summed over the characters, and their number."""
        losses, _, num_items = self.eval_step(model, batch)
        return StepOutput(losses.sum(), num_items=num_items.sum())

    def eval_step(self, model: nn.Module, batch: Batch) -> EvalOutput:
        """Return the loss and the number of characters of each paragraph [B]."""
        logits = model(batch.inputs)
        losses = F.cross_entropy(
            logits.transpose(1, 2), batch.targets, ignore_index=PADDING, reduction="none"
        )
        return EvalOutput(losses.sum(1), losses, num_items=(batch.targets != PADDING).sum(1))


def collate(paragraphs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad to the longest paragraph of the micro-batch: inputs and targets, int64 [B, T]."""
    padded = pad_sequence(paragraphs, batch_first=True, padding_value=PADDING)
    return padded[:, :-1], padded[:, 1:]


def train(config: RecipeConfig) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    texts = [part.strip() for text in topics.values() for part in text.split("\n\n")]
    encoded = [
        torch.tensor(list(text.encode("ascii", "ignore"))[:MAX_LENGTH])
        for text in texts
        if len(text) > 20
    ]
    with start_run(config, recipe="characters") as run:
        loader, eval_loader = build_dataset_loaders(
            encoded[500:],
            encoded[:500],
            run.config.batch,
            seed=config.seed,
            accelerator=run.accelerator,
            collate=collate,
        )
        model, task, metrics = CharacterModel(), NextCharacter(), [MeanLoss()]
        return build_trainer(
            run, model=model, task=task, loader=loader, eval_loader=eval_loader, metrics=metrics
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig, description=__doc__.splitlines()[0])
