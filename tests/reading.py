"""Answers of an engine without a server, read as the server reads them."""

from __future__ import annotations

from collections.abc import Sequence

from plait.engine.outputs import CompletionOutput
from plait.eval.question import Said, call_of
from plait.server.replies import Reply
from plait.text.parsing import OutputParser
from plait.text.tokenizer import Tokenizer


def read_reply(tokenizer: Tokenizer, parser: OutputParser, tokens: Sequence[int]) -> Reply:
    """Reasoning, content and calls of an answer that has ended by itself; its end token may be there."""
    ids = [token for token in tokens if token not in tokenizer.special_ids]
    starts = [len(tokenizer.decode(ids[:i], skip_special_tokens=False)) for i in range(len(ids))]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Reply.of(CompletionOutput(0, text, ids, finish_reason="stop", starts=starts), parser)


def read_answer(tokenizer: Tokenizer, parser: OutputParser, tokens: Sequence[int]) -> Said:
    """As ``plait eval`` judges it."""
    reply = read_reply(tokenizer, parser, tokens)
    return Said(reply.content or "", tuple(call_of(call.name, call.json) for call in reply.calls))
