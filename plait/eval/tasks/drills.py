"""Training text that teaches to look up what was said: many pairs, many questions, few other words.

A model that sees only the tasks themselves does not begin to recall within any time one would wait; on these
it does within minutes.
"""

from __future__ import annotations

from plait.eval.conversation import Conversation
from plait.eval.draw import Draw
from plait.eval.words import NAMES

_FORMS = ("{name} {value}", "{name} is {value}.", "The {kind} of {name} is {value}.")


def _drill(draw: Draw, length: int, values: dict[str, str], kind: str, value_size: int) -> Conversation:
    form = draw.choice(_FORMS)
    each = value_size + (1, 3, 6)[_FORMS.index(form)]
    # A question is one name; what it is answered with is as long as what was told.
    questions = max(2, min(24, (length - 20 - each * len(values)) // (each + 1)))
    told = " ".join(form.format(name=name, value=value, kind=kind) for name, value in values.items())
    asked = [draw.choice(tuple(values)) for _ in range(questions)]
    answer = " ".join(form.format(name=name, value=values[name], kind=kind) for name in asked)
    return Conversation().user(f"{told}\nList: {' '.join(asked)}").assistant(answer)


def words(draw: Draw, length: int) -> Conversation:
    """Pairs of a name and a word."""
    names = draw.random.sample(NAMES, draw.random.randint(2, 9))
    values = {name: draw.value("word", name) for name in names}
    return _drill(draw, length, values, "word", 1)


def digits(draw: Draw, length: int) -> Conversation:
    """Pairs of a name and one to four digits."""
    count = draw.choice((1, 2, 2, 3, 4, 4, 4))
    names = draw.random.sample(NAMES, draw.random.randint(2, 6))
    return _drill(draw, length, {name: draw.code(count) for name in names}, "code", count + 1)
