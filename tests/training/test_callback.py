from __future__ import annotations

import inspect
import re

from accel_trainer.training.callback import Callback


def hooks() -> list[str]:
    return [name for name in vars(Callback) if name.startswith("on_")]


def test_a_callback_may_leave_out_every_hook_and_has_no_state() -> None:
    callback = Callback()
    for name in hooks():
        arguments = [None] * len(inspect.signature(getattr(callback, name)).parameters)
        assert getattr(callback, name)(*arguments) is None, name
    assert callback.state_dict() == {}
    callback.load_state_dict({})


def test_the_documentation_of_a_callback_names_its_hooks_in_their_order() -> None:
    assert re.findall(r"on_\w+", Callback.__doc__ or "") == hooks()
