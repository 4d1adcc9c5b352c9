"""Many streamed answers of a live server at once."""

from __future__ import annotations

import json
import threading
from collections import Counter

import httpx

STREAMS = 16
BODY = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0, "stream": True}


class Stream:
    """One streamed answer, read in a thread of its own."""

    def __init__(self, url: str, tokens: int, number: int) -> None:
        self.begun = threading.Event()
        self.broke = threading.Event()
        self.events: list[str] = []
        self.fault: Exception | None = None
        self._asked = BODY | {"prompt": f"Tale {number}:", "max_tokens": tokens}
        self._url = url
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url + "/v1/completions", json=self._asked, timeout=90
            ) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except Exception as fault:
            self.fault = fault
            self.begun.set()
            self.broke.set()

    def end(self) -> str:
        """How it ended: "whole", the code of an error event, or what broke."""
        if self.fault is not None:
            return repr(self.fault)
        if self.events and self.events[-1] == "[DONE]":
            return "whole"
        return str(json.loads(self.events[-1])["error"]["code"])

    def tokens(self) -> int:
        return sum(len(json.loads(e)["choices"]) for e in self.events if e != "[DONE]")


def begun(url: str, tokens: int, count: int = STREAMS) -> list[Stream]:
    streams = [Stream(url, tokens, i) for i in range(count)]
    for stream in streams:
        assert stream.begun.wait(90)
        assert stream.fault is None
    return streams


def ends(streams: list[Stream]) -> Counter[str]:
    for stream in streams:
        stream.thread.join(120)
    return Counter(stream.end() for stream in streams)


def refused(url: str) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json=BODY | {"max_tokens": 1}, timeout=10, verify=False)
