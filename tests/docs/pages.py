"""The documentation pages and their fenced blocks, links and headings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")]
PAGES = [page for page in PAGES if page.exists()] + sorted((ROOT / "docs").rglob("*.md"))

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (not run|run with|output|files)(?:: (.+?))? -->\n *\Z")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block. An HTML comment right above it says how to test it.

    `<!-- not run: needs a GPU -->` bash: the commands and their flags are checked, nothing is run.
    `<!-- run with: --epochs 1 -->` bash: run, with flags that make its recipes short.
    `<!-- output -->` text: the output of the last block, ignoring numbers.
    `<!-- files: runs/* -->` text: files that exist in that folder.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str | None
    argument: str

    def __str__(self) -> str:
        return f"{page_name(self.page)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The name of the file that a Python block is, from its first line: `# flowers.py`."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match and self.language == "python" else None

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, one per line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        above = text[: match.start()]
        mark = _MARK.search(above)
        yield Block(
            page=page,
            line=above.count("\n") + 1,
            language=match[2],
            text=textwrap.dedent(match[3]),
            mark=mark[1] if mark else None,
            argument=(mark[2] or "") if mark else "",
        )


def prose_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links_of(page: Path) -> list[str]:
    """Return the targets of links and images of a page, except web addresses."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) + re.findall(r'src="([^"]+)"', prose_of(page))
    return [target for target in targets if not re.match(r"(https?|mailto):", target)]


def anchors_of(page: Path) -> Sequence[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
