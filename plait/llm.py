"""The offline API: a model as an object, prompts in, answers out. Names as in vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plait.blocking import BlockingEngine
from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.memory import memory_share
from plait.engine.outputs import RequestOutput, RequestRefused
from plait.foreign import FOREIGN, answer_to

if TYPE_CHECKING:
    from plait.engine.async_engine import AsyncEngine
    from plait.text.chat import ChatTemplate
    from plait.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Messages = list[dict[str, Any]]


def engine_args(model: str, settings: dict[str, Any]) -> EngineArgs:
    """Engine settings from keywords, among which may be some that vLLM has and plait does not need.

    Raises:
        TypeError: a keyword that neither has.
        ValueError: one that asks for what plait cannot do.
    """
    known = {f.name for f in fields(EngineArgs)}
    own = {}
    for name, value in settings.items():
        if name in known:
            own[name] = value
        elif name == "gpu_memory_utilization" and value is not None:
            limit, why = memory_share(value)
            if settings.get("memory_limit") is None:
                own["memory_limit"] = limit
                log.info("gpu_memory_utilization=%s is memory_limit=%d here: %s", value, limit, why)
            else:
                log.warning("gpu_memory_utilization has no effect: memory_limit says it in bytes")
        elif name in FOREIGN:
            if line := answer_to(name, value):
                log.warning("%s", line)
        else:
            near = get_close_matches(name, sorted(known), n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise TypeError(f"LLM() has no setting {name!r}{hint}")
    return EngineArgs(model=model, **own)


class LLM:
    """A model, loaded into an engine process of its own.

    >>> with LLM("smollm2-135m") as llm:
    ...     [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0))
    ...     print(answer.outputs[0].text)

    Args:
        model: a name that ``plait pull`` knows, a folder, or a GGUF file.
        settings: fields of ``plait.config.EngineArgs``.

    Raises:
        TypeError: an unknown setting; the message names near ones.
        ValueError: settings or a model that cannot work; the message says what would.
    """

    def __init__(self, model: str, **settings: Any):
        self._blocking = BlockingEngine(engine_args(model, settings))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine process and give its memory back. Calling it again does nothing."""
        self._blocking.close()

    @property
    def engine(self) -> AsyncEngine:
        """The engine below, with ``info`` about what it chose and why."""
        if self._blocking.closed:
            raise RuntimeError("this LLM was shut down: make a new one")
        return self._blocking.engine

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: the engine was started with ``skip_tokenizer_init``.
        """
        if self.engine.tokenizer is None:
            raise ValueError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters that the model's generation_config.json asks for."""
        defaults: dict[str, Any] = self.engine.info.generation_defaults.sampling()
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        kv_transfer_params: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; results are in the order of the prompts.

        Ctrl-C aborts all of them and leaves the engine usable.

        Args:
            prompts: one prompt, or a list of prompts.
            sampling_params: one for all, or one for each; by default the model's own.
            use_tqdm: show progress, on a terminal.
            priority: one number per prompt; lower runs earlier under ``scheduling_policy="priority"``.
            kv_transfer_params: one per prompt, for an LLM with ``kv_transfer_config``:
                ``{"do_remote_decode": True}`` computes the prompt for another, which is given what this one
                returns as ``kv_transfer_params``.

        Raises:
            RequestRefused: a prompt that cannot be served, such as one that is too long.
            EngineDeadError: the engine process has ended.
        """
        items = _as_list(prompts)
        params = self._params_for(sampling_params, len(items))
        for name, each in (("priority", priority), ("kv_transfer_params", kv_transfer_params)):
            if each is not None and len(each) != len(items):
                raise ValueError(
                    f"{name} has {len(each)} entries for {len(items)} prompts: give one for each"
                )
        engine = self.engine
        with _Progress(len(items), show=use_tqdm) as progress:

            async def one(i: int) -> RequestOutput:
                try:
                    output = await engine.generate(
                        items[i],
                        params[i],
                        priority=priority[i] if priority is not None else 0,
                        kv_transfer_params=kv_transfer_params[i] if kv_transfer_params is not None else None,
                    )
                except RequestRefused as error:
                    raise RequestRefused(f"prompts[{i}]: {error}") from None
                progress.ended(output)
                return output

            return self._blocking.call(_all(one, len(items)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several.

        Args:
            messages: a conversation (``[{"role": "user", "content": ...}, ...]``), or a list of them.
            chat_template: Jinja source or file, instead of the model's own.
            tools: OpenAI's tool definitions, shown to the model by its template.
            chat_template_kwargs: variables for the template, such as ``enable_thinking``.

        Raises:
            ChatError: messages that the template cannot render. Otherwise as ``generate``.
        """
        if not messages:
            raise ValueError("messages is empty: give at least one message")
        several = cast("Sequence[Messages]", [messages] if isinstance(messages[0], dict) else messages)
        from plait.text.conversation import encode_conversation

        template = self._template(chat_template)
        prompts = [
            encode_conversation(
                template,
                self.get_tokenizer(),
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in several
        ]
        return self.generate([prompt.prompt() for prompt in prompts], sampling_params, use_tqdm)

    def _template(self, given: str | None) -> ChatTemplate:
        from plait.text.chat import ChatTemplate

        if given is None:
            own = self.engine.chat_template
            if own is None:
                raise ValueError("the model has no chat template: pass chat_template, or use generate()")
            return own
        looks_like_source = "{" in given or "\n" in given
        source = given if looks_like_source else Path(given).read_text(encoding="utf-8")
        return ChatTemplate(source, self.get_tokenizer().special_tokens_map)

    def _params_for(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * count
        if len(given) != count:
            counts = f"sampling_params has {len(given)} entries for {count} prompts"
            raise ValueError(f"{counts}: give one for all, or one for each")
        return list(given)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("list[int]", list(prompts))]
    return list(cast("Sequence[Prompt]", prompts))


async def _all(one: Callable[[int], Coroutine[Any, Any, RequestOutput]], count: int) -> list[RequestOutput]:
    """Run ``one(0) .. one(count - 1)`` together. A failure or a cancellation ends them all."""
    tasks = [asyncio.ensure_future(one(i)) for i in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Progress:
    """A bar of prompts answered, with tokens per second; nothing where there is no terminal."""

    def __init__(self, total: int, show: bool):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._tokens = 0
        self._bar = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not (show and console.is_terminal),
        )
        self._task = self._bar.add_task("prompts", total=total, rate="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def ended(self, output: RequestOutput) -> None:
        self._tokens += sum(len(o.token_ids) for o in output.outputs)
        seconds = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / seconds:,.1f} tokens/s" if seconds else ""
        self._bar.update(self._task, advance=1, rate=rate)
