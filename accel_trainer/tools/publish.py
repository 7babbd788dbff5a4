"""A folder as a repository of the HuggingFace hub. Whatever goes wrong there is one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError


def create_repository(name: str) -> None:
    """Make sure that the repository exists and may be written; a new one is private.

    Raises:
        OutputError: the name is none, nobody is logged in, or there is no network.
    """
    from huggingface_hub import HfApi

    with _told(name):
        HfApi(token=True).create_repo(name, private=True, exist_ok=True)


def upload(folder: Path, name: str) -> str:
    """Commit the files in `folder` to the repository and return the address of the commit."""
    from huggingface_hub import HfApi

    with _told(name):
        return str(HfApi(token=True).upload_folder(repo_id=name, folder_path=folder))


@contextmanager
def _told(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    fixes = {
        HFValidationError: "give it as ORG/NAME",
        LocalTokenNotFoundError: "log in with `hf auth login`",
    }
    try:
        yield
    except Exception as error:  # of the network: those of the hub's HTTP library, another one in each version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        fix = fixes.get(type(error), "check the network and what your token may write, or export --to a folder")
        raise OutputError("HUB", f"--hub {name}: {reason}: {fix}") from error
