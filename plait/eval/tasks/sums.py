"""Addition, thought through digit by digit."""

from __future__ import annotations

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw


def addition(draw: Draw) -> Conversation:
    """Two numbers of two digits. Held out are pairs, in either order."""
    a, b = draw.item(
        lambda: (draw.random.randint(10, 99), draw.random.randint(10, 99)),
        lambda pair: ("sum", str(min(pair)), str(max(pair))),
    )
    question = draw.choice((f"What is {a} + {b}?", f"{a} + {b}?", f"What is {a} plus {b}?"))
    return Conversation().user(question).assistant(f"{a} + {b} = {a + b}.", _thought(a, b))


def _thought(a: int, b: int) -> str:
    """Ones with their carry, then tens."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return (
        f"{a % 10} + {b % 10} = {ones}, digit {ones % 10}, carry {carry}. "
        f"{a // 10} + {b // 10} + {carry} = {tens}."
    )
