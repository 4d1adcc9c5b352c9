"""Chat templates against ``transformers``, on templates in the manner of well-known models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import PreTrainedTokenizerFast

from plait.text.chat import ChatError, ChatTemplate
from plait.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' + (system or 'none') + '<|eot|>' }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unexpected role ' + message.role) }}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if 'image' in part or part.type == 'image' %}
                {{- '<|image|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = show(message.content) | trim if message.content is defined else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments|items %}
                {{- '<parameter=' + key + '>\\n' }}
                {%- set plain = value is string or value is number %}
                {{- value if plain else value | tojson }}
                {{- '\\n</parameter>\\n' }}
                {%- if key == 'stop here' %}{%- break %}{%- endif %}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
)

CONCATENATES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c['function']['name'] + ' ' + c['function']['arguments'] + ']' }}{% endfor %}\n{% endfor %}"
)

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN}

USER = {"role": "user", "content": "  What is <b>2 + 2</b>, “naïve”? 日本 "}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "It is 4. "}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "é": ["<x>", {}]}},
}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <é>", "parameters": {"type": "object"}},
}

CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "calls": [SYSTEM, USER, CALLS, RESULT],
    "reasoning": [USER, {**ASSISTANT, "reasoning_content": "2 and 2\n"}],
}


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tiny.byte_level(), **names)


def ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize(
    ("name", "chat"),
    [(n, c) for n in TEMPLATES for c in CHATS if (n, c) != ("chatml", "calls")],  # ChatML knows no tools
)
def test_renders_as_transformers(
    theirs: PreTrainedTokenizerFast, name: str, chat: str, generation: bool
) -> None:
    messages, before = CHATS[chat], copy.deepcopy(CHATS[chat])
    for options in ({}, {"tools": [TOOL]}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            messages,
            chat_template=TEMPLATES[name],
            add_generation_prompt=generation,
            tokenize=False,
            **options,
        )
        assert ours(TEMPLATES[name]).render(messages, add_generation_prompt=generation, **options) == expected
    assert messages == before


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("content", ["It is", "It is ", "  It is\n\n", "a"])
def test_continues_the_last_message_as_transformers(
    theirs: PreTrainedTokenizerFast, name: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], continue_final_message=True, tokenize=False
    )
    rendered = ours(TEMPLATES[name]).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected
    assert rendered.endswith((content.strip(), content))


def test_smollm2_template(smollm2: Path, smollm2_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = Tokenizer.load(smollm2)
    chat = ChatTemplate.of(tokenizer)
    theirs = smollm2_tokenizer
    for messages in ([USER], [SYSTEM, USER, ASSISTANT, USER]):
        rendered = chat.render(messages)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered == expected
        assert tokenizer.encode_chat(rendered) == theirs.encode(expected, add_special_tokens=False)


# Content


PARTS = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]


def test_parts_of_text_become_what_the_template_reads(theirs: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": PARTS}]
    assert "user\none\ntwo<|im_end|>" in ours(CHATML).render(messages)
    assert "user\nonetwo<|im_end|>" in ours(QWEN).render(messages)
    assert ours(PARTS_ONLY).render(messages) == "user:onetwo;"
    assert ours(PARTS_ONLY).render([{"role": "user", "content": "one"}]) == "user:one;"
    plain = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    expected = theirs.apply_chat_template(
        plain, chat_template=QWEN, add_generation_prompt=True, tokenize=False
    )
    assert ours(QWEN).render(plain) == expected
    rendered = ours(PARTS_ONLY).render(plain, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "user:one"


def test_arguments_come_as_the_template_reads_them() -> None:
    as_json = json.loads(json.dumps(CALLS))
    as_json["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "é": ["<x>", {}]}'
    for source in (LLAMA, QWEN):
        assert ours(source).render([USER, as_json]) == ours(source).render([USER, CALLS])
    for call in (CALLS, as_json):
        assert '[add {"a": 2, "é": ["<x>", {}]}]' in ours(CONCATENATES).render([USER, call])
    empty = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert "<function=f>\n</function>" in ours(QWEN).render([USER, empty])


def test_reasoning_is_found_under_either_name() -> None:
    message = {**ASSISTANT, "reasoning": "because"}
    assert "<think>\nbecause\n</think>" in ours(QWEN).render([USER, message])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is empty"),
        (["hi"], r"messages\[0\] must be an object with a role, not a string"),
        ([USER, {"content": "x"}], r"messages\[1\] needs a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a list, not a number"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\] has type 'image_url', but this model takes text only",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            r"'input_audio', but this model takes text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"needs a string for its text, not null"),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            r"messages\[0\]\.tool_calls\[0\] must be an object with a func",
        ),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"function needs a name"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{1"}}]}],
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is no valid JSON: Expecting",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            r"arguments must be a JSON object, not a list",
        ),
        ([{"role": "critic", "content": "x"}], r"refused these messages: unexpected role critic"),
    ],
)
def test_unreadable_messages_are_named(messages: list[Any], message: str) -> None:
    with pytest.raises(ChatError, match=message):
        ours(LLAMA).render(messages)


def test_a_template_that_fails_is_an_error_of_its_own() -> None:
    with pytest.raises(ChatError, match=r"refused these messages: 'dict object' has no attribute 'content'"):
        ours(CHATML).render([CALLS])
    with pytest.raises(ChatError, match=r"failed on these messages \(TypeError: can only concatenate str"):
        ours("{{ 'a' + 1 }}").render([USER])
    with pytest.raises(ChatError, match=r"no valid Jinja: .* \(line 2\)"):
        ChatTemplate("\n{% if %}")
    with pytest.raises(ChatError, match=r"this model has no chat template"):
        ChatTemplate.of(Tokenizer(tiny.byte_level()))
    with pytest.raises(ChatError, match=r"excludes add_generation_prompt"):
        ours(CHATML).render([USER], continue_final_message=True)
    with pytest.raises(ChatError, match=r"does not show the last message's text"):
        ours("{{ messages|length }}").render([USER], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatError, match=r"has no text to continue"):
        ours(CHATML).render([CALLS], add_generation_prompt=False, continue_final_message=True)


# The sandbox


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10**9) %}{% endfor %}"],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(ChatError):
        ours(source).render([USER])


def test_templates_see_nothing_behind_their_helpers() -> None:
    assert ours("{{ raise_exception.__globals__ }}{{ cycler.__init__ }}").render([USER]) == ""


def test_helpers_of_transformers_are_there(theirs: PreTrainedTokenizerFast) -> None:
    source = (
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
        "{{ messages[0] | tojson(indent=2, sort_keys=true) }}{{ {'b': 1} | tojson(separators=(',', ':')) }}"
        "{{ 'é<' | tojson(ensure_ascii=true) }}{{ dict(a=1) | tojson }}{{ documents }}"
        "{% for i in [1, 2] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    )
    expected = theirs.apply_chat_template([USER], chat_template=source, tokenize=False)
    assert ours(source).render([USER], add_generation_prompt=False) == expected


def test_named_templates() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools[0].function.name }}"})
    assert (chat.render([USER]), chat.render([USER], tools=[TOOL])) == ("plain", "tools: add")
    assert ChatTemplate({"rag": "only"}).render([USER]) == "only"
