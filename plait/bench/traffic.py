"""From traffic settings to sessions and arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.bench.arrivals import Arrivals
from plait.bench.settings import TrafficArgs
from plait.bench.workload import (
    Lengths,
    Session,
    Writer,
    conversation,
    derive_seed,
    mix,
    shared_prefix,
    single,
    warm_up,
)

_WARM_UP = 2**31
"""Sets the seeds of warm-ups apart from those of runs."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a run sends: sessions, warm-up sessions, how they arrive, and the seed of it all."""

    sessions: Sequence[Session]
    warm_up: Sequence[Session]
    arrivals: Arrivals
    seed: int

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @classmethod
    def of(cls, args: TrafficArgs, writer: Writer, *path: int) -> Traffic:
        """The traffic of one run; ``path`` numbers runs, each of which gets prompts of its own.

        Args:
            args: settled settings.
        """
        assert args.traffic_seed is not None
        seed = derive_seed(args.traffic_seed, *path) if path else args.traffic_seed
        extra = _sessions(args, writer, args.num_warmups, derive_seed(seed, _WARM_UP))
        measured = _sessions(args, writer, args.num_prompts, seed)
        return cls(measured, warm_up(extra), _arrivals(args), seed)


def _arrivals(args: TrafficArgs) -> Arrivals:
    return Arrivals(args.request_rate, args.max_concurrency)


def _sessions(args: TrafficArgs, writer: Writer, count: int, seed: int) -> list[Session]:
    lengths = Lengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
    if args.profile == "mix":
        short = replace(lengths, input_len=args.short_input_len)
        long = replace(lengths, input_len=args.long_input_len)
        return mix(writer, short, long, args.long_share, count, seed)
    if args.profile == "conversation":
        return conversation(writer, args.prefix_len, lengths, args.turns, count, seed)
    if args.profile == "shared-prefix":
        return shared_prefix(writer, args.prefix_len, lengths, args.num_prefixes, count, seed)
    return single(writer, lengths, count, seed)


def describe(args: TrafficArgs) -> str:
    """The traffic in one line."""
    spread = f" ±{args.random_range_ratio:.0%}" if args.random_range_ratio else ""
    count, size = args.num_prompts, f"{args.random_input_len}{spread}"
    shape = {
        "random": f"{count} prompts of {size} tokens",
        "mix": f"{count} prompts, {args.long_share:.0%} of {args.long_input_len}{spread} tokens and the rest "
        f"of {args.short_input_len}{spread}",
        "conversation": f"{count} conversations of {args.turns} turns, each with a system prompt of "
        f"{args.prefix_len} tokens, messages of {size}",
        "shared-prefix": f"{count} prompts behind {args.num_prefixes} shared prefix(es) of {args.prefix_len} "
        f"tokens, tails of {size}",
    }
    answers = f"answers of {args.random_output_len}{spread}"
    return f"{shape[args.profile]}, {answers}; {_arrivals(args).describe()}; seed {args.traffic_seed}"
