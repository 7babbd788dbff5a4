"""Whose code raised an error: the user's, whose frames alone are then shown, or this package's."""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from types import FrameType

import torch.distributed as dist

from .errors import ExitCode, UserError

_NAMES = """
PIL accelerate datasets huggingface_hub jinja2 matplotlib numpy onnxruntime pandas psutil pyarrow safetensors simplejpeg
sklearn timm torch tqdm tyro yaml
aiohttp fsspec httpcore httpx requests urllib3
aim clearml comet_ml dvclive mlflow swanlab tensorboard trackio wandb
"""
LIBRARIES = frozenset(_NAMES.split())
"""Packages that this one calls, by itself or through another: an error raised in one of them
belongs to its caller."""

_OURS = __name__.partition(".")[0]
_OTHERS = LIBRARIES | sys.stdlib_module_names | {_OURS}
_MAX_LENGTH = 300


class PartFailed(Exception):
    """A part that users can bring failed: the message names it, `__cause__` is its error."""


class PeerFailed(PartFailed):
    """A part failed on another process, whose own error says why."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another process is gone, has failed or does not answer.

    gloo has no type for that: it raises a RuntimeError that names a file of its sources (torch
    2.13).
    """
    is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_gloos or isinstance(error, (PeerFailed, dist.DistError))


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a process that `error` ends."""
    if isinstance(error, UserError):
        return ExitCode(error.exit_code)
    return ExitCode.INTERNAL if find_user_code(error) is None else ExitCode.USER_CODE


def describe_error(error: BaseException) -> str:
    """Return an error in one line, with the place if it is in the user's code."""
    if isinstance(error, UserError):
        return str(error.args[0])
    text = str(error) if isinstance(error, PartFailed) else f"{type(error).__name__}: {error}"
    text = textwrap.shorten(text, _MAX_LENGTH, placeholder=" ...")
    place = find_user_code(error)
    return text if place is None else f"{text}, {place}"


def print_error(error: BaseException) -> None:
    """Print the traceback of an error; of one in the user's code without the frames of all other code."""
    shown = traceback.TracebackException.from_exception(error)
    if find_user_code(error) is not None:
        error = _cause(error)
        shown = traceback.TracebackException.from_exception(error)
        _drop_other_frames(shown, error)
        vars(shown)["__notes__"] = None  # what `failures_reported` adds is printed last
    sys.stderr.writelines(shown.format())


def find_user_code(error: BaseException) -> str | None:
    """Return where the user's code raised `error`, such as `at train.py:12 in forward`; None if it did not.

    The user's code is what belongs neither to this package nor to Python or `LIBRARIES`. A layer of
    torch that fails in a forward, and a backward that fails, are the user's model.
    """
    model: str | None = None
    for frame, line in reversed(list(traceback.walk_tb(_cause(error).__traceback__))):
        package = _package(frame)
        if package not in _OTHERS:
            path = frame.f_code.co_filename.removeprefix(f"{os.getcwd()}{os.sep}")
            return f"at {path}:{line} in {frame.f_code.co_name}"
        if package == _OURS:
            # mypy checks our own calls
            if isinstance(_cause(error), TypeError) and "() " in str(error):
                return "as accel_trainer calls it"
            return None if is_lost_peer(error) else model or None
        if model is None:
            model = _find_model(frame)
    return None


def _find_model(frame: FrameType) -> str | None:
    """Return the part of the model that a frame of torch runs; nothing if it runs a collective, None if neither."""
    module = str(frame.f_globals.get("__name__"))
    if module.startswith(("torch.distributed", "torch.nn.parallel")):
        return ""
    if frame.f_code.co_name == "_call_impl":
        return f"in {type(frame.f_locals.get('self')).__name__} of the model"
    return "in the backward of the loss" if module == "torch.autograd.graph" else None


def _cause(error: BaseException) -> BaseException:
    """Return the error itself of a part that failed."""
    return (
        error.__cause__ if isinstance(error, PartFailed) and error.__cause__ is not None else error
    )


def _package(frame: FrameType) -> str:
    """Return the top-level package of the code, also of one that is run as `__main__`."""
    return str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__")).partition(
        "."
    )[0]


def _drop_other_frames(shown: traceback.TracebackException, error: BaseException) -> None:
    """Keep the user's frames of an error and of those that led to it."""
    frames = zip(shown.stack, traceback.walk_tb(error.__traceback__), strict=False)
    shown.stack[:] = [line for line, (frame, _) in frames if _package(frame) not in _OTHERS]
    for link in ("__cause__", "__context__"):
        if (earlier := getattr(shown, link)) is not None:
            _drop_other_frames(earlier, getattr(error, link))
