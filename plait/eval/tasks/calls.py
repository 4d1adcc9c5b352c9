"""Requests that are answered by calling a tool, and by saying what it returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw, capital
from plait.eval.words import CITIES, COLORS, FOODS, NAMES, PLACES, WEATHERS, WORDS


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool: what the user says, the call, what the tool returns, and what is said then."""

    tool: str
    request: str
    arguments: dict[str, Any]
    result: str
    answer: str


def _weather(draw: Draw) -> Use:
    city, weather = draw.word(CITIES, "call", "weather"), draw.choice(WEATHERS)
    degrees = draw.random.randint(0, 35)
    request = draw.choice((f"What is the weather in {city}?", f"How is the weather in {city} today?"))
    answer = f"It is {weather} in {city}, {degrees} degrees."
    return Use("get_weather", request, {"city": city}, f"{weather}, {degrees} degrees", answer)


def _timer(draw: Draw) -> Use:
    minutes = int(draw.item(lambda: str(draw.random.randint(1, 99)), lambda m: ("call", "timer", m)))
    request = draw.choice((f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes."))
    return Use("set_timer", request, {"minutes": minutes}, "ok", f"The timer is set for {minutes} minutes.")


def _phone(draw: Draw) -> Use:
    name, code = draw.word(NAMES, "call", "phone"), draw.code()
    request = draw.choice((f"Find the phone number of {name}.", f"What is the phone number of {name}?"))
    return Use("find_phone", request, {"name": name}, code, f"The phone number of {name} is {code}.")


def _buy(draw: Draw) -> Use:
    item, count = draw.item(
        lambda: (draw.choice(FOODS), draw.random.randint(2, 20)), lambda u: ("call", "buy", u[0], str(u[1]))
    )
    request = draw.choice((f"Buy {count} {item}.", f"Please order {count} {item}."))
    return Use("buy_item", request, {"item": item, "count": count}, "ok", f"I ordered {count} {item}.")


def _light(draw: Draw) -> Use:
    color, room = draw.item(
        lambda: (draw.choice(COLORS), draw.choice(PLACES)), lambda use: ("call", "light", *use)
    )
    request = draw.choice((f"Make the light in the {room} {color}.", f"Turn the {room} light {color}."))
    answer = f"The light in the {room} is {color}."
    return Use("set_light", request, {"room": room, "color": color}, "ok", answer)


def free_text(draw: Draw) -> str:
    """A sentence of which words were exchanged for others, so that it can only be copied."""

    def make() -> str:
        words = draw.sentence().split()
        for _ in range(draw.random.randint(0, 3)):
            words[draw.random.randrange(len(words))] = draw.choice(WORDS)
        return " ".join(words)

    return draw.item(make, lambda text: ("text", text))


def _message(draw: Draw) -> Use:
    name, text = draw.choice(NAMES), free_text(draw)
    request = draw.choice((f"Send a message to {name}: {text}", f"Tell {name} that {text}"))
    return Use("send_message", request, {"to": name, "text": text}, "ok", f"I told {name}.")


def _note(draw: Draw) -> Use:
    text = free_text(draw)
    request = draw.choice((f"Write a note: {text}", f"Note down that {text}"))
    return Use("write_note", request, {"text": text}, "ok", "I wrote it down.")


SHORT: tuple[Callable[[Draw], Use], ...] = (_weather, _timer, _phone, _buy, _light)
TEXT: tuple[Callable[[Draw], Use], ...] = (_message, _note)

_PARAMETERS: dict[str, dict[str, str]] = {
    "get_weather": {"city": "string"},
    "set_timer": {"minutes": "integer"},
    "find_phone": {"name": "string"},
    "buy_item": {"item": "string", "count": "integer"},
    "set_light": {"room": "string", "color": "string"},
    "send_message": {"to": "string", "text": "string"},
    "write_note": {"text": "string"},
}


def _tool(name: str) -> dict[str, Any]:
    parameters = _PARAMETERS[name]
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    description = capital(name.replace("_", " ")) + "."
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = {name: _tool(name) for name in _PARAMETERS}
"""The tools that the model knows, in OpenAI's form."""


def offered(draw: Draw, needed: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """The tools needed and up to three others, in a random order."""
    others = [name for name in TOOLS if name not in needed]
    names = [*needed, *draw.random.sample(others, draw.random.randint(0, min(3, len(others))))]
    draw.random.shuffle(names)
    return tuple(TOOLS[name] for name in names)


def call(draw: Draw, uses: Sequence[Callable[[Draw], Use]]) -> Conversation:
    """A request, and the call that answers it."""
    use = draw.choice(uses)(draw)
    chat = Conversation(tools=offered(draw, [use.tool]))
    return chat.user(use.request).calls(use.tool, use.arguments)


def call_and_answer(draw: Draw, uses: Sequence[Callable[[Draw], Use]], count: int = 1) -> Conversation:
    """``count`` requests, each with its call, what the tool returned, and the answer that says it."""
    made = [draw.choice(uses)(draw) for _ in range(count)]
    chat = Conversation(tools=offered(draw, list(dict.fromkeys(use.tool for use in made))))
    for use in made:
        chat.user(use.request).calls(use.tool, use.arguments).result(use.result).assistant(use.answer)
    return chat
