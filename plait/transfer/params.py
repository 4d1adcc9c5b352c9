"""``kv_transfer_params`` of requests and replies, with vLLM's names, so that its routers can stand in front.

A router sends a request to a prefiller with ``{"do_remote_decode": true}`` and hands what comes back,
verbatim, to a decoder. plait adds how many tokens were computed and where the recurrent state lies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from plait.core.orders import Offer, Source
from plait.transfer.base import Ask, SchedulerHalf

ROLES = ("kv_producer", "kv_consumer", "kv_both")

KNOWN: dict[str, type | tuple[type, ...]] = {
    "do_remote_decode": bool,
    "do_remote_prefill": bool,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "remote_block_ids": list,
    "remote_state_id": int,
    "remote_num_tokens": int,
    "tp_size": int,
    "transfer_id": str,
}
"""Fields and their types; null means "not given". The prefiller is asked for its units when it is read from:
``remote_block_ids`` and ``remote_state_id`` tell people and routers, not the decoder."""


class PullParams(SchedulerHalf):
    """Of connectors whose decoders pull.

    Args:
        role: one of ``ROLES``.
        engine_id: of this engine.
        address: host and port of its worker's half.
        one_machine: only engines of this machine can be read.
    """

    def __init__(self, role: str, engine_id: str, address: tuple[str, int], *, one_machine: bool) -> None:
        self.role = role
        self.engine_id = engine_id
        self.address = address
        self.one_machine = one_machine

    def read(self, params: Mapping[str, Any], num_prompt_tokens: int) -> Ask:
        given = {name: value for name, value in params.items() if value is not None}
        for name, value in given.items():
            kind = KNOWN.get(name)
            if kind is None:
                raise ValueError(
                    f"kv_transfer_params: unknown field {name!r}; plait knows {', '.join(KNOWN)}"
                )
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ValueError(f"kv_transfer_params: {name}={value!r} is of the wrong type")
        leaves, fetched = given.get("do_remote_decode", False), given.get("do_remote_prefill", False)
        if leaves and fetched:
            raise ValueError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
        if leaves and self.role == "kv_consumer":
            raise ValueError("kv_transfer_params: this engine, a kv_consumer, prefills for no other")
        if fetched and self.role == "kv_producer":
            raise ValueError("kv_transfer_params: this engine, a kv_producer, only prefills")
        return Ask(leaves=leaves, source=self._source(given, num_prompt_tokens) if fetched else None)

    def _source(self, given: Mapping[str, Any], num_prompt_tokens: int) -> Source | None:
        names = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id", "remote_num_tokens")
        missing = [name for name in names if name not in given]
        if given.get("remote_num_tokens") == 0:
            return None  # the prompt was too short for anything to be computed there
        if missing:
            raise ValueError(
                f"kv_transfer_params: {missing[0]} is missing; hand on what the prefill engine replied"
            )
        tokens, host, port = (given[n] for n in ("remote_num_tokens", "remote_host", "remote_port"))
        if not 0 < tokens < num_prompt_tokens:
            raise ValueError(
                f"kv_transfer_params: remote_num_tokens={tokens} does not fit a prompt of "
                f"{num_prompt_tokens} tokens: send both engines the same prompt"
            )
        if not 0 < port < 2**16:
            raise ValueError(f"kv_transfer_params: remote_port={port} is no port")
        if self.one_machine and not self._is_here(host):
            raise ValueError(
                f"kv_transfer_params: remote_host={host!r} is another machine; the loopback connector reads "
                "engines of its own machine only"
            )
        return Source(given["remote_engine_id"], host, port, given["remote_request_id"], tokens)

    def _is_here(self, host: str) -> bool:
        if host == self.address[0]:
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def write(self, offer: Offer) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": offer.lease_id,
            "remote_host": self.address[0],
            "remote_port": self.address[1],
            "remote_block_ids": list(offer.pages),
            "remote_state_id": offer.state,
            "remote_num_tokens": offer.num_tokens,
            "tp_size": 1,
        }
