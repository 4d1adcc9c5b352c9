"""Stop strings, found while the text still grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several strings in a text given character by character.

    An Aho-Corasick automaton: its state is the longest end of the text that begins some stop string, so one
    character costs one transition however many strings there are, and the number of characters that must be
    held back is the depth of the state.

    The text ends where any stop string is first complete; of several that are complete at the same
    character, the longest counts. Where tokens begin and end plays no part.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = self._next[state][char]
        self._found[state] = string

    def _link(self) -> None:
        """Breadth first: a state fails to the longest proper end of it that begins a string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def feed(self, text: str) -> tuple[str, int] | None:
        """Read on. Returns the stop string that is complete and the number of characters of ``text`` up to
        its end, or None if there is none in what was read."""
        for count, char in enumerate(text, 1):
            self._state = self._step(self._state, char)
            found = self._found[self._state]
            if found is not None:
                return found, count
        return None

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[self._state]
