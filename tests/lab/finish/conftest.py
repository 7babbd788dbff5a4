"""Runs of the recipe of the commands that train a part of a run again."""

from tests.lab.replay.conftest import train_poisoned

__all__ = ["train_poisoned"]
