"""What whole answers look like, for the OpenAPI document; answers themselves are written without them.

A test holds every kind of answer against these shapes. They name every field: one more is a mismatch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Object: TypeAlias = dict[str, Any]
Finish: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]


class Shape(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


def _sometimes() -> Any:
    """A field that an answer may lack."""

    def without_default(schema: dict[str, Any]) -> None:
        del schema["default"]

    return Field(None, json_schema_extra=without_default)


class Fault(Shape):
    message: str
    type: str
    param: str | None
    code: str | int


class Error(Shape):
    """An error in OpenAI's shape, with the type that Anthropic has beside it."""

    type: Literal["error"]
    error: Fault


# -- OpenAI: chat and completions ---------------------------------------------------------------------


class PromptTokens(Shape):
    cached_tokens: int


class CompletionTokens(Shape):
    reasoning_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens = _sometimes()


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = _sometimes()
    reasoning_content: str | None = _sometimes()
    tool_calls: list[ToolCall] = _sometimes()


class Logprob(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]


class Ranked(Shape):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[str, Ranked] | None]


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: list[int] = _sometimes()


class ChatCompletion(Shape):
    """A whole answer of the chat API."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = _sometimes()
    prompt_token_ids: list[int] = _sometimes()
    kv_transfer_params: Object = _sometimes()


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs = _sometimes()
    prompt_token_ids: list[int] = _sometimes()
    token_ids: list[int] = _sometimes()


class Completion(Shape):
    """A whole answer of the completions API."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    kv_transfer_params: Object = _sometimes()


# -- OpenAI: responses --------------------------------------------------------------------------------


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Object]
    logprobs: list[Object]


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Shape):
    type: Literal["summary_text"]
    text: str


ItemStatus: TypeAlias = Literal["completed", "incomplete"]


class MessageItem(Shape):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Shape):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str = _sometimes()


class CallItem(Shape):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: CompletionTokens
    total_tokens: int


class Incomplete(Shape):
    reason: Literal["max_output_tokens"]


class Response(Shape):
    """A whole answer of the responses API: items, and what was asked."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Annotated[MessageItem | ReasoningItem | CallItem, Field(discriminator="type")]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Object
    store: Literal[False]
    background: Literal[False]
    temperature: float
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    metadata: Object


# -- Anthropic ----------------------------------------------------------------------------------------


class TextBlock(Shape):
    type: Literal["text"]
    text: str


class ThinkingBlock(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Object


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(Shape):
    """A whole answer of the messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


# -- plait's own --------------------------------------------------------------------------------------


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    prompt: str


class Capabilities(Shape):
    completions: bool
    chat: bool
    reasoning: str | None
    tools: str | None
    vision: bool
    embeddings: bool


class Model(Shape):
    """The model that is served: how long its context is, and what it can."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    family: str
    capabilities: Capabilities


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Version(Shape):
    version: str
