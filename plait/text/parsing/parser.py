"""One parser for all formats: it walks a table of states (``states.py``, ``formats.py``) along the text.

The text is numbered from 0 as in ``plait.text.answer``. What may become a tag is held back, at most the
length of the longest tag; everything else is told at once and never taken back. The events do not depend
on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.text.parsing.calls import JsonCall, ParameterCall
from plait.text.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from plait.text.parsing.states import FAULT, Act, Kind, Move, State, Table

_NO_NAME = re.compile(r'[\s<>"{}\[\]]')
_LONGEST_NAME = 256
_JSON_KINDS = (Kind.CALL, Kind.ARGUMENTS)


class OutputParser:
    """Parses one answer.

    Args:
        table: the states; see ``plait.text.parsing.formats.table``.
        start: the state in which the answer begins.
        tools: names of the functions that may be called, to the JSON schema of their arguments.
        tag_ids: token id to tag, of tags that are special tokens of the model. Such a tag is that token and
            nothing else; text that spells it is text.
        parallel: take more than one call; otherwise what comes behind the first is dropped.

    Attributes:
        reasoning_tokens: tokens that began inside the reasoning; its tags do not count.
        calls: calls that were begun.
        over: nothing that follows can change the answer.
    """

    def __init__(
        self,
        table: Table,
        start: str = "start",
        tools: Mapping[str, Any] | None = None,
        tag_ids: Mapping[int, str] | None = None,
        parallel: bool = True,
    ) -> None:
        self.reasoning_tokens = 0
        self.calls = 0
        self._table = table
        self._tools = tools or {}
        self._tag_ids = tag_ids or {}
        self._parallel = parallel
        special = set(self._tag_ids.values())
        self._tags = {name: [t for t in state.tags if t not in special] for name, state in table.items()}
        self._search = {
            name: re.compile("|".join(map(re.escape, tags))) if tags else None
            for name, tags in self._tags.items()
        }
        self._has_values = any(state.kind is Kind.VALUE for state in table.values())
        self._buffer = ""
        self._at = 0
        """number of the buffer's first character"""
        self._tokens: deque[int] = deque()
        """first characters of the tokens not counted yet"""
        self._marks: deque[tuple[int, str]] = deque()
        """(first character, tag) of special tokens not reached yet"""
        self._events: list[Event] = []
        self._raw: list[str] | None = None
        """the text since a call was opened, while it may turn out to be none"""
        self._raw_tokens = 0
        self._opened_in = "content"
        """the state in which a call was opened; text that is no call after all belongs there"""
        self._word: list[str] = []
        """the name or key under way"""
        self._space = ""
        """white space at the end of the content or reasoning so far, not told yet"""
        self._reasoned = False
        """the last text told was reasoning"""
        self._plain: ParameterCall | None = None
        self._json: JsonCall | None = None
        self._enter(start)

    # -- from outside -----------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self._name == "over"

    def prime(self, text: str) -> None:
        """Read text that the prompt ends in already. Its events come with the first of the answer."""
        self._buffer += text
        self._run(final=False)
        self._at = -len(self._buffer)
        self.reasoning_tokens = 0

    def feed(self, text: str, tokens: Sequence[int] = (), starts: Sequence[int] = ()) -> list[Event]:
        """Read on.

        Args:
            text: what was added to the answer.
            tokens: ids of the tokens added.
            starts: for each of them the number of its first character in the answer.
        """
        self._tokens.extend(starts)
        if self._tag_ids:
            for token, start in zip(tokens, starts, strict=True):
                if token in self._tag_ids:
                    self._marks.append((start, self._tag_ids[token]))
        self._buffer += text
        self._run(final=False)
        return self._take()

    def finish(self, reason: str | None) -> list[Event]:
        """The answer is over, for this finish reason. An answer that the model ended itself ("stop") gets
        the tags and brackets that it forgot at the end."""
        stopped = reason == "stop"
        if self._state.kind is Kind.VALUE and (not stopped or self._buffer.startswith("</function>")):
            self._buffer = ""  # a tag that was cut off, or the end of a call whose last tag is missing
        self._run(final=True)
        if self._raw is not None:
            self._fault()
        elif self._json is not None and stopped:
            self._json.close()
            self._events += self._json.events
        elif self._plain is not None and stopped and self._state.kind is not Kind.KEY:
            self._plain.end()
            self._flush_plain()
        if self._tokens and not stopped and self._state.kind is Kind.REASONING:
            self.reasoning_tokens += len(self._tokens)
        if self._space and not self.calls and self._state.kind is not Kind.REASONING:
            self._events.append(Content(self._space))
        return self._take()

    def _take(self) -> list[Event]:
        """The events so far, neighbours of a kind joined."""
        events, self._events = self._events, []
        return list(_joined(events))

    # -- the walk ---------------------------------------------------------------------------

    def _enter(self, name: str) -> None:
        self._name = name
        self._state: State = self._table[name]
        self._word = []
        if self._state.kind is Kind.CALL:
            known = self._tools if self._state.known else None
            self._json = JsonCall(self.calls, known)

    def _run(self, final: bool) -> None:
        while self._buffer:
            while self._marks and self._marks[0][0] < self._at:
                self._marks.popleft()
            if self._marks and self._marks[0][0] == self._at:
                if not self._at_mark(final):
                    return
                continue
            limit = self._marks[0][0] - self._at if self._marks else len(self._buffer)
            segment = self._buffer[:limit]
            # A special token ends whatever text stands before it.
            if not self._step(segment, final or limit < len(self._buffer)):
                return

    def _at_mark(self, final: bool) -> bool:
        """A special token is next: a tag, or, where it leads nowhere, nothing. False: it is not whole."""
        tag = self._marks[0][1]
        if len(self._buffer) < len(tag) and not final:
            return False
        move = self._state.tags.get(tag)
        if move is None and self._state.kind in (Kind.LEAD, Kind.GAP) and self._state.then != FAULT:
            self._enter(self._state.then)
            return True
        if move is None:
            self._consume(len(tag))
        else:
            self._follow(tag, move)
        return True

    def _step(self, text: str, final: bool) -> bool:
        """Read some of ``text``, or change the state. False where more text is needed to go on."""
        match self._state.kind:
            case Kind.CALL | Kind.ARGUMENTS:
                return self._step_json(text)
            case Kind.LEAD | Kind.GAP:
                return self._step_space(text, final)
        search = self._search[self._name]
        found = search.search(text) if search else None
        if found is not None:
            if self._plain_text(text[: found.start()]):
                self._follow(found[0], self._state.tags[found[0]])
            return True
        held = 0 if final else self._held(text)
        size = len(text) - held
        if size:
            self._plain_text(text[:size])
        return size > 0

    def _held(self, text: str) -> int:
        """Characters at the end of ``text`` that may be the beginning of a tag."""
        tags = self._tags[self._name]
        longest = max(map(len, tags), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(tag) > size and tag.startswith(end) for tag in tags):
                return size
        return 0

    def _step_space(self, text: str, final: bool) -> bool:
        state = self._state
        rest = text.lstrip()
        space = len(text) - len(rest)
        search = self._search[self._name]
        found = search.match(text, space) if search else None
        if found is not None:
            move = state.tags[found[0]]
            if state.kind is Kind.LEAD and move.act is Act.OPEN:
                self._space += text[:space]  # it may turn out to be no call
            self._consume(space)
            self._follow(found[0], move)
            return True
        if not final and (not rest or any(tag.startswith(rest) for tag in self._tags[self._name])):
            return False
        if state.kind is Kind.GAP:
            self._consume(space)
        if rest or final:
            if state.then == FAULT:
                self._fault()
            else:
                self._enter(state.then)
        return True

    def _step_json(self, text: str) -> bool:
        call = self._json
        assert call is not None
        count = call.feed(text)
        self._consume(count)
        if call.events:
            assert call.begun
            self._begun()
            self._events += call.events
            call.events = []
        if call.fault:
            self._fault()
        elif call.done:
            self._json = None
            self._ended(self._state.then)
        return count > 0 or call.fault or call.done

    def _plain_text(self, text: str) -> bool:
        """Read text that holds no tag. False: it is a fault here."""
        state = self._state
        if not text:
            return True
        if state.kind is Kind.NAME and (
            _NO_NAME.search(text) or sum(map(len, self._word)) + len(text) > _LONGEST_NAME
        ):
            self._fault()
            return False
        self._consume(len(text), reasoning=state.kind is Kind.REASONING)
        match state.kind:
            case Kind.CONTENT | Kind.REASONING:
                self._show(text)
            case Kind.NAME | Kind.KEY:
                self._word.append(text)
            case Kind.VALUE:
                assert self._plain is not None
                self._plain.text(text)
                self._flush_plain()
        return True

    def _show(self, text: str) -> None:
        """Content, or reasoning; white space at its end waits for what follows."""
        reasoning = self._state.kind is Kind.REASONING
        text = self._space + text
        if reasoning and not self._reasoned:
            text = text.lstrip()
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if bare:
            self._reasoned = reasoning
            self._events.append(Reasoning(bare) if reasoning else Content(bare))

    def _consume(self, count: int, reasoning: bool = False) -> None:
        if self._raw is not None:
            self._raw.append(self._buffer[:count])
        self._buffer = self._buffer[count:]
        self._at += count
        while self._tokens and self._tokens[0] < self._at:
            self._tokens.popleft()
            self.reasoning_tokens += reasoning
            self._raw_tokens += self._raw is not None

    # -- tags -------------------------------------------------------------------------------

    def _follow(self, tag: str, move: Move) -> None:
        """A tag was found, and stands at the buffer's front."""
        if move.act in (Act.END, Act.NEXT):
            assert self._plain is not None
            self._plain.end()
            self._flush_plain()
            self._plain = None
            if not self._parallel:
                self._enter("over")
                return
        if self._state.kind is not Kind.REASONING and self._table[move.to].kind is Kind.REASONING:
            self._space = ""
        if move.act in (Act.OPEN, Act.NEXT):
            self._raw, self._raw_tokens = [], 0
            self._opened_in = self._name if self._state.kind is Kind.REASONING else "content"
        elif self._state.kind is Kind.REASONING and move.to != self._name:
            self._space = ""
        word = "".join(self._word).strip()
        if move.act is Act.NAME and not (word and (not self._state.known or word in self._tools)):
            self._fault()
            return
        if not move.keep:
            self._consume(len(tag))
        match move.act:
            case Act.NAME:
                self._begin(word)
            case Act.KEY:
                assert self._plain is not None
                self._plain.key(word)
            case Act.VALUE:
                self._end_value(tag)
        self._flush_plain()
        self._enter(move.to)

    def _end_value(self, tag: str) -> None:
        assert self._plain is not None
        if tag.startswith("\n"):
            self._plain.text("\n")
        self._plain.end_value()

    def _begin(self, name: str) -> None:
        """A call whose name comes before its arguments."""
        if self._has_values:
            self._plain = ParameterCall(self.calls, name, self._tools.get(name))
        else:
            self._json = JsonCall(self.calls, name=name)
            self._events += self._json.events
            self._json.events = []
        self._begun()

    def _begun(self) -> None:
        """The call is one: what was kept of it is not needed any more."""
        if self._raw is not None:
            self._raw = None
            self._space = ""
            self.calls += 1

    def _ended(self, then: str) -> None:
        self._enter(then if self._parallel else "over")

    def _flush_plain(self) -> None:
        if self._plain is not None:
            self._events += self._plain.events
            self._plain.events = []

    def _fault(self) -> None:
        """The text is no call, or none that can be read on. What was kept, and what follows, is what stood
        before the call: content, or reasoning."""
        raw, self._raw = self._raw, None
        self._json = self._plain = None
        self._enter("content" if raw is None else self._opened_in)
        if raw:
            if self._state.kind is Kind.REASONING:
                self.reasoning_tokens += self._raw_tokens
            self._show("".join(raw))


def _joined(events: Iterable[Event]) -> Iterable[Event]:
    last: Event | None = None
    for event in events:
        match last, event:
            case (Reasoning(a), Reasoning(b)):
                last = Reasoning(a + b)
            case (Content(a), Content(b)):
                last = Content(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                last = CallArguments(i, a + b)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last


__all__ = ["CallArguments", "CallBegin", "CallEnd", "Content", "OutputParser", "Reasoning"]
