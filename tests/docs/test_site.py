"""The documentation builds as a site that needs no network and has all pages and links."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, anchors_of
from .questions import QUESTIONS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")):
        pytest.skip("no mkdocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "true"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_on_the_site_and_in_its_menu(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs")
        assert (site / page.with_suffix(".html")).exists()
        assert f": {page.as_posix()}\n" in menu, f"name {page} in mkdocs.yml"


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(https?:[^"\s>]*)""")
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page.name
    # The search runs where the pages are files and scripts may not be fetched.
    index = (site / "search" / "search_index.js").read_text()
    assert "commands.html#sweep" in index
    assert 'src="assets/iframe-worker.js"' in (site / "index.html").read_text()
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?https?:", style.read_text()) == [], style.name


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    for page in set(site.rglob("*.html")) - {site / "404.html"}:
        for target in re.findall(r'<a\b[^>]*\bhref="([^"#:]+)(?:#[^"]*)?"', page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_old_address_of_a_page_leads_to_its_new_one(site: Path) -> None:
    moved = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))["MOVED"]
    for old in moved:
        (target,) = re.findall(r"url=([^\"]+)", (site / f"{old}.html").read_text())
        assert (site / target).exists(), old


def test_the_reference_shows_plain_types_and_names_short_flags(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert "Annotated" not in pages
    assert "Short flag: <code>--epochs</code>" in pages


def test_each_question_finds_its_answer_on_the_first_three_pages(site: Path) -> None:
    """This runs the site's own search, which lists pages, and the sections of each that match."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node, which runs the search of the site")
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.min.js")
    command = [
        node,
        Path(__file__).with_name("search.js"),
        worker,
        site / "search/search_index.json",
    ]
    asked = json.dumps(list(QUESTIONS))
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    hits = json.loads(done.stdout)
    missed = {
        question: hits[question][:3]
        for question, answer in QUESTIONS.items()
        if not any(address(answer) in sections for sections in hits[question][:3])
    }
    assert missed == {}


def test_the_answers_are_headings_of_the_pages() -> None:
    for answer in QUESTIONS.values():
        page, _, anchor = answer.partition("#")
        assert anchor in ["", *anchors_of(ROOT / "docs" / f"{page}.md")], answer


def address(answer: str) -> str:
    """Return the address on the site of `page#section`, or of a page from its beginning."""
    page, hash_sign, section = answer.partition("#")
    return f"{page}.html{hash_sign}{section}"
