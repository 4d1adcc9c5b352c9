"""An engine that says what the conversation asks for: a greeting, a call, or what came of the call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from scripted import ScriptedEngine
from thinking import TEMPLATE

from plait.engine.outputs import CompletionDelta

GREETING = "Hello, wörld! 👋"
CALL = (
    "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
THOUGHTS = {"greet": "I should greet.\n</think>\n\n", "look": "I should look.\n</think>\n\n"}


class Answering(ScriptedEngine):
    """Says hello, calls the tool that it was shown, or tells what came of it."""

    def __init__(self) -> None:
        super().__init__(template=TEMPLATE, max_model_len=10_000)

    async def stream(self, prompt: Any, *args: Any, **more: Any) -> AsyncIterator[CompletionDelta]:
        text = bytes(prompt["prompt_token_ids"]).decode()
        thinks = text.endswith("<think>\n")
        if "<tool_response>" in text.rpartition("<|im_start|>user")[2]:
            said = THOUGHTS["look"] + "It will be sunny."
        elif "get_weather" in text:
            said = THOUGHTS["look"] + CALL
        else:
            said = THOUGHTS["greet"] + GREETING
        if not thinks:
            said = said.partition("</think>\n\n")[2]
        speaker = ScriptedEngine(said, None, TEMPLATE, 10_000)
        async for delta in speaker.stream(prompt, *args, **more):
            yield delta
