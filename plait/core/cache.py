"""One cache for attention and recurrent state: its parts, and what it knows of a request's tokens.

The scheduler asks ``match`` and ``entrance`` when a request enters, ``holdings`` as its cursor moves,
``publisher`` for snapshots and when a step is over, and ``leaves`` or ``holdings`` when it leaves the arena.
Actors outside the order of steps ask ``loans`` and ``pins``. Each part knows those below it alone::

    entrance  leaves
        holdings        publisher  loans  pins
                        store       prefix index, eviction
                        memory      owners, fences, copies, moves
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from plait.core.arena import IntegrityError
from plait.core.counters import CacheCounters
from plait.core.entrance import Entrance
from plait.core.geometry import Geometry
from plait.core.holdings import Holdings
from plait.core.index import Match
from plait.core.leaves import Leaves
from plait.core.loans import Loans
from plait.core.memory import Memory
from plait.core.pins import Pins
from plait.core.publishing import Publisher
from plait.core.request import PendingExport, Request
from plait.core.reuse import Reuse
from plait.core.snapshots import SnapshotPolicy
from plait.core.store import Store


class Cache:
    """Pages, states and the prefix index over one arena.

    Args:
        geometry: how the arena is cut.
        policy: where snapshots are taken.
        numerics_id: names everything that changes bits; seeds the hash chains.
        enabled: False keeps nothing for other requests.
        row_invariant: entries written while decoding equal those a prefill would write, and may be
            shared; otherwise only a prompt's own pages are.
        budget: most bytes of what is cached and held by no request; None: as much as there is room for.
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: SnapshotPolicy | None = None,
        *,
        numerics_id: str = "",
        enabled: bool = True,
        row_invariant: bool = True,
        budget: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.counters = CacheCounters()
        self.reuse = Reuse(policy or SnapshotPolicy.of(geometry), geometry.has_state, enabled, row_invariant)
        self.memory = Memory(geometry, self.counters)
        self.store = Store(self.memory, numerics_id, budget, self.counters)
        self.index = self.store.index
        self.holdings = Holdings(self.store)
        self.entrance = Entrance(self.holdings, self.reuse)
        self.publisher = Publisher(self.store, self.reuse)
        self.leaves = Leaves(self.holdings, self.reuse)
        self.loans = Loans(self.store)
        self.pins = Pins(self.store)

    # -- what is known ----------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """What is known of the request's tokens, leaving at least one to compute."""
        if not self.reuse.reads(request):
            return Match([], 0)
        pages = self.most_pages(request)
        self.index.extend_keys(request.page_keys, request.tokens, request.cache_salt, pages)
        root = self.index.seed(request.cache_salt) if self.index.leaves else b""
        return self.index.match(request.page_keys, request.tokens, pages, root)

    def most_pages(self, request: Request) -> int:
        """Full pages that the request could find cached at most: those before the last that it computes."""
        return min(request.num_tokens - 1, request.goal) // self.geometry.page_size

    def pages_wanted(self, request: Request, match: Match) -> int:
        """Pages that would become referenced to hold all its tokens."""
        shared = sum(1 for node in match.nodes[: match.usable] if node.page.refs)
        return self.geometry.pages_for(request.num_tokens) - shared

    @property
    def memory_is_coming(self) -> bool:
        """Memory is held by an export in flight or an outside actor and will return."""
        return bool(self.publisher.num_pending or self.pins.num_readers) or self.loans.are_coming

    def usage(self) -> dict[str, int]:
        """Units by state; ``pages_total`` counts the whole arena in pages."""
        return self.memory.usage()

    # -- checking ---------------------------------------------------------------------------

    def check(self, requests: Iterable[Request], exports: Iterable[PendingExport]) -> None:
        """Recount every reference from its owners.

        Args:
            requests: all requests that may hold memory.
            exports: all exports in flight.

        Raises:
            IntegrityError: something is leaked, freed twice, held by nobody or out of place.
        """
        owners: Counter[int] = Counter()
        for request in requests:
            self.holdings.check(request)
            owners.update(id(page) for page in request.pages)
            if request.slot is not None:
                owners[id(request.slot)] += 1
        states = [id(export.state) for export in exports]
        if len(states) != self.publisher.num_pending:
            raise IntegrityError(
                f"{self.publisher.num_pending} exports in flight by count, {len(states)} found"
            )
        owners.update(states)
        self.memory.check(owners, self.store.check())
