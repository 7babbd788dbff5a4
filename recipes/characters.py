"""Train a character language model on Python's own documentation.

The loss is a mean over characters, not over samples.

python recipes/characters.py --epochs 3
"""

from pydoc_data.topics import topics

from accel_trainer import (
    Batch,
    DatasetOptions,
    RecipeConfig,
    RunResult,
    StepOutput,
    build_trainer,
    main,
    start_run,
)

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

PADDING = 0
MAX_LENGTH = 200


class CharacterModel(nn.Module):
    """Predicts the next byte: int64 [B, T] -> logits [B, T, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.gru = nn.GRU(32, 128, batch_first=True)
        self.head = nn.Linear(128, 128)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the character that follows each one."""
        hidden, _ = self.gru(self.embedding(characters))
        return self.head(hidden)


class NextCharacter:
    """Cross-entropy per character, without padding: B paragraphs of at most T characters."""

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the loss and the number of characters of each paragraph [B]."""
        logits = model(batch.inputs)
        losses = F.cross_entropy(
            logits.transpose(1, 2),
            batch.targets,
            ignore_index=PADDING,
            reduction="none",
        )
        return StepOutput(losses.sum(1), num_items=(batch.targets != PADDING).sum(1))


def read_paragraphs() -> list[Tensor]:
    """Return the longer paragraphs of Python's help pages, int64 [T], T <= MAX_LENGTH."""
    paragraphs = [part.strip() for page in topics.values() for part in page.split("\n\n")]
    encoded = [text.encode("ascii", "ignore") for text in paragraphs if len(text) > 20]
    return [torch.tensor(list(text)[:MAX_LENGTH]) for text in encoded]


def collate(paragraphs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad to the longest paragraph of the micro-batch: inputs and targets, int64 [B, T]."""
    padded = pad_sequence(paragraphs, batch_first=True, padding_value=PADDING)
    return padded[:, :-1], padded[:, 1:]


def train(config: RecipeConfig) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    paragraphs = read_paragraphs()
    with start_run(config, recipe="characters") as run:
        trainer = build_trainer(
            run,
            model=CharacterModel(),
            task=NextCharacter(),
            train_set=paragraphs[500:],
            eval_sets=paragraphs[:500],
            options=DatasetOptions(collate=collate),
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
