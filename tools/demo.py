"""A small hybrid thinks, calls a tool, and remembers: the second question about the same text comes from the
prefix cache. ``python tools/demo.py [MODEL]``; plait-tiny by default."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

from plait import LLM, SamplingParams
from plait.engine.outputs import RequestOutput
from plait.eval.draw import Draw
from plait.eval.tasks.calls import TOOLS
from plait.eval.tasks.recall import recall
from plait.server.replies import Reply
from plait.text.parsing import OutputFormat

Message = dict[str, Any]


class Talk:
    """One model, and what is printed of it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        template = llm.engine.chat_template
        if template is None:
            raise SystemExit("this model has no chat template")
        self._template = template
        self._format = OutputFormat(llm.get_tokenizer(), template.source)

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> tuple[Message, RequestOutput]:
        """Print the last message and the answer; the answer as a message, and its figures."""
        last = messages[-1]
        shown = last["content"] if len(last["content"]) < 200 else f"... {last['content'][-150:]}"
        print(f"{last['role']:>9}: {shown}")
        params = SamplingParams(temperature=0, max_tokens=128)
        [output] = self._llm.chat(list(messages), params, use_tqdm=False, tools=list(tools) or None)
        prompt = self._template.render(messages, list(tools) or None)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        reply = Reply.of(output.outputs[0], self._format.parser(prompt, schemas))
        if reply.reasoning and reply.reasoning.strip():
            print(f"{'thinks':>9}: {reply.reasoning.strip()}")
        answer: Message = {"role": "assistant", "content": reply.content or ""}
        if reply.content:
            print(f"{'says':>9}: {reply.content.strip()}")
        if reply.calls:
            answer["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
                for call in reply.calls
            ]
            print(f"{'calls':>9}: " + ", ".join(f"{call.name}({call.json})" for call in reply.calls))
        return answer, output


def thinking(talk: Talk) -> None:
    print("\nA sum, thought through:")
    talk.ask([{"role": "user", "content": "What is 27 + 48?"}])


def calling(talk: Talk) -> None:
    print("\nA tool:")
    tools = [TOOLS["get_weather"], TOOLS["send_message"]]
    chat: list[Message] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    answer, _ = talk.ask(chat, tools)
    for call in answer.get("tool_calls", ()):
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 24 degrees"}
        talk.ask([*chat, answer, result], tools)


def remembering(talk: Talk) -> None:
    print("\nA text, and two questions about it:")
    told = recall(Draw(Random(7), held=True), 480, 3, ("code", "city", "pet"), questions=2)
    chat: list[Message] = []
    figures = []
    for question in (told.messages[0], told.messages[2]):
        chat.append(question)
        answer, output = talk.ask(chat)
        chat.append(answer)
        figures.append(output)
    for number, output in zip(("first", "second"), figures, strict=True):
        first = output.metrics.first_token or 0.0
        count, cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(
            f"{number:>9} question: {count} prompt tokens, {cached} of them from the prefix cache; "
            f"first token after {1000 * first:.1f} ms"
        )


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "plait-tiny"
    with LLM(model) as llm:
        print(f"{model}: {json.dumps(llm.engine.info.family)}")
        talk = Talk(llm)
        thinking(talk)
        calling(talk)
        remembering(talk)


if __name__ == "__main__":
    main()
