"""The parsers of one model: which formats it writes, and a fresh parser for each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.core.sampling_params import Structure, ThinkingBudget
from plait.text.parsing.call_grammar import CallGrammar
from plait.text.parsing.formats import (
    REASONING,
    REASONING_PARSERS,
    TOOL_PARSERS,
    forced_text,
    reasoning_of,
    table,
    tool_format,
    tools_of,
)
from plait.text.parsing.parser import OutputParser
from plait.text.tokenizer import Tokenizer

NONE = "none"


class OutputFormat:
    """What a model's answers look like.

    Args:
        tokenizer: of the model.
        template: source of its chat template.
        reasoning: name of a reasoning format, "none", or None: as the template shows.
        tools: name of a format of tool calls, "none", or None: as the template shows.

    Attributes:
        reasoning, tools: the names that hold, or None.
        shown_ids: special tokens that are tags, and so part of the text.

    Raises:
        ValueError: a name that no format has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        reasoning: str | None = None,
        tools: str | None = None,
    ) -> None:
        self.reasoning = _chosen("reasoning_parser", reasoning, REASONING_PARSERS, reasoning_of(template))
        self.tools = _chosen("tool_call_parser", tools, TOOL_PARSERS, tools_of(template))
        self._template = template
        tags = {tag for state in table(self.reasoning, self.tools).values() for tag in state.tags}
        ids = {tag: tokenizer.token_id(tag) for tag in tags}
        self._tag_ids = {i: tag for tag, i in ids.items() if i is not None and i in tokenizer.special_ids}
        self.shown_ids = frozenset(self._tag_ids)
        self._tokenizer = tokenizer

    def begins_inside(self, prompt: str) -> bool:
        """Whether the answer to a rendered prompt begins inside the reasoning."""
        if self.reasoning is None:
            return False
        form, end = REASONING[self.reasoning], prompt.rstrip()
        return end.endswith(form.open) or (form.begins_inside and not end.endswith(form.close))

    def ends_inside(self, prompt: str) -> bool:
        """Whether a prompt of any kind ends with the tag that begins the reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(REASONING[self.reasoning].open)

    def parser(
        self,
        prompt: str,
        tools: Mapping[str, Any] | None = None,
        *,
        forced: str = "",
        parallel: bool = True,
    ) -> OutputParser:
        """A parser for the answer to ``prompt``.

        Args:
            prompt: as it was rendered.
            tools: functions that may be called, to the JSON schema of their arguments. None or empty: calls
                are not looked for.
            forced: what the prompt ends in that belongs to the answer; see ``forced``.
            parallel: more than one call may be made.
        """
        parser = OutputParser(
            table(self.reasoning, self.tools if tools else None),
            "reasoning" if self.begins_inside(prompt) else "start",
            tools,
            self._tag_ids,
            parallel,
        )
        if forced:
            parser.prime(forced)
        return parser

    def closing(self, prompt: str) -> str:
        """Text that ends the reasoning in which a prompt ends; "" where there is none."""
        if self.reasoning is None or not self.begins_inside(prompt):
            return ""
        return f"\n{REASONING[self.reasoning].close}\n\n"

    def thinking_budget(self, prompt: str, tokens: int) -> ThinkingBudget:
        """The bound of ``tokens`` on the reasoning in an answer to ``prompt``.

        Raises:
            ValueError: the model's reasoning is not told apart.
        """
        if self.reasoning is None:
            raise ValueError("reasoning is not told apart here, so it has no budget (--reasoning-parser)")
        form = REASONING[self.reasoning]
        close = self._ids(form.close)
        ends = [close]
        if form.calls_end_it and self.tools:
            ends += [self._ids(tag) for tag in tool_format(self.tools).openings]
        return ThinkingBudget(
            tokens,
            (*self._ids("\n"), *close),
            len(close),
            tuple(ends),
            () if self.begins_inside(prompt) else self._ids(form.open),
        )

    def structure(self, grammar: str, prompt: str, calls: bool = False) -> Structure:
        """What makes the answer to ``prompt`` follow a grammar once its reasoning is over.

        Args:
            grammar: as llguidance reads it.
            prompt: as it was rendered, without the beginning of a call that it may end in.
            calls: the grammar holds calls; then none may end the reasoning.
        """
        if self.reasoning is None:
            return Structure(grammar)
        form = REASONING[self.reasoning]
        opens = self._ids(form.open)
        inside = self.begins_inside(prompt)
        if not inside and (prompt.rstrip().endswith(form.close) or len(opens) > 1):
            return Structure(grammar)
        openings = tool_format(self.tools).openings if self.tools and calls and form.calls_end_it else ()
        return Structure(
            grammar,
            (self._ids(form.close),),
            None if inside else opens[0],
            self._single(("\n", "\n\n")),
            self._single(openings),
        )

    def _single(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Ids of the texts that are one token."""
        return tuple(ids[0] for text in texts if len(ids := self._ids(text)) == 1)

    def call_grammar(self, holds: Callable[[str], bool]) -> CallGrammar:
        """What makes grammars of calls; ``holds`` says whether a grammar can be compiled."""
        assert self.tools is not None
        tags = {tag: i for i, tag in self._tag_ids.items()}
        return CallGrammar(self.tools, self._template, tags, holds)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def forced(self, name: str | None) -> str:
        """What a prompt must end in for the answer to be a call, of the function ``name`` if given."""
        assert self.tools is not None
        return forced_text(self.tools, name, self._template)

    @property
    def call_id_length(self) -> int:
        """Letters and digits of a call's id, where the format insists; else 0."""
        return tool_format(self.tools).id_length if self.tools else 0


def _chosen(flag: str, asked: str | None, known: Sequence[str], found: str | None) -> str | None:
    if asked is None:
        return found
    if asked == NONE or asked == "":
        return None
    if asked not in known:
        raise ValueError(f"{flag}={asked!r}: it must be one of {', '.join((*known, NONE))}")
    return asked
