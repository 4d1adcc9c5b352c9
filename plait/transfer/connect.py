"""From ``--kv-transfer-config`` to a connector. Names as in vLLM."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from plait.core.handover import HandOverConfig
from plait.transfer.base import Connector, Wire
from plait.transfer.loopback import SharedMemoryWire
from plait.transfer.params import ROLES, PullParams
from plait.transfer.pull import PullWorker
from plait.transfer.spans import ArenaMap
from plait.transfer.words import Self

POLICIES = ("recompute", "fail")
EXTRA = ("lease_seconds", "fetch_seconds")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """What the user may set.

    Args:
        kv_connector: its name; see ``CONNECTORS``.
        kv_role: kv_producer (prefills for others), kv_consumer (goes on from what others prefilled), kv_both.
        engine_id: names this engine to its peers; made up by default.
        kv_ip: address to listen on for peers, and that they are told.
        kv_port: 0 takes any free one.
        kv_load_failure_policy: what becomes of a request whose prompt did not arrive: recompute or fail.
        kv_connector_extra_config: lease_seconds (how long a prefilled prompt is kept for a decoder) and
            fetch_seconds (how long a decoder waits for one).
    """

    kv_connector: str
    kv_role: str = "kv_both"
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _choose("kv_connector", self.kv_connector, tuple(CONNECTORS))
        _choose("kv_role", self.kv_role, ROLES)
        _choose("kv_load_failure_policy", self.kv_load_failure_policy, POLICIES)
        if not isinstance(self.engine_id, str) or not isinstance(self.kv_ip, str):
            raise ValueError("kv_transfer_config: engine_id and kv_ip are texts")
        if self.kv_ip in ("0.0.0.0", "::", ""):
            raise ValueError(
                f"kv_transfer_config: kv_ip={self.kv_ip!r}: peers are told this address; "
                "give one of this machine"
            )
        if type(self.kv_port) is not int or not 0 <= self.kv_port < 2**16:
            raise ValueError(f"kv_transfer_config: kv_port={self.kv_port!r} is no port")
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping):
            raise ValueError("kv_transfer_config: kv_connector_extra_config is an object")
        for name, value in extra.items():
            _choose("kv_connector_extra_config", name, EXTRA)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ValueError(f"kv_transfer_config: {name}={value!r}: seconds, above 0")

    @property
    def handover(self) -> HandOverConfig:
        times = {name: float(value) for name, value in self.kv_connector_extra_config.items()}
        return HandOverConfig(recompute=self.kv_load_failure_policy == "recompute", **times)

    def describe(self) -> str:
        """Times and policy, in words."""
        h = self.handover
        else_ = "is computed here" if h.recompute else "fails its request"
        return (
            f"prompts are kept {h.lease_seconds:g} s; one that does not come in {h.fetch_seconds:g} s {else_}"
        )

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str) -> TransferConfig:
        """From an object, or from its JSON.

        Raises:
            ValueError: a field that is unknown or cannot be; the message names those that are known.
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as fault:
                raise ValueError(f"kv_transfer_config is not valid JSON: {fault}") from None
        if not isinstance(given, Mapping) or not given.get("kv_connector"):
            raise ValueError('kv_transfer_config is an object such as {"kv_connector": "LoopbackConnector"}')
        known = [f.name for f in fields(cls)]
        for name in given:
            _choose("kv_transfer_config", name, tuple(known))
        return cls(**{name: value for name, value in given.items() if value is not None})


def _choose(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"kv_transfer_config: {name}={value!r}: choose one of {', '.join(known)}")


WireMaker = Callable[[torch.Tensor, int | None], Wire]

CONNECTORS: dict[str, WireMaker] = {"LoopbackConnector": SharedMemoryWire}
"""Wires by the names of their connectors; all of them pull."""


def make_connector(
    config: TransferConfig,
    *,
    identity: str,
    arena: torch.Tensor,
    descriptor: int | None,
    arena_map: ArenaMap,
    make_wire: WireMaker | None = None,
) -> Connector:
    """Register an arena, and listen for peers.

    Args:
        config: what the user asked for.
        identity: everything that changes bits, weights included.
        arena: uint8 [bytes].
        descriptor: of the file that the arena lies in, if it does.
        arena_map: where its units lie.
        make_wire: instead of the connector's own.

    Raises:
        ValueError: the arena cannot be reached by this connector, or the address cannot be had.
    """
    wire = (make_wire or CONNECTORS[config.kv_connector])(arena, descriptor)
    me = Self(config.engine_id, identity, arena_map)
    try:
        worker = PullWorker(me, wire, config.kv_ip, config.kv_port)
    except OSError as fault:
        raise ValueError(
            f"kv_transfer_config: cannot listen on {config.kv_ip}:{config.kv_port} ({fault.strerror}); "
            "choose another kv_port, or 0 for any"
        ) from fault
    scheduler = PullParams(config.kv_role, config.engine_id, worker.address, one_machine=True)
    return Connector(config.engine_id, scheduler, worker, config.handover)
