"""The prefix index: finds the pages and snapshots of a known prefix.

A node stands for one full page under one exact prefix. Its key hashes its parent's key and its own
tokens; the chain starts from the numerics id and the caller's salt. The tokens themselves are compared
after the hash, so that a collision is a miss and never a wrong answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.core.arena import IntegrityError, Unit
from plait.core.snapshots import SnapshotKind


class Node:
    """One cached page, and perhaps the snapshot at its end."""

    __slots__ = (
        "age", "children", "depth", "key", "page", "parent", "queued", "snapshot", "snapshot_age",
        "snapshot_hits", "snapshot_kind", "snapshot_queued", "snapshot_used", "tokens", "used",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, page: Unit) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.depth: int = parent.depth + 1 if parent else 1
        """pages from the start of the prompt to the end of this one"""
        self.children = 0
        self.snapshot: Unit | None = None
        self.snapshot_kind = SnapshotKind.SPACED
        self.snapshot_hits = 0
        # For eviction: when it was last used, by the cache's clock and by the queue's age; "queued": an
        # entry of the queue stands for it.
        self.used = 0
        self.age = 0.0
        self.snapshot_used = 0
        self.snapshot_age = 0.0
        self.queued = False
        self.snapshot_queued = False


class Leaf:
    """A state at any position, with the partly filled page before it; where an answer ended.

    It is found only by the exact tokens of that page. It counts among its parent's children.
    """

    __slots__ = ("age", "hits", "page", "parent", "queued", "state", "tokens", "under", "used")

    def __init__(self, under: bytes, parent: Node | None, tokens: bytes, page: Unit, state: Unit) -> None:
        self.under = under
        """key of the full pages before it"""
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.state = state
        self.hits = 0
        self.used = 0
        self.age = 0.0
        self.queued = False

    @property
    def length(self) -> int:
        """Tokens of the partly filled page."""
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class Match:
    """What the index knows of a sequence of tokens."""

    nodes: list[Node]
    """nodes of the leading pages, as far as they are known"""
    usable: int
    """leading nodes that can be taken over: up to the deepest snapshot (all, without recurrent layers)"""
    leaf: Leaf | None = None
    """a leaf behind the usable nodes"""

    def position(self, page_size: int) -> int:
        """Tokens that can be taken over."""
        return self.usable * page_size + (self.leaf.length if self.leaf else 0)


def pack(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


class PrefixIndex:
    def __init__(self, page_size: int, numerics_id: str, has_state: bool) -> None:
        self.page_size = page_size
        self.numerics_id = numerics_id
        self.has_state = has_state
        self.nodes: dict[bytes, Node] = {}
        self.leaves: dict[bytes, list[Leaf]] = {}
        """by the key of the full pages before them"""

    def seed(self, salt: str) -> bytes:
        """The key before the first page."""
        text = f"{len(self.numerics_id)}:{self.numerics_id}{salt}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def digest(self, tokens: Sequence[int], salt: str) -> bytes:
        """Names a sequence of tokens, the salt and everything that changes bits."""
        return hashlib.blake2b(self.seed(salt) + pack(tokens), digest_size=16).digest()

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], salt: str, pages: int) -> None:
        """Extend the hash chain ``keys`` of ``tokens`` to ``pages`` full pages."""
        size = self.page_size
        key = keys[-1] if keys else self.seed(salt)
        for i in range(len(keys), pages):
            key = hashlib.blake2b(key + pack(tokens[i * size : (i + 1) * size]), digest_size=16).digest()
            keys.append(key)

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], pages: int, root: bytes = b"") -> Match:
        """The longest known prefix within the first ``pages`` full pages of ``tokens``.

        ``root``: the key before the first page (``seed``), for leaves without a full page.
        """
        found: list[Node] = []
        usable = 0
        parent: Node | None = None
        for i in range(pages):
            node = self.lookup(keys[i], parent, tokens, i)
            if node is None:
                break
            found.append(node)
            parent = node
            if node.snapshot is not None or not self.has_state:
                usable = i + 1
        if self.leaves:
            for depth in range(len(found), usable - 1, -1):
                leaf = self.find_leaf(found[depth - 1].key if depth else root, tokens, depth)
                if leaf is not None:
                    return Match(found, depth, leaf)
        return Match(found, usable)

    def find_leaf(self, under: bytes, tokens: Sequence[int], depth: int) -> Leaf | None:
        """The longest leaf behind ``depth`` full pages that leaves a token to compute."""
        start = depth * self.page_size
        fitting = [
            leaf
            for leaf in self.leaves.get(under, ())
            if start + leaf.length < len(tokens) and pack(tokens[start : start + leaf.length]) == leaf.tokens
        ]
        return max(fitting, key=lambda leaf: leaf.length, default=None)

    def add_leaf(self, leaf: Leaf) -> bool:
        """False if there is one for these tokens already."""
        beside = self.leaves.setdefault(leaf.under, [])
        if any(other.tokens == leaf.tokens for other in beside):
            return False
        beside.append(leaf)
        if leaf.parent is not None:
            leaf.parent.children += 1
        leaf.page.cached = leaf.state.cached = True
        return True

    def remove_leaf(self, leaf: Leaf) -> None:
        """Forget a leaf. Its page and state are the caller's to give back."""
        beside = self.leaves[leaf.under]
        beside.remove(leaf)
        if not beside:
            del self.leaves[leaf.under]
        if leaf.parent is not None:
            leaf.parent.children -= 1
        leaf.page.cached = leaf.state.cached = False

    def lookup(self, key: bytes, parent: Node | None, tokens: Sequence[int], page: int) -> Node | None:
        """The node of full page ``page`` of ``tokens`` below ``parent``; None if it is not known."""
        return self.find(key, parent, self._page_tokens(tokens, page))

    def find(self, key: bytes, parent: Node | None, packed: bytes) -> Node | None:
        """As ``lookup``, by the page's own tokens."""
        node = self.nodes.get(key)
        if node is None or node.parent is not parent:
            return None
        return node if node.tokens == packed else None

    def insert(
        self, key: bytes, parent: Node | None, tokens: Sequence[int], page: int, unit: Unit
    ) -> Node | None:
        """Publish ``unit`` as full page ``page`` of ``tokens``. None if the key is taken (a collision)."""
        return self.add(key, parent, self._page_tokens(tokens, page), unit)

    def add(self, key: bytes, parent: Node | None, packed: bytes, unit: Unit) -> Node | None:
        """As ``insert``, by the page's own tokens."""
        if key in self.nodes:
            return None
        node = Node(key, parent, packed, unit)
        self.nodes[key] = node
        unit.cached = True
        if parent is not None:
            parent.children += 1
        return node

    def remove(self, node: Node) -> None:
        """Forget a node without children. Its page and snapshot are the caller's to give back."""
        if node.children:
            raise IntegrityError(f"page node at depth {node.depth} is removed below its children")
        del self.nodes[node.key]
        node.page.cached = False
        if node.parent is not None:
            node.parent.children -= 1

    def _page_tokens(self, tokens: Sequence[int], page: int) -> bytes:
        return pack(tokens[page * self.page_size : (page + 1) * self.page_size])

    def check(self) -> Iterator[tuple[Node | Leaf, Unit]]:
        """Walk all nodes, checking the tree; yields each unit that the index holds.

        Raises:
            IntegrityError: a node without its parent, a wrong count of children, a unit not marked cached.
        """
        children: dict[bytes, int] = {}
        for key, node in self.nodes.items():
            parent = node.parent
            if parent is not None:
                if self.nodes.get(parent.key) is not parent:
                    raise IntegrityError(f"node at depth {node.depth} has lost its parent")
                if node.depth != parent.depth + 1:
                    raise IntegrityError(f"node at depth {node.depth} below depth {parent.depth}")
                children[parent.key] = children.get(parent.key, 0) + 1
            elif node.depth != 1:
                raise IntegrityError(f"node at depth {node.depth} has no parent")
            if node.key != key or not node.page.cached:
                raise IntegrityError(f"node at depth {node.depth} is misfiled")
            yield node, node.page
            if node.snapshot is not None:
                if not node.snapshot.cached:
                    raise IntegrityError("a snapshot of the index is not marked cached")
                yield node, node.snapshot
        for under, beside in self.leaves.items():
            for leaf in beside:
                if leaf.under != under or (leaf.parent is not None and leaf.parent.key != under):
                    raise IntegrityError("a leaf is misfiled")
                if leaf.parent is not None:
                    children[under] = children.get(under, 0) + 1
                yield leaf, leaf.page
                yield leaf, leaf.state
        for key, node in self.nodes.items():
            if node.children != children.get(key, 0):
                raise IntegrityError(f"node at depth {node.depth} miscounts its children")
