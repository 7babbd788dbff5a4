"""Words of a YAML file that YAML 1.1 reads differently from what people mean by them."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ...core.errors import ConfigError

# Octal and sexagesimal numbers, `1_000`, switches, dates.
_MISREAD = re.compile(r"[-+]?0[0-7]+|.*[_:].*|yes|no|on|off|.*\d-\d.*", re.IGNORECASE)
_MAX_SHOWN = 80  # letters
_TEXT = "tag:yaml.org,2002:str"


def refuse_misread_words(text: str, *, source: str) -> None:
    """Raise ConfigError for a word outside quotes that is read differently, such as 017 as 15.

    `text` is YAML; errors name it by `source`.
    """
    loader: Any = yaml.SafeLoader(text)
    while loader.check_event():
        event: Any = loader.get_event()
        if type(event) is not yaml.ScalarEvent or event.style is not None:
            continue
        tag = event.tag or loader.resolve(yaml.ScalarNode, event.value, (True, False))
        if tag != _TEXT and _MISREAD.fullmatch(event.value):
            # Python refuses to print a number of thousands of digits.
            is_long = len(event.value) > _MAX_SHOWN
            value = "a number" if is_long else repr(yaml.safe_load(f"[{event.value}]")[0])
            line = event.start_mark.line + 1  # type: ignore[union-attr]  # of a text
            raise ConfigError(
                "CONFIG",
                f"{source}: line {line}: YAML reads {event.value[:_MAX_SHOWN]} as {value}: "
                "put text in quotes, and write numbers as 1000 and switches as true or false",
            )
