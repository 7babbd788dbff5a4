"""Writes `docs/reference/faults.md` from the docstrings of the tests that show what happens.

A paragraph `Fault (Disk): no space at any write -> a warning, and training continues` is a row.
`python -m tests.docs.faults_page` writes the page.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .pages import GENERATED, ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
TESTS = ROOT / "tests"
TOP = f"""# Faults and their tests

{GENERATED}python -m tests.docs.faults_page -->
What happens after each fault, from the docstring of a test that shows it. An error is one line on
stderr: what is wrong, where, and how to fix it.
"""
SECTIONS = (
    "Crash during a save",
    "Disk",
    "Corruption",
    "Malice",
    "Resume",
    "Signals and processes",
    "Numbers",
    "Data, config and users' code",
    "Sharded checkpoints",
)
_FAULT = re.compile(r"Fault \((.+?)\): (.+?) -> (.+)")


def faults_of(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield section, fault, what happens and the test, for each fault that a file names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if match := _FAULT.fullmatch(" ".join(paragraph.split())):
                    name = f"`{path.relative_to(TESTS)}::{node.name}`"
                    yield match[1], match[2], match[3], name


def page() -> str:
    """Return the page."""
    rows = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for section, fault, result, test in faults_of(path):
            rows[section].append(f"| {fault} | {result} | {test} |\n")
    assert set(rows) <= set(SECTIONS), set(rows) - set(SECTIONS)
    tables = [
        f"\n## {section}\n\n| fault | what happens | shown by |\n|---|---|---|\n"
        + "".join(rows[section])
        for section in SECTIONS
    ]
    return TOP + "".join(tables)


if __name__ == "__main__":
    PAGE.write_text(page())
