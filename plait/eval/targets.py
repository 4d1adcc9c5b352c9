"""Who is asked: an engine started here, or any server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.async_engine import AsyncEngine
from plait.engine.outputs import RequestFailed, RequestRefused
from plait.eval.question import Question, Said, call_of
from plait.server.desk import Order
from plait.server.errors import APIError
from plait.server.prompts import Turn
from plait.server.replies import Reply
from plait.server.service import Service
from plait.server.settings import ServerSettings
from plait.server.shared import Shared
from plait.server.tools import toolbox

if TYPE_CHECKING:
    import httpx

_TRIES = 5


class TargetError(ValueError):
    """A server that cannot be asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions are asked.

    Args:
        max_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        seed: of the first question; each has its own.
        template_kwargs: names for the chat template, such as ``enable_thinking``.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)


class Target(Protocol):
    name: str

    async def ask(self, question: Question, asking: Asking, seed: int) -> Said: ...

    async def close(self) -> None: ...


class EngineTarget:
    """An engine of one's own, asked as its server would ask it, without HTTP."""

    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self.name = name
        self._engine = engine
        self._service = Service(engine, ServerSettings(), Shared())
        if engine.chat_template is None or engine.tokenizer is None:
            raise TargetError(f"{name} has no chat template; give one with --chat-template")

    @classmethod
    async def start(
        cls, name: str, args: EngineArgs, on_stage: Callable[[str], None] | None = None
    ) -> EngineTarget:
        """Load the model. Raises as ``AsyncEngine.start``."""
        engine = await AsyncEngine.start(args, on_stage=on_stage)
        try:
            return cls(name, engine)
        except BaseException:
            await engine.close()
            raise

    async def ask(self, question: Question, asking: Asking, seed: int) -> Said:
        params = SamplingParams(temperature=asking.temperature, max_tokens=asking.max_tokens, seed=seed)
        try:
            tools = toolbox(list(question.tools))
            prompt = await self._service.render(Turn(list(question.messages), tools, asking.template_kwargs))
            request = await self._service.desk.generate(Order(prompt, params, f"eval-{question.id}"))
        except (APIError, RequestRefused, RequestFailed) as error:
            return Said(error=str(error))
        [output] = request.outputs
        reply = Reply.of(output, prompt.parser() if prompt.parser else None)
        return Said(
            reply.content or "",
            tuple(call_of(call.name, call.json) for call in reply.calls),
            reply.finish_reason,
            output_tokens=len(output.token_ids),
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=request.num_cached_tokens,
        )

    async def close(self) -> None:
        await self._engine.close()


class HTTPTarget:
    """A model behind an OpenAI-compatible base URL.

    Args:
        base_url: with or without ``/v1``.
        model: as the server calls it; None: the first it lists.
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which a question counts as failed.
    """

    def __init__(
        self, base_url: str, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise TargetError("asking a server needs httpx: pip install 'plait[bench]'") from error
        base_url = base_url.rstrip("/")
        self.name = base_url if base_url.endswith("/v1") else base_url + "/v1"
        self.model = model
        self._http: httpx.AsyncClient = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )

    async def connect(self) -> None:
        """Find the model.

        Raises:
            TargetError: the server cannot be reached, or lists no model.
        """
        if self.model is not None:
            return
        import httpx

        try:
            response = await self._http.get(self.name + "/models")
            response.raise_for_status()
            self.model = str(response.json()["data"][0]["id"])
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            raise TargetError(
                f"{self.name} cannot be reached ({why}); is the server up, and the URL right?"
            ) from error
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{self.name}/models lists no model; name one") from error

    async def ask(self, question: Question, asking: Asking, seed: int) -> Said:
        import httpx

        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            "temperature": asking.temperature,
            "max_tokens": asking.max_tokens,
            "seed": seed,
        }
        if question.tools:
            body["tools"] = list(question.tools)
        if asking.template_kwargs:
            body["chat_template_kwargs"] = asking.template_kwargs
        try:
            response = await self._post(body)
            return _said(response) if response.status_code == 200 else Said(error=_refusal(response))
        except httpx.HTTPError as error:
            return Said(error=f"{type(error).__name__}: {error}")

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Send it; a server that is full is asked again when it says so."""
        for left in reversed(range(_TRIES)):
            response = await self._http.post(self.name + "/chat/completions", json=body)
            if response.status_code not in (429, 503) or not left:
                break
            await asyncio.sleep(_seconds(response.headers.get("Retry-After")))
        return response

    async def close(self) -> None:
        await self._http.aclose()


def _seconds(retry_after: str | None) -> float:
    try:
        return min(60.0, max(0.1, float(retry_after or 1.0)))
    except ValueError:
        return 1.0


def _refusal(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    return f"status {response.status_code}: {message}"


def _said(response: httpx.Response) -> Said:
    """The first choice of a chat completion; an error if it is none."""
    try:
        body = response.json()
        choice = body["choices"][0]
        message = choice["message"]
        calls = tuple(
            call_of(call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        )
        usage = body.get("usage") or {}
        return Said(
            message.get("content") or "",
            calls,
            choice.get("finish_reason"),
            output_tokens=usage.get("completion_tokens") or 0,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Said(error=f"the server's reply is no chat completion ({type(error).__name__}: {error})")
