"""A reader of one page, who runs its blocks in order: in one folder, at one prompt of Python, with servers
that stay up until another takes their port."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import yaml
from snippets import Block, commands_of, same_output
from thinking import thinking_model

_SECONDS = 180
_READY = re.compile(r"at https?://[^/]*:(\d+)/v1, engine process \d+")
_ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost):(\d+)\b")
STAND_IN = "Qwen/Qwen3.5-4B"
"""A model of gigabytes. A small one with random weights stands in for it: same family, formats, template."""

_PLAIT = """#!{python}
import json, os, socket, sys

arguments = sys.argv[1:]
model = {stand_in!r}
if model in arguments:
    at = arguments.index(model)
    arguments[at : at + 1] = [{folder!r}, "--load-format", "dummy", "--seed", "1"]
    if "--served-model-name" not in arguments:
        arguments += ["--served-model-name", model]
if arguments[:1] != ["serve"] or "--help" in arguments:
    os.execv({python!r}, [{python!r}, "-m", "plait", *arguments])
with socket.socket(socket.AF_UNIX) as reader:
    reader.connect({socket!r})
    reader.sendall(json.dumps([arguments, os.getcwd()]).encode() + b"\\n")
    code, said = json.loads(reader.makefile().read())
sys.stderr.write(said)
sys.exit(code)
"""
"""Stands before ``plait`` on the reader's PATH: a server would keep the terminal, so it runs beside it."""

_PROMPT = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    text, file = json.loads(line)
    written, fault = io.StringIO(), None
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            exec(compile(text, file, "exec"), names)
        except BaseException:
            fault = traceback.format_exc()
    print(json.dumps([fault, written.getvalue()]), flush=True)
"""
"""An interactive Python: blocks of a page go on from one another."""


class Failed(AssertionError):
    """A block did not do what its page says."""


class Server:
    """A ``plait serve`` process, and where it listens."""

    def __init__(self, arguments: list[str], folder: str) -> None:
        command = [sys.executable, "-m", "plait", *arguments, "--port", "0"]
        self._process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        self._said: list[str] = []
        self._known = threading.Event()
        self.port: int | None = None
        threading.Thread(target=self._read, daemon=True).start()
        self._known.wait(_SECONDS)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            if found := _READY.search(line):
                self.port = int(found[1])
                self._known.set()
        self._process.wait()
        self._known.set()

    @property
    def said(self) -> str:
        return "".join(self._said)

    @property
    def up(self) -> bool:
        return self.port is not None and self._process.poll() is None

    def end(self) -> int:
        """Its exit code after Ctrl-C."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


class Servers:
    """Those that any page may use again: started without flags, they are what another reader would start."""

    def __init__(self) -> None:
        self._plain: dict[tuple[str, ...], Server] = {}

    def start(self, arguments: list[str], folder: str) -> tuple[Server, bool]:
        """A server, and whether it is shared."""
        if any(argument.startswith("-") for argument in arguments):
            return Server(arguments, folder), False
        key = tuple(arguments)
        if key not in self._plain or not self._plain[key].up:
            self._plain[key] = Server(arguments, folder)
        return self._plain[key], True

    def end(self) -> None:
        for server in self._plain.values():
            server.end()


class Reader:
    """Runs the blocks of one page.

    Args:
        folder: where the reader stands; empty at first.
        servers: shared with the readers of other pages.
    """

    def __init__(self, folder: Path, servers: Servers) -> None:
        self._servers = servers
        self._own: list[Server] = []
        self._ports: dict[int, Server] = {}
        self._bin, self.folder = folder / "bin", folder / "work"
        self._bin.mkdir()
        self.folder.mkdir()
        self._model = thinking_model(_made(folder / "model"))
        self._python = Path(sys.executable)
        self._prompt: subprocess.Popen[str] | None = None
        self._listen(folder)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")},
            "PATH": os.pathsep.join([str(self._bin), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }

    def _listen(self, folder: Path) -> None:
        path = str(folder / "s")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        self._put(
            "plait",
            _PLAIT.format(python=sys.executable, stand_in=STAND_IN, folder=str(self._model), socket=path),
        )

    def _put(self, name: str, text: str) -> None:
        (self._bin / name).write_text(text)
        (self._bin / name).chmod(0o755)

    def _serve(self) -> None:
        """Start servers for the ``plait`` on the reader's PATH."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, connection.makefile("rw") as file:
                arguments, folder = json.loads(file.readline())
                file.write(json.dumps(self._start(arguments, folder)))

    def _start(self, arguments: list[str], folder: str) -> tuple[int, str]:
        port = 8000
        if "--port" in arguments:
            at = arguments.index("--port")
            port = int(arguments[at + 1])
            del arguments[at : at + 2]
        before = self._ports.pop(port, None)
        if before in self._own:
            before.end()
        server, shared = self._servers.start(arguments, folder)
        if not shared:
            self._own.append(server)
        if server.up:
            self._ports[port] = server
        return (0 if server.up else 1), server.said

    def read(self, block: Block) -> None:
        """Run a block.

        Raises:
            Failed: it ended with an error, or wrote something else than the page shows.
        """
        text = _ADDRESS.sub(lambda found: f"127.0.0.1:{self._port(block, int(found[2]))}", block.text)
        match block.language:
            case "bash":
                self._bash(block, text)
            case "console":
                for command, shown in commands_of(text):
                    came = self._bash(block, command)
                    if shown and not same_output(shown, came):
                        raise Failed(f"{block}: the page shows\n{shown}\nwhat came is\n{came}")
            case "python":
                self._type(block, text)
            case "javascript":
                (self.folder / "page.mjs").write_text(text)
                self._bash(block, "node page.mjs")
            case "json":
                json.loads(text)
            case "toml":
                tomllib.loads(text)
            case "yaml":
                assert list(yaml.safe_load_all(text))

    def _port(self, block: Block, port: int) -> int:
        if port not in self._ports or not self._ports[port].up:
            raise Failed(f"{block}: no server listens on port {port}; those of the page: {list(self._ports)}")
        found = self._ports[port].port
        assert found is not None
        return found

    def _bash(self, block: Block, text: str) -> str:
        """What a script wrote; its standard error too, if it failed."""
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
        if ended.returncode:
            raise Failed(f"{block}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        return ended.stdout

    def _type(self, block: Block, text: str) -> None:
        if self._prompt is None:
            self._prompt = subprocess.Popen(
                [self._python, "-c", _PROMPT],
                cwd=self.folder, env=self._environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._prompt.stdin is not None
        assert self._prompt.stdout is not None
        text = text.replace(f'LLM("{STAND_IN}"', f'LLM("{self._model}", load_format="dummy"')
        text = "\n" * (block.line - 1) + text  # so that tracebacks show lines of the page
        self._prompt.stdin.write(json.dumps([text, str(block.page)]) + "\n")
        self._prompt.stdin.flush()
        answer = self._prompt.stdout.readline()
        fault, written = json.loads(answer) if answer else ("Python ended", "")
        if fault is not None:
            raise Failed(f"{block}: {fault}\n{written}")

    def installs(self) -> None:
        """Give the reader an environment of his own, for pages that ask him to install packages."""
        home = self.folder.parent / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        [packages] = home.glob("lib/python*/site-packages")
        (packages / "parent.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
        self._python = home / "bin" / "python"
        torch = Path(__file__).parent.parent / "constraints.txt"
        self._put("pip", f'#!/bin/sh\nPIP_CONSTRAINT={torch} exec {self._python} -m pip --quiet "$@"\n')
        self._put("python", f'#!/bin/sh\nexec {self._python} "$@"\n')

    def end(self) -> None:
        """Leave: Python ends, and so do the servers of this page alone."""
        if self._prompt is not None:
            self._prompt.communicate(timeout=60)
        self._socket.close()
        for server in self._own:
            server.end()
        shutil.rmtree(self.folder)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
