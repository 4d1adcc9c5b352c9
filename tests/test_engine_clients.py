"""Several clients of one engine process: nobody's requests are mixed up, and a death is one client's."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from live import small_model

from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.async_engine import AsyncEngine
from plait.engine.model_text import ModelText
from plait.engine.outputs import EngineDeadError
from plait.engine.queue_clock import QueueClock

ENDLESS = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


def test_clients_of_one_engine(model: Path) -> None:
    args = EngineArgs(model=str(model), load_format="dummy", seed=1, cpu_threads=1)

    async def main() -> None:
        first = await AsyncEngine.start(args)
        text = await ModelText.load(args)

        async def attached(number: int) -> AsyncEngine:
            name = f"c-{number}"
            return await AsyncEngine.attach(
                args, text, first.address, first.ready, name=name, number=number, of=3
            )

        others = [await attached(1), await attached(2)]
        try:
            await asyncio.wait_for(scenario(first, *others), 100)
        finally:
            for engine in (*others, first):
                await engine.close()

    async def scenario(first: AsyncEngine, second: AsyncEngine, third: AsyncEngine) -> None:
        every = (first, second, third)
        assert {e.info.max_model_len for e in every} == {first.info.max_model_len}

        # One id at all of them, at once: three requests.
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=2)
        answers = await asyncio.gather(
            *(e.generate([5, 6, i], greedy, request_id="a") for i, e in enumerate(every))
        )
        for i, answer in enumerate(answers):
            alone = await first.generate([5, 6, i], greedy)
            assert [o.token_ids for o in answer.outputs] == [o.token_ids for o in alone.outputs]

        # Seeds of requests that bring none: nobody's twice.
        free = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
        drawn = [
            (await e.generate([9], free)).outputs[0].token_ids for e in (second, third) for _ in range(6)
        ]
        assert len(set(map(tuple, drawn))) == 12

        # All see the same figures.
        totals = {(await e.stats()).generation_tokens_total for e in every}
        assert len(totals) == 1

        # One that is said to have died: its requests end, those of others go on, and nothing more is taken.
        async with (
            aclosing(second.stream([1], ENDLESS)) as lost,
            aclosing(third.stream([2], ENDLESS)) as kept,
        ):
            await anext(lost)
            await anext(kept)
            assert (await first.stats()).running == 2

            async def one_runs() -> bool:
                stats = await first.stats()
                return (stats.running, stats.waiting) == (1, 0)

            await first.forget("c-1")
            await until(one_runs)
            late = asyncio.ensure_future(second.generate([3], free))
            before = (await first.stats()).prompt_tokens_total
            await second.stats()  # answered behind the request: it has been passed over by now
            assert (await first.stats()).prompt_tokens_total == before
            assert not late.done()
            late.cancel()
            await anext(kept)

        # The engine's death is told to all of them, at once.
        waiting = [asyncio.ensure_future(e.generate([4], ENDLESS)) for e in (first, third)]
        idle = asyncio.ensure_future(second.generate([4], ENDLESS))

        async def two_run() -> bool:
            return (await first.stats()).running == 2

        await until(two_run)
        os.kill(first.info.pid, signal.SIGKILL)
        for task in (*waiting, idle):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(task, 5)
        for engine in every:
            with pytest.raises(EngineDeadError):
                engine.check_health()

    asyncio.run(main())


def test_the_queue_clock_keeps_nothing_of_what_has_ended() -> None:
    clock = QueueClock()
    for request in ("a", "b", "c"):
        clock.arrived(request)
    clock.admitted(["a", "b"])
    clock.admitted(["a"])  # again, after a preemption
    first = clock.take("a")
    assert first is not None
    assert first >= 0
    assert clock.take("a") is None
    assert clock.take("c") is None
    clock.forget("b")
    clock.forget("c")
    clock.forget("unknown")
    assert len(clock) == 0
