"""The engine's process and its client when things go wrong: stuck, killed, misused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live import alive, small_model

from plait.config import ConfigError, EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine import client as client_module
from plait.engine.async_engine import AsyncEngine
from plait.engine.outputs import EngineDeadError, RequestRefused

LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


def args(model: Path, **settings) -> EngineArgs:
    return EngineArgs(model=str(model), load_format="dummy", seed=1, cpu_threads=1, **settings)


def drive(model: Path, scenario) -> None:
    """Run ``scenario(engine)`` on an engine that is closed afterwards; nothing may be left of it."""

    async def main() -> None:
        engine = await AsyncEngine.start(args(model))
        folder = engine._client._folder
        try:
            await asyncio.wait_for(scenario(engine), 60)
        finally:
            await asyncio.wait_for(engine.close(), 60)
        assert not alive(engine.info.pid)
        assert not os.path.exists(folder)

    asyncio.run(main())


def test_callers_ids_do_not_meet(model):
    """A request whose id looks like another's answer is its own request."""

    async def scenario(engine):
        two = SamplingParams(temperature=0, max_tokens=30, n=2, ignore_eos=True)
        first = asyncio.create_task(engine.generate([5, 6, 7], two, request_id="a"))
        second = await engine.generate([5, 6, 7], LONG, request_id="a-0")
        assert second.finished
        assert [len(o.token_ids) for o in (await first).outputs] == [30, 30]

    drive(model, scenario)


def test_an_id_in_use_is_refused_and_harms_nobody(model):
    async def scenario(engine):
        first = asyncio.create_task(engine.generate([5, 6, 7], LONG, request_id="a"))
        while not engine._live:
            await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="in use"):
            await engine.generate([5, 6, 7], LONG, request_id="a")
        assert len((await first).outputs[0].token_ids) == 500

    drive(model, scenario)


def test_closing_a_stream_frees_its_memory(model):
    async def scenario(engine):
        stream = engine.stream([5, 6, 7], LONG)
        await anext(stream)
        await stream.aclose()
        while (await engine.stats()).pages_used:
            pass
        assert (await engine.stats()).requests_total == {"abort": 1}

    drive(model, scenario)


def test_abort_by_id(model):
    async def scenario(engine):
        reasons = []
        async for delta in engine.stream([5, 6, 7], LONG, request_id="x"):
            engine.abort("x")
            reasons.append(delta.finish_reason)
        assert reasons[-1] == "abort"

    drive(model, scenario)


def test_a_stuck_engine_is_killed_and_its_requests_get_errors(model, monkeypatch):
    monkeypatch.setattr(client_module, "STOP_SECONDS", 1.0)

    async def scenario(engine):
        os.kill(engine.info.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(engine.generate([5, 6, 7], LONG)) for _ in range(3000)]
        while len(engine._live) < len(waiting):
            await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)

    drive(model, scenario)


def test_nothing_between_engine_and_client_drops_messages(model):
    async def scenario(engine):
        assert engine._client._socket.get_hwm() == 0

    drive(model, scenario)


def test_a_killed_client_leaves_no_process_and_no_folder(model):
    program = f"""
import asyncio, sys
from plait.config import EngineArgs
from plait.engine.async_engine import AsyncEngine
async def main():
    engine = await AsyncEngine.start(EngineArgs(model={str(model)!r}, load_format="dummy", cpu_threads=1))
    print(engine.info.pid, engine._client._folder, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    pid, folder = client.stdout.readline().split()
    client.kill()
    client.wait()
    deadline = client_module.STOP_SECONDS
    waiter = subprocess.run(
        ["timeout", str(deadline), "tail", f"--pid={pid}", "-f", "/dev/null"], check=False
    )
    assert waiter.returncode == 0, "the engine outlives its client"
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": "5"}, "it takes int, not str"),
        ({"memory_limit": 1.5e9}, "it takes None or int or str, not float"),
        ({"enable_prefix_caching": 1}, "it takes bool, not int"),
        ({"seed": 2**64}, "it must fit 64 bits"),
        ({"target_itl_ms": float("nan")}, "it must be a finite number"),
    ],
)
def test_settings_of_the_wrong_kind_start_nothing(model, settings, message):
    given = EngineArgs(model=str(model), load_format="dummy")
    for name, value in settings.items():
        setattr(given, name, value)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(AsyncEngine.start(given))


def test_token_ids_in_and_out_without_a_tokenizer(model):
    async def main():
        engine = await AsyncEngine.start(args(model, skip_tokenizer_init=True))
        try:
            output = await engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(output.outputs[0].token_ids) == 4
            assert output.outputs[0].text == ""
            with pytest.raises(RequestRefused, match="skip_tokenizer_init"):
                await engine.generate([5, 6, 7], SamplingParams(max_tokens=4, stop="x"))
            with pytest.raises(RequestRefused, match="send token ids"):
                await engine.generate("text", SamplingParams(max_tokens=4))
        finally:
            await engine.close()

    asyncio.run(main())
