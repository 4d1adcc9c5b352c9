"""The documentation: every block of code on its pages is run, or says why not; every flag on them exists."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reader import Failed, Reader, Servers
from snippets import PAGES, ROOT, RUN, Block, anchors, blocks_of, faults, inline_code, links

sys.path.insert(0, str(ROOT / "tools"))
import flags_page

QUICK = ("README.md", "quickstart.md")
"""Pages whose blocks are run by ``make test``; the others' by ``make test-slow``."""


OF_OTHERS = {
    "--cache-reuse", "--chat-template-file", "--grammar", "--jinja", "--mlock", "--no-mmap",
    "--reasoning-budget", "--reasoning-format", "--slot-save-path",
}  # fmt: skip
"""Flags of other engines, beside which the pages set plait's."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.end()


def _params() -> list:
    return [
        pytest.param(page, id=page.name, marks=[] if page.name in QUICK else [pytest.mark.slow])
        for page in PAGES
        if any(block.mark is None and block.language in RUN for block in blocks_of(page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_can_be_run_or_say_why_not(page: Path) -> None:
    assert [fault for block in blocks_of(page) for fault in faults(block)] == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", _params())
def test_blocks_do_what_the_page_says(page: Path, servers: Servers, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.mark is None and block.language in RUN]
    without = [block for block in blocks if _wants_node(block) and shutil.which("npm") is None]
    reader = Reader(tmp_path, servers)
    try:
        if any("pip install" in block.text for block in blocks):
            reader.installs()
        for block in blocks:
            if block not in without:
                reader.read(block)
    finally:
        reader.end()
    if without:
        pytest.skip(f"there is no npm here; left out: {', '.join(map(str, without))}")


def _wants_node(block: Block) -> bool:
    return block.language == "javascript" or block.text.startswith("npm ")


def test_the_page_of_flags_is_what_the_commands_say() -> None:
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.page(), "`make docs` writes it anew"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != flags_page.PAGE], ids=lambda page: page.name
)
def test_flags_on_pages_exist(page: Path) -> None:
    scripts = "".join(script.read_text(encoding="utf-8") for script in (ROOT / "benchmarks").glob("*.py"))
    own = {"--help", *FLAG.findall(flags_page.page()), *FLAG.findall(scripts)}
    assert {flag for code in inline_code(page) for flag in FLAG.findall(code)} <= own | OF_OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, section = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not section or section in anchors(target), link


def page_of(folder: Path, text: str) -> Block:
    """The one block of a page that is made of ``text``."""
    (folder / "page.md").write_text(text)
    [block] = blocks_of(folder / "page.md")
    return block


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("```bash\nls\n```", None),
        ("```text\n/v1 | paths\n```", None),
        ("<!-- not run: installs -->\n```\nmake\n```", None),
        ("<!-- not run: too hard -->\n```bash\nls\n```", "too hard"),
        ("<!-- not run: installs -->\n\nwords\n\n```\nls\n```", "without a language"),
        ("```sh\nls\n```", "nobody runs sh"),
        ("```text\n$ ls\n```", "looks like a command"),
        ("```text\nplait serve x\n```", "looks like a command"),
    ],
)
def test_what_is_wrong_with_a_block(tmp_path: Path, text: str, word: str | None) -> None:
    found = faults(page_of(tmp_path, text))
    assert found == [] if word is None else word in found[0]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("```bash\ntrue\n```", None),
        ("```bash\nfalse\ntrue\n```", "exit code 1"),
        ("```bash\nfalse | cat\n```", "exit code 1"),
        ("```bash\nplait serve model --no-such-flag\n```", "No such option: --no-such-flag"),
        ("```console\n$ echo a b\na b\n$ printf '%s\\n' \\\n> one two\none\n...wo\n```", None),
        ("```console\n$ echo a\nb\n```", "what came is\na"),
        ("```console\n$ echo ab\na\n```", "what came is\nab"),
        ("```python\nassert 1 + 1 == 2\n```", None),
        ("```python\nassert 1 + 1 == 3\n```", "line 2"),
        ("```python\nprint('said')\nraise SystemExit(0)\n```", "said"),
        ("```json\n{'a': 1}\n```", "Expecting property name"),
        ("```bash\ncurl http://127.0.0.1:8000/v1/models\n```", "no server listens on port 8000"),
    ],
)
def test_a_block_that_does_not_work_is_seen(tmp_path: Path, text: str, word: str | None) -> None:
    block, reader = page_of(tmp_path, text), Reader(tmp_path, Servers())
    try:
        if word is None:
            reader.read(block)
        else:
            with pytest.raises((Failed, ValueError)) as seen:
                reader.read(block)
            assert word in str(seen.value)
    finally:
        reader.end()
