"""Hand-over: one engine computes a prompt, another its answer. The scheduler's half, on both sides.

The *prefiller* computes a prompt up to the last grid position that leaves a token, and samples nothing. Then
the request is over for its client, and its pages and its slot stay as they are, pinned, as a *lease*::

    RUNNING --cursor at leave_at--> LEASED --copies into its units over--> offered --Returned--> memory back

The *decoder* gives a request whose prompt lies elsewhere the memory for it, has fetched what its own cache
does not hold of it, and lets it run from there::

    WAITING --memory--> RECEIVING --fence over--> fetched --Arrived--> LANDED --its turn--> RUNNING
                            |                        |
                            +------ deadline, or --Broken--> WAITING, to be computed here; or an error

A fetch fails as a whole: what had arrived of it is worth nothing. Three rules keep memory whole:

* Units are handed to a fetch only when the last step is over that may touch them for an earlier owner, or
  copy into them. Units under a fetch, and under a lease, do not move.
* Nothing is written to units after they were handed to a fetch, until it has arrived.
* Units of a fetch that nobody waits for any more are quarantined until the fetch is known to be over.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from plait.core.arena import IntegrityError, Unit
from plait.core.cache import Cache
from plait.core.index import Match, Node
from plait.core.orders import Arrived, Broken, Fetch, Mover, Offer, Returned, Source
from plait.core.plan import Kind
from plait.core.request import Request, Status


@dataclass(frozen=True, slots=True)
class HandOverConfig:
    """How patient both sides are. Times are in seconds.

    Args:
        lease_seconds: how long a prefiller keeps a prompt that nobody comes for.
        fetch_seconds: how long a decoder waits for a prompt, counted from when it has the memory.
        recompute: a prompt that could not be fetched is computed here; False: the request fails.
    """

    lease_seconds: float = 120.0
    fetch_seconds: float = 30.0
    recompute: bool = True


@dataclass(slots=True)
class Reception:
    """A fetch, from the moment it has its memory."""

    fetch_id: int
    request: Request
    units: list[Unit]
    """to be written: the slot, if there is one, then pages in order"""
    quiet_after: int
    """last step that may touch them on behalf of someone else"""
    deadline: float
    started: bool = False


@dataclass(slots=True)
class HandOverCounters:
    """Totals since start."""

    offered: int = 0
    returned: Counter[str] = field(default_factory=Counter)
    """leases that ended, by reason"""
    received: int = 0
    received_tokens: int = 0
    failed: int = 0
    """fetches that gave nothing"""
    forgone: int = 0
    """requests that needed no fetch: their own engine knew the prompt, or scores it"""


class HandOver:
    """Leases and receptions of one engine.

    Args:
        cache: whose memory it is.
        mover: the worker's half.
        config: times and policy.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        cache: Cache,
        mover: Mover,
        config: HandOverConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.mover = mover
        self.config = config or HandOverConfig()
        self.counters = HandOverCounters()
        self.settling: list[Request] = []
        """computed; copies into their units are still in flight"""
        self.leases: dict[str, Request] = {}
        self.receiving: dict[int, Reception] = {}
        self.quarantined: dict[int, list[Unit]] = {}
        """units of fetches that nobody waits for and that are not known to be over"""
        self._users: Counter[Source] = Counter()
        """requests of this engine that may still need a lease: the answers of one prompt share it"""
        self._clock = clock
        self._kept = clock()
        self._fetches = 0

    # -- the prefiller's side ---------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """The prompt is computed, as far as it goes here: keep its memory for a decoder."""
        request.status = Status.LEASED
        self._pin(request, 1)
        self.settling.append(request)

    def settled(self) -> list[tuple[Request, Offer]]:
        """Offer the prompts whose memory holds still; for each, what its client shall be told."""
        over = self.cache.memory.completed
        ready = [r for r in self.settling if all(unit.copied <= over for unit in _held(r))]
        offers = []
        for request in ready:
            self.settling.remove(request)
            offer = self._offer(request)
            self.leases[offer.lease_id] = request
            self.counters.offered += 1
            self.mover.offer(offer)
            offers.append((request, offer))
        return offers

    def _offer(self, request: Request) -> Offer:
        assert request.leave_at is not None
        end = request.leave_at
        pages = request.pages[: self.cache.geometry.pages_for(end)]
        return Offer(
            lease_id=uuid.uuid4().hex,  # not to be guessed: whoever names it may read the prompt's memory
            num_tokens=end,
            digest=self._digest(request, end),
            pages=tuple(page.index for page in pages),
            state=None if request.slot is None else request.slot.index,
            seconds=self.config.lease_seconds,
        )

    def withdraw(self, request_id: str) -> bool:
        """The prefilled request's client has gone before it was told: nobody will come. False: not here."""
        for request in self.settling:
            if request.id == request_id:
                self.settling.remove(request)
                self._end_lease(request, "withdrawn")
                return True
        for lease_id, request in self.leases.items():
            if request.id == request_id:
                self.mover.withdraw(lease_id)
                del self.leases[lease_id]
                self._end_lease(request, "withdrawn")
                return True
        return False

    def _end_lease(self, request: Request, reason: str) -> None:
        self._pin(request, -1)
        self.cache.holdings.release(request)
        request.status = Status.FINISHED
        self.counters.returned[reason] += 1

    @staticmethod
    def _pin(request: Request, by: int) -> None:
        for unit in _held(request):
            unit.pins += by

    # -- the decoder's side -----------------------------------------------------------------

    def expect(self, request: Request) -> None:
        """A request with a source was queued."""
        assert request.source is not None
        self._users[request.source] += 1

    def refuse(self, source: Source) -> None:
        """A request with this source was refused: nobody comes for the lease, unless another request does."""
        if source.num_tokens and source not in self._users:
            self.mover.release(source)

    def needs(self, request: Request, match: Match) -> list[Node] | None:
        """Known pages below the fetched ones; None: nothing is to be fetched."""
        source, size = request.source, self.cache.geometry.page_size
        assert source is not None
        if not request.reads_cache or match.position(size) >= source.num_tokens:
            return None
        # The state comes from outside, so pages serve that lack a snapshot here.
        return match.nodes[: source.num_tokens // size]

    def begin(self, request: Request, known: list[Node]) -> bool:
        """Take the memory for a prompt that is to be fetched. False (and no change) without memory."""
        units = self.cache.entrance.receive(request, known)
        if units is None:
            return False
        if request.num_cached_tokens is None:
            request.num_cached_tokens = len(known) * self.cache.geometry.page_size
        self._fetches += 1
        quiet_after = max(self.cache.memory.quiet_after(unit) for unit in units)
        deadline = self._clock() + self.config.fetch_seconds
        request.status = Status.RECEIVING
        self.receiving[self._fetches] = Reception(self._fetches, request, units, quiet_after, deadline)
        return True

    def forgo(self, request: Request) -> None:
        """The request does not need its source (any more): it is computed here, or has ended."""
        source, request.source = request.source, None
        if source is None:
            return
        self._users[source] -= 1
        if self._users[source] <= 0:
            del self._users[source]
            if source.num_tokens:
                self.mover.release(source)

    def drop(self, request: Request) -> None:
        """A request that is being received has ended (its client is gone)."""
        reception = next(r for r in self.receiving.values() if r.request is request)
        self._give_up(reception, over=False)

    def poll(self) -> tuple[list[Request], dict[Request, str]]:
        """Take in what the mover reports, and keep deadlines.

        Returns:
            Requests whose prompt has arrived, and those whose fetch has failed, with the reason. Both have
            left ``receiving``; the former hold their memory, the latter nothing.
        """
        landed: list[Request] = []
        failed: dict[Request, str] = {}
        for report in self.mover.poll():
            match report:
                case Returned(lease_id, reason):
                    request = self.leases.pop(lease_id, None)
                    if request is not None:
                        self._end_lease(request, reason)
                case Arrived(fetch_id):
                    if fetch_id in self.receiving:
                        landed.append(self._land(self.receiving.pop(fetch_id)))
                    else:
                        self._end_quarantine(fetch_id)
                case Broken(fetch_id, reason):
                    if fetch_id in self.receiving:
                        reception = self.receiving[fetch_id]
                        self._give_up(reception, over=True)
                        failed[reception.request] = reason
                    else:
                        self._end_quarantine(fetch_id)
        now = self._clock()
        if self._users and now - self._kept > self.config.fetch_seconds / 3:
            self._kept = now  # those that wait for their turn must not lose what they wait for
            self.mover.keep(
                [source for source in self._users if source.num_tokens], self.config.fetch_seconds
            )
        for reception in [r for r in self.receiving.values() if r.deadline <= now]:
            self._give_up(reception, over=False)
            failed[reception.request] = f"the prompt did not arrive within {self.config.fetch_seconds:g} s"
        self.counters.failed += len(failed)
        return landed, failed

    def start(self) -> None:
        """Hand the memory of receptions to the mover, once no step in flight may touch it."""
        for reception in self.receiving.values():
            if not reception.started and reception.quiet_after <= self.cache.memory.completed:
                reception.started = True
                self.mover.fetch(self._order(reception))

    def _order(self, reception: Reception) -> Fetch:
        request, source = reception.request, reception.request.source
        assert source is not None
        pages = request.pages[len(request.nodes) : self.cache.geometry.pages_for(source.num_tokens)]
        return Fetch(
            fetch_id=reception.fetch_id,
            source=source,
            digest=self._digest(request, source.num_tokens),
            first_page=len(request.nodes),
            pages=tuple(page.index for page in pages),
            state=None if request.slot is None else request.slot.index,
            seconds=max(0.0, reception.deadline - self._clock()),
        )

    def _land(self, reception: Reception) -> Request:
        """The prompt is here: its memory becomes the request's like any other's."""
        request = reception.request
        assert request.source is not None
        for unit in reception.units:
            unit.pins = 0
        known = len(request.nodes) * self.cache.geometry.page_size
        request.num_computed_tokens = request.num_committed_tokens = request.source.num_tokens
        self.counters.received += 1
        self.counters.received_tokens += request.source.num_tokens - known
        request.status = Status.LANDED
        self.forgo(request)
        return request

    def _give_up(self, reception: Reception, *, over: bool) -> None:
        """Nobody waits for it any more. ``over``: nothing will be written to its memory any more."""
        del self.receiving[reception.fetch_id]
        request, units = reception.request, reception.units
        request.num_cached_tokens = None
        request.slot = None
        del request.pages[len(request.nodes) :]
        if over or not reception.started:
            self.cache.entrance.return_pinned(units)
        else:
            self.cache.loans.quarantine(units)
            self.quarantined[reception.fetch_id] = units
            self.mover.abandon(reception.fetch_id)
        self.cache.holdings.release(request)
        self.forgo(request)

    def _end_quarantine(self, fetch_id: int) -> None:
        self.cache.loans.end_quarantine(self.quarantined.pop(fetch_id))

    def _digest(self, request: Request, end: int) -> bytes:
        return self.cache.index.digest(request.tokens[:end], request.cache_salt)

    # -- looking ----------------------------------------------------------------------------

    @property
    def waits_for_steps(self) -> bool:
        """Something goes on only when copies that wait for the next plan, or steps in flight, are over."""
        return bool(self.settling) or any(not r.started for r in self.receiving.values())

    @property
    def next_deadline(self) -> float | None:
        """When ``poll`` has something to do even if the mover reports nothing; by the clock it was given."""
        return min((r.deadline for r in self.receiving.values()), default=None)

    def holders(self) -> Iterator[Request]:
        """Requests that hold memory and stand in no queue of the scheduler."""
        yield from self.settling
        yield from self.leases.values()

    def usage(self) -> dict[str, int]:
        """Units of leases (a page under two leases counts twice) and quarantined ones."""
        leased = [unit for request in self.holders() for unit in _held(request)]
        quarantined = [unit for units in self.quarantined.values() for unit in units]
        return {
            "leases": len(self.settling) + len(self.leases),
            "pages_leased": sum(unit.kind is Kind.PAGE for unit in leased),
            "receiving": len(self.receiving),
            "pages_quarantined": sum(unit.kind is Kind.PAGE for unit in quarantined),
            "states_quarantined": sum(unit.kind is Kind.STATE for unit in quarantined),
        }

    def check(self) -> None:
        """Recount pins and quarantine.

        Raises:
            IntegrityError: a unit moves that must not, or is held fast by nobody.
        """
        pins = Counter(id(unit) for request in self.holders() for unit in _held(request))
        pins.update(id(unit) for reception in self.receiving.values() for unit in reception.units)
        quarantined = {id(unit) for units in self.quarantined.values() for unit in units}
        for unit in self.cache.memory.units():
            if unit.pins != pins[id(unit)]:
                raise IntegrityError(f"{unit} has {unit.pins} pins, its actors are {pins[id(unit)]}")
            if id(unit) in quarantined and not unit.lent:
                raise IntegrityError(f"{unit} is quarantined and was handed out")
        for status, requests in (
            (Status.LEASED, self.holders()),
            (Status.RECEIVING, (r.request for r in self.receiving.values())),
        ):
            if any(request.status is not status for request in requests):
                raise IntegrityError(f"a request that is not {status.value} stands among those")


def _held(request: Request) -> Iterator[Unit]:
    yield from request.pages
    if request.slot is not None:
        yield request.slot
