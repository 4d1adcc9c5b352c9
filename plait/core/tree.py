"""The tree of cached prefixes as plain data, for people who look into a cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from plait.core.cache import Cache
from plait.core.index import Node

SHOWN_TOKENS = 32
"""Tokens of a branch that are shown, from its start."""


@dataclass(slots=True)
class Branch:
    """A run of pages without a fork, a snapshot or a leaf inside it. Positions are in tokens."""

    parent: int | None
    """place of the branch before it in the list; None at the start of a prompt"""
    start: int
    end: int
    tokens: list[int]
    """the first of them"""
    requests: int
    """running requests that hold its last page"""
    snapshot: str | None = None
    """kind of the snapshot at its end"""
    snapshot_hits: int = 0
    leaves: list[int] = field(default_factory=list)
    """positions of the leaves behind it"""
    last_used: int = 0
    """by a clock that ticks with each use of the cache"""


def branches(cache: Cache, most: int) -> list[Branch]:
    """The tree, each branch behind the one it goes on from; at most ``most``, the latest used first."""
    below: dict[bytes | None, list[Node]] = {}
    for node in cache.index.nodes.values():
        below.setdefault(node.parent.key if node.parent else None, []).append(node)
    found: list[Branch] = []
    open_ends: list[tuple[int | None, Node]] = [(None, node) for node in _latest_last(below.get(None, []))]
    while open_ends and len(found) < most:
        parent, first = open_ends.pop()
        last, tokens = first, array("I", first.tokens)
        while _goes_on(cache, last, below):
            [last] = below[last.key]
            if len(tokens) < SHOWN_TOKENS:
                tokens.extend(array("I", last.tokens))
        found.append(_branch(cache, parent, first, last, tokens.tolist()[:SHOWN_TOKENS]))
        open_ends += [(len(found) - 1, node) for node in _latest_last(below.get(last.key, []))]
    return found


def _latest_last(nodes: list[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.used)


def _goes_on(cache: Cache, node: Node, below: dict[bytes | None, list[Node]]) -> bool:
    """Whether the next page belongs to the same branch."""
    if len(below.get(node.key, ())) != 1 or node.snapshot is not None or node.key in cache.index.leaves:
        return False
    return below[node.key][0].page.refs == node.page.refs


def _branch(cache: Cache, parent: int | None, first: Node, last: Node, tokens: list[int]) -> Branch:
    size = cache.geometry.page_size
    end = last.depth * size
    return Branch(
        parent=parent,
        start=(first.depth - 1) * size,
        end=end,
        tokens=tokens,
        requests=last.page.refs - last.page.readers,
        snapshot=None if last.snapshot is None else last.snapshot_kind.name.lower(),
        snapshot_hits=last.snapshot_hits,
        leaves=[end + leaf.length for leaf in cache.index.leaves.get(last.key, ())],
        last_used=last.used,
    )
