"""Answers in the terminal: ``plait generate`` and ``plait chat``."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from plait.blocking import BlockingEngine
from plait.cli_report import Stages, murmur, note
from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.memory import in_words
from plait.engine.outputs import CompletionDelta, RequestRefused
from plait.text.conversation import encode_conversation
from plait.text.parsing import Content, OutputFormat, OutputParser, Reasoning

HELP = (
    "/exit ends, /reset forgets the conversation, /system TEXT sets the system prompt, Ctrl-C stops an answer"
)


@dataclass(slots=True)
class Figures:
    """What was measured while an answer was printed."""

    start: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    cached: int = 0

    def add(self, delta: CompletionDelta) -> None:
        self.cached = delta.num_cached_tokens
        if delta.token_ids:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.tokens += len(delta.token_ids)

    def line(self, prompt_tokens: int) -> str:
        if self.first is None:
            return f"{prompt_tokens} prompt tokens, no answer"
        parts = [f"first token after {self.first - self.start:.2f} s", f"{self.tokens} tokens"]
        if self.tokens > 1 and self.last > self.first:
            parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        parts.append(f"{prompt_tokens} prompt tokens, {self.cached} of them cached")
        return ", ".join(parts)


class Printer:
    """Prints one answer: what is said to standard output, and reasoning, dim, to standard error."""

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self._said: list[str] = []
        self._thought = ""

    def take(self, delta: CompletionDelta) -> None:
        if self._parser is None:
            self._say(delta.text)
            return
        events = self._parser.feed(delta.text, delta.token_ids, delta.starts)
        if delta.finish_reason is not None:
            cut = isinstance(delta.stop_reason, str)
            events += self._parser.finish("cut" if cut else delta.finish_reason)
        for event in events:
            match event:
                case Reasoning(text):
                    self._think(text)
                case Content(text):
                    self._say(text)

    def _think(self, text: str) -> None:
        self._thought = text
        murmur(text)

    def _say(self, text: str) -> None:
        if self._thought and text:
            murmur("" if self._thought.endswith("\n") else "\n")
            self._thought = ""
        self._said.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    def stop(self) -> None:
        """The answer was broken off."""
        self._say("\n")

    def end(self) -> str:
        """End the line; what was said."""
        said = "".join(self._said)
        sys.stdout.write("\n" if said and not said.endswith("\n") else "")
        sys.stdout.flush()
        return said


def _given(sampling: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None}


class Talker:
    """Prints answers of one engine as they come."""

    def __init__(self, blocking: BlockingEngine, sampling: dict[str, Any]):
        self._blocking = blocking
        self.engine = blocking.engine
        defaults: dict[str, Any] = self.engine.info.generation_defaults.sampling()
        self._params = SamplingParams(**defaults | _given(sampling))
        template, tokenizer = self.engine.chat_template, self.engine.tokenizer
        self._format = OutputFormat(tokenizer, template.source) if template and tokenizer else None

    def render(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """A conversation as a prompt.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        template, tokenizer = self.engine.chat_template, self.engine.tokenizer
        if template is None or tokenizer is None:
            raise ValueError("the model has no chat template: give one with --chat-template")
        return encode_conversation(template, tokenizer, messages).prompt()

    def answer(self, prompt: str | dict[str, Any], figures: Figures) -> str:
        """Print the answer to ``prompt`` while it is made, and return it. Ctrl-C ends it early.

        In a conversation reasoning is told apart: it goes to standard error, and is not returned.
        """
        parser, shown = None, frozenset[int]()
        if isinstance(prompt, dict) and self._format is not None and self._format.reasoning:
            parser, shown = self._format.parser(prompt["prompt"]), self._format.shown_ids
        printer = Printer(parser)
        stream: AsyncIterator[CompletionDelta] = self.engine.stream(prompt, self._params, shown_ids=shown)
        with closing(self._blocking.iterate(stream)) as deltas:  # type: ignore[type-var]
            try:
                for delta in deltas:
                    figures.add(delta)
                    printer.take(delta)
            except KeyboardInterrupt:
                printer.stop()
                note("stopped")
        return printer.end()


def _start(args: EngineArgs) -> BlockingEngine:
    with Stages(args.model) as stages:
        blocking = BlockingEngine(args, on_stage=stages)
        stages.end()
    return blocking


def generate_once(args: EngineArgs, text: str, sampling: dict[str, Any], chat: bool) -> None:
    """Print the continuation of ``text``, then how long it took and what memory the engine holds."""
    if not text:
        raise ValueError("the prompt is empty; give at least one character")
    SamplingParams(**_given(sampling))  # a value out of range is said before the model is loaded
    with closing(_start(args)) as blocking:
        talker = Talker(blocking, sampling)
        prompt: str | dict[str, Any] = talker.render([{"role": "user", "content": text}]) if chat else text
        figures = Figures()
        talker.answer(prompt, figures)
        count = len(talker.engine.tokenize(prompt).tokens)
        memory = in_words(blocking.call(talker.engine.stats()).memory_bytes)
        note(f"{figures.line(count)}, engine memory {memory}")


def talk(args: EngineArgs, system: str | None, sampling: dict[str, Any]) -> None:
    """A conversation, one line of standard input at a time, until /exit or its end."""
    SamplingParams(**_given(sampling))  # a value out of range is said before the model is loaded
    with closing(_start(args)) as blocking:
        talker = Talker(blocking, sampling)
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401 - gives input() a history and editing

            note(HELP)
        history = _begin(system)
        while (line := _read(interactive)) is not None:
            if line.startswith("/"):
                replaced = _command(line, history)
                if replaced is None:
                    break
                history = replaced
            elif line:
                _turn(talker, history, line)


def _turn(talker: Talker, history: list[dict[str, Any]], line: str) -> None:
    history.append({"role": "user", "content": line})
    figures = Figures()
    try:
        prompt = talker.render(history)
        answer = talker.answer(prompt, figures)
    except RequestRefused as error:
        note(f"{error}; /reset begins anew")
        history.pop()
        return
    history.append({"role": "assistant", "content": answer})
    if sys.stdout.isatty():
        note(figures.line(len(prompt["prompt_token_ids"])))


def _begin(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _command(line: str, history: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Do a command: the history that holds from now on, or None to end."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return None
    if name == "/reset":
        note("the conversation is forgotten")
        return [m for m in history if m["role"] == "system"]
    if name == "/system":
        note("the system prompt is set; the conversation begins anew" if rest else "no system prompt")
        return _begin(rest.strip())
    note(HELP if name == "/help" else f"unknown command {name}: {HELP}")
    return history


def _read(interactive: bool) -> str | None:
    """The next line of the user, None at the end of input."""
    while True:
        try:
            return input("> " if interactive else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not interactive:
                return None
            sys.stdout.write("\n")
            note("/exit ends the conversation")
