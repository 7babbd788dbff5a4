from __future__ import annotations

import random
import re
from collections.abc import Iterator

from accel_trainer.cli.flags.typed_words import refuse_misread_words
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.yaml_files import parse_yaml


def typed_words() -> Iterator[str]:
    """Yield words as people type them: numbers, switches, times, dates, versions."""
    yield from ("yes", "no", "on", "off", "Yes", "NO", "y", "n", "true", "FALSE", "null", "~")
    yield from ("2026-01-01", "2026-1-1 10:30:00", "1:30", "12:30:45", "-1:30.5", "1_000", "1_0.5")
    generator = random.Random(0)
    for _ in range(300):
        number = generator.choice([generator.randrange(5000), generator.uniform(-3, 3)])
        text = generator.choice(
            ["{}", "0{}", "00{}", "+{}", "-{}", "{}e3", "{}:30", "1_{}", "{:e}"]
        )
        yield text.format(number)


def test_a_word_is_read_as_typed_or_refused() -> None:
    num_refused = 0
    for word in typed_words():
        value = parse_yaml(f"a: {word}")["a"]
        for text in (f"a: '{word}'", f"a: '{word}'\nb: [x, {{c: {word}}}]", f"{word}: 1"):
            try:
                refuse_misread_words(text, source="run.yaml")
                is_refused = False
            except ConfigError as error:
                is_refused = True
                line = text.count("\n") + 1
                assert f"run.yaml: line {line}: YAML reads {word} as {value!r}: " in str(error)  # noqa: PT017
            if text.endswith("'"):
                assert not is_refused, "a text in quotes is what was typed"
            elif isinstance(value, bool):
                assert is_refused == (word.lower() != str(value).lower()), word
            elif isinstance(value, int | float):
                is_same = re.fullmatch(r"[-+\d.e]+", word) and float(word) == value
                assert is_refused == (not is_same), word
            else:
                assert is_refused == (value is not None and value != word), word
            num_refused += is_refused
    assert num_refused > 100
