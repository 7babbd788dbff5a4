"""Builds the site from the repository's files.

README.md is the first page, and files that pages link to are copied. Links are written for the
repository; this module converts them to links of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "benchmarks/README.md": "benchmarks.md",
}
# Pages that are gone, and where their text is now.
MOVED = {
    "commands": "reference/commands",
    "flags": "reference/flags",
    "reference": "reference/api",
    "multi_node": "launching",
    "slurm": "launching",
    "notebooks": "launching",
    "trackers": "callbacks",
    "collectives": "step",
    "accelerate": "coming_from",
    "how_do_i": "index",
    "faults": "reference/faults",
    "large_batches": "batches",
    "why": "why_runs_differ",
    "tutorial": "own_model",
}
# How much a page counts in the search: guides before lists, and both before records.
_SEARCH_BOOST = {
    "reference/commands.md": 0.5,
    "reference/flags.md": 0.5,
    "reference/promises.md": 0.1,
    "reference/faults.md": 0.1,
    "changes.md": 0.1,
    "benchmarks.md": 0.1,
    "contributing.md": 0.1,
}
_API_BOOST = 0.2
# The search completes each word, so `in` finds `interpolation`: it leaves these out of a question.
_SMALL_WORDS = "a an and are by can do does for from how i in is it my of on or the to what with"
_LINK = re.compile(r"""(?<=\]\()[^)\s]+(?=\))|(?<=src=")[^"]+|(?<=srcset=")[^"]+""")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and the files that pages link to."""
    for path, page in _PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for name in ("extra.css", "iframe-worker.js"):
        source = str(ROOT / "docs/site" / name)
        files.append(File.generated(config, f"assets/{name}", abs_src_path=source))
    for page in files.documentation_pages():
        for target in _LINK.findall(page.content_string):
            path = _in_repository(target, page.src_uri)
            if not path:
                continue
            on_site = _on_site(path)
            if not on_site.endswith(".md") and not files.get_file_from_path(on_site):
                files.append(File.generated(config, on_site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Convert links between files of the repository to links of the site."""
    is_api = "\n::: " in markdown
    if boost := _SEARCH_BOOST.get(page.file.src_uri, _API_BOOST if is_api else None):
        page.meta["search"] = {"boost": boost}

    def linked(match: re.Match[str]) -> str:
        path = _in_repository(match[0], page.file.src_uri)
        if not path:
            return match[0]
        on_site = posixpath.relpath(_on_site(path), posixpath.dirname(page.file.src_uri) or ".")
        _, hash_sign, anchor = match[0].partition("#")
        return on_site + hash_sign + anchor

    return _LINK.sub(linked, markdown)


def on_post_build(config: Any) -> None:
    """Let old addresses lead on, and the search know the words that people search for."""
    _write_moved(Path(config["site_dir"]))
    _leave_small_words_out(Path(config["site_dir"]))
    _count_synonyms_as_headings(Path(config["site_dir"], "search"))


def _write_moved(site: Path) -> None:
    for old, new in MOVED.items():
        page = (
            f'<meta http-equiv="refresh" content="0; url={new}.html"><a href="{new}.html">{new}</a>'
        )
        (site / f"{old}.html").write_text(page + "\n", encoding="utf-8")


def _leave_small_words_out(site: Path) -> None:
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    script, found = re.subn(
        r"\bsearch\((\w)\)\{",
        r"\g<0>let kept=\1.split(/\\s+/).filter(w=>!SMALL.includes(w.toLowerCase()));"
        r"if(kept.length)\1=kept.join(' ');",
        worker.read_text(encoding="utf-8"),
    )
    if found != 1:
        raise ValueError(f"{worker.name} has {found} functions called search")
    small = f"const SMALL={_SMALL_WORDS.split()};"
    worker.write_text(small + script, encoding="utf-8")


def synonyms() -> dict[str, str]:
    """Return the words that people search for, by `page` or `page#heading`."""
    text = Path(__file__).with_name("synonyms.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^\[(.+)\]\n((?:.+\n)+)", text, re.MULTILINE))


def _count_synonyms_as_headings(folder: Path) -> None:
    """Make synonyms tags of their sections, which the search has besides headings."""
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    index["config"]["fields"]["tags"]["boost"] = 2 * index["config"]["fields"]["title"]["boost"]
    sections = {section["location"]: section for section in index["docs"]}
    for answer, words in synonyms().items():
        page, hash_sign, heading = answer.partition("#")
        section = sections[f"{page}.html{hash_sign}{heading}"]
        section["tags"] = sorted(set(re.findall(r"[^\s,()/-]+", words.lower())))
    text = json.dumps(index)
    (folder / "search_index.json").write_text(text, encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {text}", encoding="utf-8")


def _in_repository(target: str, page: str) -> str | None:
    """Return the path in the repository of a link's target on `page`; None for other links."""
    name = target.partition("#")[0]
    if not name or re.match(r"\w+:", name):
        return None
    source = next((path for path, other in _PAGES.items() if other == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), name))


def _on_site(path: str) -> str:
    """Return the path on the site of a file of the repository.

    Sources get the suffix .txt, so that browsers show them.
    """
    if path in _PAGES:
        return _PAGES[path]
    inside = path.removeprefix("docs/")
    return inside if inside != path else f"source/{path}.txt"
