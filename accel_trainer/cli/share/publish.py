"""Uploads a folder to the Hugging Face hub. Each error is one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import OutputError


def create_repository(name: str) -> None:
    """Create the repository as private if it does not exist, and check that it is writable.

    Raises:
        OutputError: the name is invalid, the user is not logged in, or there is no network.
    """
    from huggingface_hub import HfApi

    with _one_line_errors(name):
        HfApi(token=True).create_repo(name, private=True, exist_ok=True)


def upload(folder: Path, name: str) -> str:
    """Commit the files in `folder` to the repository and return the URL of the commit."""
    from huggingface_hub import HfApi

    with _one_line_errors(name):
        return str(HfApi(token=True).upload_folder(repo_id=name, folder_path=folder))


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    fixes = {
        HFValidationError: "give it as ORG/NAME",
        LocalTokenNotFoundError: "log in with `hf auth login`",
    }
    try:
        yield
    except Exception as error:  # network errors depend on the version of the hub's HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        otherwise = "check the network and what your token may write, or export --to a folder"
        fix = fixes.get(type(error), otherwise)
        raise OutputError("HUB", f"--hub {name}: {reason}: {fix}") from error
