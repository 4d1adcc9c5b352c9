"""Requests of the OpenAI API, with the sampling fields that vLLM adds.

A field is either honoured or refused by name; none is ignored in silence. Null means "not given".
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from plait.core.sampling_params import MAX_LOGPROBS, SamplingParams
from plait.server.errors import APIError, unknown_field
from plait.server.settings import TEMPLATE_ARGUMENTS
from plait.server.structure import Form, asked_form

Neutral = dict[str, tuple[Any, ...]]
"""Fields that are not served, each with the values that ask for nothing."""

_NOT_SERVED: Neutral = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
}
_NOT_SERVED_CHAT: Neutral = _NOT_SERVED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
_NOT_SERVED_COMPLETION: Neutral = _NOT_SERVED | {"suffix": ("",), "prompt_embeds": ()}


_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters for which a model may bring its own defaults."""

_PASSED_ON = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)


def _refuse_what_is_no_text(data: dict[str, Any]) -> None:
    """JSON can spell halves of surrogate pairs; no tokenizer can read them and no answer can hold them."""
    for name, value in data.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except (UnicodeError, RecursionError):
            shown = name.encode("utf-8", "replace").decode()
            raise _not_served(shown, f"{shown} holds an unpaired surrogate, which is no text") from None


def only_served(data: Any, fields: list[str], not_served: Neutral) -> Any:
    """The fields of a body that are given; the others are refused by name (null means "not given")."""
    if not isinstance(data, dict):
        return data
    _refuse_what_is_no_text(data)
    kept = {}
    for name, value in data.items():
        if value is None:
            continue
        if name in fields:
            whole = type(value) is float and abs(value) < 2**53 and value.is_integer()
            kept[name] = int(value) if whole else value  # 16.0 is an integer in JSON
        elif name not in not_served:
            raise _not_served(name, unknown_field(name, fields))
        elif not any(value == v and type(value) is type(v) for v in not_served[name]):
            raise _not_served(name, _why(name, value, not_served[name]))
    return kept


class Body(BaseModel):
    """What the bodies of all endpoints share.

    Each field is honoured or refused by name, null means "not given", and a value has its field's type.
    """

    not_served: ClassVar[Neutral] = {}
    example: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def _documented(schema: dict[str, Any], cls: type[Any]) -> None:
        """Add to the JSON schema what the validator takes beside the fields, and an example."""
        schema["examples"] = [cls.example]
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                rest = {key: field.pop(key) for key in ("title", "default") if key in field}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **rest}
        for name, values in cls.not_served.items():
            schema["properties"][name] = {"enum": [*values, None], "description": "Not served."}

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_documented)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, data: Any) -> Any:
        return only_served(data, list(cls.model_fields), cls.not_served)


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class Request(Body):
    """Fields that chat and text completions share."""

    not_served: ClassVar[Neutral] = _NOT_SERVED

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    priority: int = Field(0, ge=-(2**63), lt=2**63)
    cache_salt: str | None = None
    timeout: float | None = Field(None, gt=0, le=10**6)
    """seconds after which the answer ends with what there is"""
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    # Labels for the client's own records: they ask for nothing.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, Any] | None = None

    async def form(self) -> Form | None:
        """What the request asks of its answer's form.

        Raises:
            APIError: it cannot be had; names the field.
        """
        if self.response_format is None and self.structured_outputs is None:
            return None
        return await asyncio.to_thread(asked_form, self.response_format, self.structured_outputs)

    def max_new_tokens(self) -> int | None:
        raise NotImplementedError

    @property
    def prefills_alone(self) -> bool:
        """The prompt is computed here, for another engine that answers."""
        return bool((self.kv_transfer_params or {}).get("do_remote_decode"))

    def sampling_params(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """The request's sampling parameters over the model's ``defaults``.

        Raises:
            APIError: a value outside its range.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in _PASSED_ON}
        values["max_tokens"] = self.max_new_tokens()
        if self.prefills_alone:
            values |= {"n": 1, "min_tokens": 0}
            if self.stream:
                raise APIError(
                    400, "do_remote_decode comes with whole answers only: leave out stream", "stream"
                )
        for name in _DEFAULTED:
            value = getattr(self, name)
            if value is None:
                value = defaults.get(name)
            if value is not None:
                values[name] = value
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs comes with whole answers only: leave out stream"
            raise APIError(400, message, "prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options is for streams: set stream to true", "stream_options")
        return checked_params(**(values | more))


def checked_params(**values: Any) -> SamplingParams:
    """Sampling parameters, or an APIError that names the one that is out of range."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        message = str(error)
        raise APIError(400, message, param=message.partition("=")[0]) from None


class ChatRequest(Request):
    """Body of ``POST /v1/chat/completions``."""

    not_served: ClassVar[Neutral] = _NOT_SERVED_CHAT
    example: ClassVar[dict[str, Any]] = {
        "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 64, "temperature": 0.7,
    }  # fmt: skip

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        taken = sorted(TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys())
        if taken:
            raise _not_served("chat_template_kwargs", f"chat_template_kwargs must not set {taken[0]}")
        for i, message in enumerate(self.messages):
            for name in ("function_call", "audio"):
                if message.get(name) is not None:
                    raise _not_served("messages", f"messages[{i}].{name} is not served; leave it out")
        return self

    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def logprobs_asked(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all."""
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise APIError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                message = f"top_logprobs={self.top_logprobs}: it must be from 0 to {MAX_LOGPROBS}"
                raise APIError(400, message, "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """Body of ``POST /v1/completions``."""

    not_served: ClassVar[Neutral] = _NOT_SERVED_COMPLETION
    example: ClassVar[dict[str, Any]] = {"prompt": "Once upon a time", "max_tokens": 16, "logprobs": 2}

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a string or its token ids.

        Raises:
            APIError: there is none, or one is empty.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise APIError(400, "prompt is an empty list: give at least one prompt", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return list(cast("list[str | list[int]]", prompt))


def _not_served(name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("not_served", "{message}", {"field": name, "message": message})


def _why(name: str, value: Any, neutral: tuple[Any, ...]) -> str:
    shown = repr(value) if isinstance(value, str | int | float) else "the value given"
    accepted = " or ".join(["null", *map(repr, neutral)])
    return f"{name} is not served ({shown}); leave it out, or send {accepted}"
