"""What the tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.checkpoint import loading


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RETRY_DELAYS_S", ())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
