"""The documentation is whole: each page is in the index and in the site's navigation, links lead to what exists, and
pages that are made from the code are what is made from it now."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from caraserve.cli.options import OptionParser
from caraserve.config import KEEP_ALIVE_S, SERVE_CONFIGS, HttpConfig
from scripts import options_page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINKING = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "scripts").rglob("*.md"))]
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"[`*]|\[([^\]]*)\]\([^)]*\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def pages_of(navigation: Any) -> Iterator[str]:
    """Yields the files of a navigation of mkdocs, in its order."""
    for entry in navigation:
        if isinstance(entry, str):
            yield entry
        else:
            for inside in entry.values():
                yield from pages_of(inside)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page: its headings as GitHub writes them, and those that it names itself."""
    text = FENCE.sub("", text_of(page))
    found: set[str] = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", MARKED.sub(lambda mark: mark[1] or "", heading).lower())
        slug = words.strip().replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found


def test_every_page_is_in_the_index_and_in_the_navigation_in_one_order() -> None:
    listed = [link for link in LINK.findall(text_of(DOCS / "index.md")) if "/" not in link]
    navigation = list(pages_of(yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"]))
    assert navigation == ["index.md", *listed]
    assert sorted(navigation) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_have_as_many_cells_in_every_row_and_references_have_their_link(page: Path) -> None:
    text = FENCE.sub("", text_of(page))
    for table in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        assert len({row.replace("\\|", "").count("|") for row in table.splitlines()}) == 1, table
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert used == set(re.findall(r"^\[([\w-]+)\]: http", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_yaml_and_json_can_be_read(page: Path) -> None:
    readers = {"yaml": yaml.safe_load, "json": json.loads}
    for language, text in FENCE.findall(text_of(page)):
        if language in readers:
            readers[language](text)


def test_the_proxies_of_the_checklist_close_idle_connections_before_the_server_and_take_its_bodies() -> None:
    text = text_of(DOCS / "production.md")
    settings = re.findall(
        r"keepalive_timeout (\d+)s;|keepalive (\d+)s$|options: {idle_timeout: (\d+)s}", text, re.MULTILINE
    )
    times_s = [int(value) for found in settings for value in found if value]
    assert len(times_s) == 3
    assert max(times_s) < KEEP_ALIVE_S
    assert f"client_max_body_size {HttpConfig().max_body_bytes >> 20}m;" in text


def test_the_reference_of_options_is_what_the_options_say() -> None:
    """`python -m scripts.options_page` writes the page."""
    assert text_of(options_page.PAGE) == options_page.options_page()


def test_the_file_of_options_that_the_reference_shows_is_read(tmp_path: Path) -> None:
    (shown,) = [text for language, text in FENCE.findall(text_of(options_page.PAGE)) if language == "yaml"]
    (tmp_path / "options.yaml").write_text(shown, encoding="utf-8")
    args = OptionParser(SERVE_CONFIGS).parse_args(["--config", str(tmp_path / "options.yaml")])
    assert [module.name for module in args.lora_modules] == ["sql", "legal"]
    assert args.max_host_adapters_bytes == 16 << 30
