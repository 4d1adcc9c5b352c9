"""A model that thinks and calls tools: a chat template in the manner of Qwen3.5's, with its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
from checkpoints import FAMILIES
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from plait.text.chat import ChatTemplate
from plait.text.tokenizer import Tokenizer

TEMPLATE = """{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content %}{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set system = text_of(messages[0].content) | trim if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\nYou may call these functions:\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nTo call one, write:\\n\\n<tool_call>\\n<function=example>\\n' }}
    {{- '<parameter=name>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- if system %}{{- '\\n\\n' + system }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text_of(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('a system message must come first') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | trim if message.reasoning_content else '' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] | trim %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('unexpected role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

SPECIAL = ("<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the coming days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def backend() -> Backend:
    """The byte-level tokenizer of ``tiny`` with the tokens of the template; the tags are not special."""
    made = tiny.byte_level()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return made


def tokenizer() -> Tokenizer:
    return Tokenizer(backend(), eos_token="<|im_end|>", chat_templates={"default": TEMPLATE})


def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE)


def thinking_model(folder: Path, **config: Any) -> Path:
    """A hybrid's config, tokenizer and template, for random weights."""
    made = backend()
    tiny.save(made, folder, chat_template=TEMPLATE, eos_token="<|im_end|>")
    kind, shape = FAMILIES["qwen3_5"]
    given = {"model_type": kind, "architectures": ["Qwen3_5ForCausalLM"], **shape}
    given |= {"vocab_size": made.get_vocab_size(), "max_position_embeddings": 131072}
    given |= {"eos_token_id": made.token_to_id("<|im_end|>"), "tie_word_embeddings": False}
    given |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", **config}
    (folder / "config.json").write_text(json.dumps(given))
    return folder
