"""What asynchronous scheduling saves: time between steps, and processor time, with it and without.

    python benchmarks/overlap.py smollm2-135m --requests 8 --tokens 48 --threads 1

One engine process and its client, as in `plait serve`, without HTTP. The arms take turns, so that a machine
that slows down slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.async_engine import AsyncEngine
from plait.engine.stats import EngineStats


@dataclass
class Totals:
    """Of all rounds of one arm."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    idle_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, before: EngineStats, after: EngineStats, seconds: float) -> None:
        self.seconds += seconds
        self.tokens += after.generation_tokens_total - before.generation_tokens_total
        self.steps += after.steps_total - before.steps_total
        self.step_seconds += after.step_seconds_total - before.step_seconds_total
        self.idle_seconds += after.idle_seconds_total - before.idle_seconds_total
        self.cpu_seconds += after.cpu_seconds_total - before.cpu_seconds_total

    def line(self) -> str:
        each = [self.step_seconds, self.idle_seconds, self.cpu_seconds]
        step, idle, cpu = (1000 * total / self.steps for total in each)
        return (
            f"{self.tokens / self.seconds:8.1f} tokens/s  {step:8.3f} ms a step  {idle:7.3f} ms between  "
            f"{cpu:8.3f} ms processor  {self.steps} steps"
        )


async def measure(given: argparse.Namespace) -> None:
    arms: dict[bool, AsyncEngine] = {}
    totals = {False: Totals(), True: Totals()}
    for on in totals:
        args = EngineArgs(
            model=given.model, cpu_threads=given.threads, async_scheduling=on, load_format=given.load_format,
            enable_prefix_caching=False, skip_tokenizer_init=True, max_model_len=2048, memory_limit="4GiB",
            max_num_batched_tokens=256,
        )  # fmt: skip
        arms[on] = await AsyncEngine.start(args)
    params = SamplingParams(temperature=given.temperature, max_tokens=given.tokens, ignore_eos=True, seed=1)
    for round_number in range(given.rounds + 1):
        for on, engine in arms.items():
            before, began = await engine.stats(), time.perf_counter()
            prompts = [{"prompt_token_ids": [3 + i, 4, 5, 6, 7]} for i in range(given.requests)]
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            if round_number:  # the first one warms up
                totals[on].add(before, await engine.stats(), time.perf_counter() - began)
    for on, engine in arms.items():
        print(f"{given.threads} threads  {'ahead' if on else 'plain'}  {totals[on].line()}")
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--load-format", default="auto")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
