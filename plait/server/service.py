"""What every endpoint needs: the engine, its names and defaults, and prompts as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from plait.core.sampling_params import SamplingParams, Structure
from plait.server.course import Course
from plait.server.desk import Desk, Order
from plait.server.errors import APIError
from plait.server.journal import RequestLog
from plait.server.logprobs import LogprobFormatter
from plait.server.metrics import ServerMetrics
from plait.server.prompts import Prompt, Turn
from plait.server.protocol import Request
from plait.server.settings import ServerSettings
from plait.server.shared import Shared
from plait.server.structure import Form
from plait.server.tools import Toolbox
from plait.server.tracing import Tracer
from plait.text.chat import ChatError
from plait.text.conversation import encode_conversation
from plait.text.grammar import GrammarError, Grammars
from plait.text.parsing import OutputFormat, OutputParser

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine
    from plait.text.tokenizer import Tokenizer

T = TypeVar("T")

_LONG_TEXT = 20_000
"""characters from which a text is tokenized beside the event loop: below, a thread costs more"""

_COMPILE_SECONDS = 10.0
"""that a grammar may take to be compiled; the library's limits end it sooner on all but a busy machine"""


class Service:
    """An engine and what the server knows about it."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, shared: Shared):
        self.engine = engine
        self.settings = settings
        self.model = engine.info.model
        self.metrics = ServerMetrics(self.model, shared.metrics)
        self.logprobs = LogprobFormatter(engine.tokenizer)
        self.defaults: dict[str, Any] = engine.info.generation_defaults.sampling()
        self.format = self._output_format()
        info = engine.info
        ends = info.generation_defaults.eos_token_ids
        self.grammars = Grammars(lambda: engine.tokenizer, info.vocab_size, ends)
        self._longest_token = self._most_characters()
        journal = RequestLog(settings.max_log_len) if settings.enable_log_requests else None
        self._tracer = Tracer(settings.traces_endpoint, self.model) if settings.traces_endpoint else None
        told: list[Callable[[Order, Course], None]] = [self.metrics.request]
        if self._tracer is not None:
            told.append(self._tracer)
        board = shared.board()
        self.desk = Desk(engine, settings.max_waiting, settings.stream_interval, journal, told, board)

    async def close(self) -> None:
        """Send what is left of traces."""
        if self._tracer is not None:
            await self._tracer.close()

    def _most_characters(self) -> int:
        """Characters of the longest token: a text of more than so many for each token does not fit."""
        if self.engine.tokenizer is None:
            return 1
        texts = map(self.engine.tokenizer.token_bytes, range(self.engine.info.vocab_size))
        return max(16, max(map(len, texts), default=1))

    def _output_format(self) -> OutputFormat | None:
        """What the model's answers look like; None where there is no text, or no conversation.

        Raises:
            ValueError: a parser that does not exist.
        """
        tokenizer, template = self.engine.tokenizer, self.engine.chat_template
        if tokenizer is None or template is None:
            return None
        settings = self.settings
        return OutputFormat(tokenizer, template.source, settings.reasoning_parser, settings.tool_call_parser)

    def check(self, body: Request) -> None:
        """Refuse what this server, started as it is, does not serve.

        Raises:
            APIError: another model, a priority where there are none, or a token id that does not exist.
        """
        self.check_model(body.model)
        limit = self.engine.info.vocab_size
        for token in body.logit_bias or ():
            if token.isdecimal() and (len(token) > 10 or int(token) >= limit):
                token = token[:12]
                message = f"logit_bias names token id {token}: the vocabulary has {limit} tokens"
                raise APIError(400, message, "logit_bias")
        self.check_priority(body.priority)

    def check_priority(self, priority: int) -> None:
        if priority and not self.settings.priorities:
            message = f"priority={priority}: the server runs requests in order of arrival"
            raise APIError(400, f"{message}; start it with --scheduling-policy priority", "priority")

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.model:
            message = f"model {asked!r} is not served here; this server has {self.model!r}"
            raise APIError(404, message, "model", "model_not_found")

    def thinking_kwargs(self, effort: str | None) -> dict[str, Any]:
        """``reasoning_effort`` as names for the chat template.

        Raises:
            APIError: the template has nothing that could follow it.
        """
        template = self.engine.chat_template
        if effort is None or template is None:
            return {}
        if "reasoning_effort" in template.source:
            return {"reasoning_effort": effort}
        if "enable_thinking" in template.source:
            if effort == "none":
                return {"enable_thinking": False}
            message = (
                f"reasoning_effort={effort!r}: this model thinks or does not (reasoning_effort 'none'); "
                "thinking_token_budget bounds how much"
            )
            raise APIError(400, message, "reasoning_effort")
        message = f"reasoning_effort={effort!r}: the model's chat template has no such setting; leave it out"
        raise APIError(400, message, "reasoning_effort")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, for requests that need text.

        Raises:
            APIError: the engine runs without one.
        """
        if self.engine.tokenizer is None:
            message = "the server runs with --skip-tokenizer-init: send token ids to /v1/completions"
            raise APIError(400, message, "prompt")
        return self.engine.tokenizer

    def with_budget(
        self,
        params: SamplingParams,
        prompt: Prompt,
        tokens: int | None,
        param: str = "thinking_token_budget",
    ) -> SamplingParams:
        """The parameters with a bound on reasoning.

        Raises:
            APIError: the model's reasoning is not told apart.
        """
        if tokens is None:
            return params
        assert self.format is not None
        try:
            budget = self.format.thinking_budget(prompt.text or "", tokens)
        except ValueError as error:
            raise APIError(400, str(error), param) from None
        return replace(params, thinking_budget=budget)

    async def with_form(
        self, params: SamplingParams, prompt: Prompt, form: Form | None, tools: Toolbox | None = None
    ) -> SamplingParams:
        """The parameters with what the answer must look like, once that is known to be possible.

        Raises:
            APIError: the form, or a strict tool, asks for what cannot be kept.
        """
        tools = tools or Toolbox()
        if tools.must_call or (tools.declared and (form is not None or tools.strict)):
            grammar, param = await asyncio.to_thread(self._call_grammar, prompt, form, tools), "tools"
        elif form is not None:
            grammar, param = form.grammar, form.param
        else:
            return params
        await self._check_grammar(grammar, param)
        if self.format is None or prompt.text is None or prompt.parser is None or tools.must_call:
            return replace(params, structure=Structure(grammar))
        calls = bool(tools.declared)
        return replace(params, structure=self.format.structure(grammar, prompt.text, calls))

    def _call_grammar(self, prompt: Prompt, form: Form | None, tools: Toolbox) -> str:
        assert self.format is not None
        make = self.format.call_grammar(self.grammars.holds)
        try:
            if tools.must_call:
                return make.forced(tools.functions, self.format.forced(tools.only), tools.parallel)
            if form is not None and form.schema is None:
                message = f"{form.param} cannot stand beside tools: use JSON, or tool_choice 'none'"
                raise APIError(400, message, form.param)
            return make.free(tools.functions, tools.parallel, form.schema if form else None)
        except ValueError as fault:
            raise APIError(400, f"tools: {fault}", "tools") from None

    async def _check_grammar(self, grammar: str, param: str) -> None:
        compiled = asyncio.shield(asyncio.wrap_future(self.grammars.submit(grammar)))
        try:
            await asyncio.wait_for(compiled, _COMPILE_SECONDS)
        except GrammarError as fault:
            raise APIError(400, f"{param}: {fault}", param) from None
        except TimeoutError:
            message = f"{param}: not compiled in {_COMPILE_SECONDS:g} seconds; simplify it"
            raise APIError(400, message, param) from None

    def check_length(self, count: int, unit: str = "tokens") -> None:
        """Refuse a prompt that is too long, by its tokens, or by its characters before it is tokenized."""
        given = self.settings.max_prompt_tokens
        if given is None and unit == "tokens":
            return  # the engine checks the prompt beside max_tokens
        limit = given or self.engine.info.max_model_len
        most = limit if unit == "tokens" else limit * self._longest_token
        if count > most:
            message = f"the prompt has {count} {unit}: this server takes {limit} tokens"
            raise APIError(400, f"{message}, at most {most} {unit}", None, "context_length_exceeded")

    async def encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        """Token ids of a prompt of the completions endpoint.

        Raises:
            APIError: it is too long.
        """
        if isinstance(prompt, list):
            self.check_length(len(prompt))
            return Prompt(prompt)
        self.check_length(len(prompt), "characters")
        tokenizer = self.tokenizer()
        ids = await _beside(
            lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens), len(prompt)
        )
        self.check_length(len(ids))
        return Prompt(ids, prompt)

    async def render(self, turn: Turn) -> Prompt:
        """Token ids of a conversation, and how its answers are to be read.

        Raises:
            APIError: the messages, the template's complaint about them, or tools that cannot be had.
        """
        template = self.engine.chat_template
        tokenizer = self.tokenizer()
        if template is None or self.format is None:
            message = "the model has no chat template: start with --chat-template, or use /v1/completions"
            raise APIError(400, message, turn.param)
        self._check_tools(turn.tools)
        length = sum(len(str(message.get("content"))) for message in turn.messages)
        self.check_length(length, "characters")
        output, forced = self.format, ""
        if turn.tools.must_call:
            if not turn.add_generation_prompt:
                raise APIError(
                    400, "tool_choice asks for a call, and there is no answer to begin", "tool_choice"
                )
            forced = output.forced(turn.tools.only)
        try:
            conversation = await _beside(
                lambda: encode_conversation(
                    template,
                    tokenizer,
                    turn.messages,
                    tools=turn.tools.declared or None,
                    add_generation_prompt=turn.add_generation_prompt,
                    continue_final_message=turn.continue_final_message,
                    ending=(lambda text: output.closing(text) + forced) if forced else None,
                    **self.settings.default_chat_template_kwargs | turn.template_kwargs,
                ),
                length,
            )
        except ChatError as error:
            raise APIError(400, str(error), turn.param) from None
        except UnicodeError:
            message = f"{turn.param} hold an unpaired surrogate, which is no text"
            raise APIError(400, message, turn.param) from None
        self.check_length(len(conversation.tokens))
        text = conversation.text.removesuffix(forced)

        def parser() -> OutputParser:
            return output.parser(text, turn.tools.schemas, forced=forced, parallel=turn.tools.parallel)

        return Prompt(
            conversation.tokens,
            conversation.text,
            conversation.boundaries,
            parser if output.reasoning or turn.tools.schemas else None,
            output.shown_ids,
        )

    def _check_tools(self, tools: Toolbox) -> None:
        if not tools.declared:
            return
        assert self.format is not None
        if self.format.tools is None:
            message = (
                "tools cannot be served: the chat template does not show in which format the model calls "
                "them; start the server with --tool-call-parser"
            )
            raise APIError(400, message, "tools")
        if not (tools.must_call or self.settings.enable_auto_tool_choice):
            message = "tool_choice 'auto' is turned off on this server (--no-enable-auto-tool-choice)"
            raise APIError(400, message, "tool_choice")


async def _beside(work: Callable[[], T], length: int) -> T:
    if length < _LONG_TEXT:
        return work()
    return await asyncio.to_thread(work)
