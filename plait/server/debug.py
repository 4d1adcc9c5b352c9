"""Looking into a running engine. Off unless asked for: it shows what clients have sent."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from plait.engine.outputs import EngineDeadError
from plait.server import errors

if TYPE_CHECKING:
    from plait.core.tree import Branch
    from plait.server.service import Service
    from plait.text.tokenizer import Tokenizer

SHOWN_CHARACTERS = 60


def add_debug(app: FastAPI, service: Service) -> None:
    """Add ``GET /debug/prefix-cache``: the tree of cached prefixes, as JSON or (``format=text``) to read."""

    @app.get("/debug/prefix-cache", response_model=None)
    async def prefix_cache(
        format: Literal["json", "text"] = "json", most: Annotated[int, Query(ge=1, le=100_000)] = 1000
    ) -> Response:
        try:
            branches = await service.engine.prefix_tree(most)
        except EngineDeadError as error:
            return errors.as_api_error(error).response()
        tokenizer = service.engine.tokenizer
        if format == "text":
            return PlainTextResponse(as_text(branches, tokenizer))
        return JSONResponse({"branches": [_as_json(branch, tokenizer) for branch in branches]})


def _as_json(branch: Branch, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = tokenizer.decode(branch.tokens, skip_special_tokens=False) if tokenizer else None
    return asdict(branch) | {"text": text}


def as_text(branches: list[Branch], tokenizer: Tokenizer | None) -> str:
    """One line per branch, indented by its place in the tree."""
    depth: list[int] = []
    lines = []
    for branch in branches:
        depth.append(0 if branch.parent is None else depth[branch.parent] + 1)
        what = [f"{branch.start}..{branch.end}"]
        if branch.snapshot is not None:
            what.append(f"{branch.snapshot} snapshot, {branch.snapshot_hits} hits")
        if branch.requests:
            what.append(f"{branch.requests} requests")
        if branch.leaves:
            what.append("leaves at " + ", ".join(map(str, branch.leaves)))
        start: object = branch.tokens
        if tokenizer is not None:
            start = tokenizer.decode(branch.tokens, skip_special_tokens=False)[:SHOWN_CHARACTERS]
        lines.append(f"{'  ' * depth[-1]}{'; '.join(what)}: {start!r}")
    return "".join(line + "\n" for line in lines)
