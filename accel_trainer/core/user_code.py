"""Whether an error comes from the user's code; if so, only the user's frames are shown."""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from types import FrameType

import torch.distributed as dist

from .errors import ExitCode, OneLineError, PartFailed, PeerFailed

_NAMES = """
PIL accelerate datasets huggingface_hub jinja2 matplotlib numpy onnxruntime pandas psutil pyarrow
safetensors simplejpeg sklearn timm torch tqdm tyro yaml
aiohttp fsspec httpcore httpx requests urllib3 xxhash
aim clearml comet_ml dvclive mlflow swanlab tensorboard trackio wandb
"""
LIBRARIES = frozenset(_NAMES.split())
"""Packages that this one calls, directly or through another: an error raised in one of them
belongs to its caller."""

_THIS_PACKAGE = __name__.partition(".")[0]
_NOT_USER_CODE = LIBRARIES | sys.stdlib_module_names | {_THIS_PACKAGE}
_MAX_LENGTH = 300


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another process is gone, has failed or does not answer.

    gloo has no exception type for that: it raises a RuntimeError that names one of its source files
    (torch 2.13).
    """
    cause = _cause(error)
    is_from_gloo = isinstance(cause, RuntimeError) and "gloo" in str(cause)
    return is_from_gloo or isinstance(cause, dist.DistError) or isinstance(error, PeerFailed)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for a process that `error` ends."""
    if isinstance(error, OneLineError):
        return ExitCode(error.exit_code)
    return ExitCode.INTERNAL if find_user_code(error) is None else ExitCode.USER_CODE


def describe_error(error: BaseException) -> str:
    """Return an error in one line, with its place if it comes from the user's code."""
    if isinstance(error, OneLineError):
        return error.message
    text = str(error) if isinstance(error, PartFailed) else f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text = f"exit({error.code or 0}) before the run's end: the same command continues it"
    text = textwrap.shorten(text, _MAX_LENGTH, placeholder=" ...")
    if isinstance(error, AttributeError) and _THIS_PACKAGE in type(error.obj).__module__:
        from ..names.unknown import attribute_here  # few programs fail

        text += attribute_here(error.name)
    place = find_user_code(error)
    return text if place is None else f"{text}, {place}"


def print_error(error: BaseException) -> None:
    """Print the traceback of an error; if it comes from the user's code, only the user's frames."""
    shown = traceback.TracebackException.from_exception(error)
    if find_user_code(error) is not None:
        error = _cause(error)
        shown = traceback.TracebackException.from_exception(error)
        _drop_other_frames(shown, error)
        vars(shown)["__notes__"] = None  # `failures_reported` prints what it has added last.
    sys.stderr.writelines(shown.format())


def find_user_code(error: BaseException) -> str | None:
    """Return where the user's code raised `error`, such as `at train.py:12 in forward`, or None.

    The user's code is all code outside this package, Python and `LIBRARIES`. A torch layer that
    fails in a forward, and a backward that fails, count as the user's model.
    """
    model: str | None = None
    for frame, line in reversed(list(traceback.walk_tb(_cause(error).__traceback__))):
        package = _package(frame)
        if package not in _NOT_USER_CODE:
            path = frame.f_code.co_filename.removeprefix(f"{os.getcwd()}{os.sep}")
            return f"at {path}:{line} in {frame.f_code.co_name}"
        # A method that `dataclass` wrote fails for its caller, who assigned to a frozen field.
        if package == _THIS_PACKAGE and frame.f_code.co_filename != "<string>":
            # mypy checks calls within this package: the signature of the user's function is wrong.
            if isinstance(_cause(error), TypeError) and "() " in str(error):
                return "as accel_trainer calls it"
            return None if is_lost_peer(error) else model
        if model is None:
            model = _find_model(frame)
    return None


def _find_model(frame: FrameType) -> str | None:
    """Return the part of the model that a frame of torch runs, or None."""
    if frame.f_code.co_name == "_call_impl":
        return f"in {type(frame.f_locals.get('self')).__name__} of the model"
    is_backward = frame.f_globals.get("__name__") == "torch.autograd.graph"
    return "in the backward of the loss" if is_backward else None


def _cause(error: BaseException) -> BaseException:
    """Return the original error of a PartFailed, and any other error itself."""
    if isinstance(error, PartFailed) and error.__cause__ is not None:
        return error.__cause__
    return error


def _package(frame: FrameType) -> str:
    """Return the top-level package of a frame's code, even if it runs as `__main__`."""
    name = frame.f_globals.get("__package__") or frame.f_globals.get("__name__")
    return str(name).partition(".")[0]


def _drop_other_frames(shown: traceback.TracebackException, error: BaseException) -> None:
    """Keep only the user's frames, of `error` and of the errors that led to it."""
    frames = zip(shown.stack, traceback.walk_tb(error.__traceback__), strict=False)
    shown.stack[:] = [line for line, (frame, _) in frames if _package(frame) not in _NOT_USER_CODE]
    for link in ("__cause__", "__context__"):
        if (earlier := getattr(shown, link)) is not None:
            _drop_other_frames(earlier, getattr(error, link))
