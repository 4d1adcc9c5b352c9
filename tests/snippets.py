"""The code on the pages of the documentation: found, and run as a reader of the page would."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

REASONS = {
    "installs": "it makes an environment, or changes one",
    "another program": "of another engine, or an agent: it is not there where the tests run",
    "needs a GPU": "",
    "needs Docker": "",
    "needs a download": "of a model of gigabytes",
    "takes long": "minutes or more: a benchmark, or the test suite itself",
    "a file": "its own text is read by something else",
}
"""Why a block may be left out: the word in the page's comment, and what it means."""

_MARK = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Args:
        line: where its first line of code stands in the page, from 1.
        mark: why it is not run, if the comment above it says so.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, mark = [], None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            said = _MARK.fullmatch(token.content.strip())
            mark = said[1] if said else None
        elif token.type == "fence":
            assert token.map is not None
            language = token.info.strip()
            found.append(Block(page, token.map[0] + 2, language, token.content, mark))
            mark = None
        elif token.level == 0:
            mark = None
    return found


def inline_code(page: Path) -> list[str]:
    """Code in the sentences and tables of a page."""
    tokens = MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
    inside = [child for token in tokens for child in token.children or ()]
    return [child.content for child in inside if child.type == "code_inline"]


def links(page: Path) -> list[str]:
    """Where a page's links lead, as they are written."""
    tokens = MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
    inside = [child for token in tokens for child in token.children or ()]
    return [str(child.attrs["href"]) for child in inside if child.type == "link_open"]


def anchors(page: Path) -> set[str]:
    """The names of a page's sections, as links have them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def faults(block: Block) -> list[str]:
    """What is wrong with the block as it is written; empty: it can be run, or says why not."""
    if block.mark is not None:
        return [] if block.mark in REASONS else [f"{block}: {block.mark!r} is none of {list(REASONS)}"]
    if block.language not in (*RUN, "text"):
        return [f"{block}: nobody runs {block.language or 'a block without a language'}"]
    if block.language == "text" and (command := _COMMAND.search(block.text)):
        return [f"{block}: {command[0].strip()!r} looks like a command: it must be run"]
    return []


RUN = ("bash", "console", "python", "javascript", "json", "toml", "yaml")
_COMMAND = re.compile(r"^\s*(\$ |plait |curl |pip |python |make |export |import |from )", re.MULTILINE)


def same_output(shown: str, came: str) -> bool:
    """Whether a command wrote what the page shows; ``...`` stands for anything."""
    parts = map(re.escape, re.split(r"\.\.\.", shown.strip()))
    return re.fullmatch(r".*?".join(parts), came.strip(), re.DOTALL) is not None


def commands_of(console: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output shown below it. What begins with ``> `` goes
    on."""
    commands: list[tuple[str, str]] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], ""))
            continue
        command, shown = commands.pop()
        if not shown and line.startswith("> "):
            commands.append((f"{command}\n{line[2:]}", shown))
        else:
            commands.append((command, f"{shown}{line}\n"))
    return commands
