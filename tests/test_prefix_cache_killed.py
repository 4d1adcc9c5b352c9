"""`kill -9` while the prefix cache's folder is being written, at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import VOCAB, checkpoint
from offline import make_core, run

from plait.core.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, logprobs=2)
PROMPT = [random.Random(1).randrange(3, VOCAB) for _ in range(500)]


@pytest.fixture(scope="module")
def cold():
    [answer] = run(make_core(checkpoint("qwen3_5"), enable_prefix_caching=False), [PROMPT], PARAMS, seeds=[3])
    return answer


@pytest.fixture
def writers(tmp_path):
    """Starts an engine that writes to the folder; ends it with SIGKILL some time after it has begun."""
    with forks(tmp_path) as start:
        yield start


@contextlib.contextmanager
def forks(folder: Path):
    command = [
        sys.executable, str(Path(__file__).with_name("killed_writer.py")), str(checkpoint("qwen3_5")),
        str(folder), ",".join(map(str, PROMPT)),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None

    def write_and_die(seed: int, seconds: float) -> None:
        before = time.time_ns()
        process.stdin.write(f"{seed}\n")
        pid = int(process.stdout.readline())
        deadline = time.monotonic() + 60
        while not any(path.stat().st_mtime_ns > before for path in folder.glob("*")):
            assert time.monotonic() < deadline, "the engine writes nothing"
            time.sleep(0.005)
        time.sleep(seconds)  # the moment is random; nothing waits for it
        os.kill(pid, signal.SIGKILL)
        assert process.stdout.readline() == "over\n"

    try:
        yield write_and_die
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def kill_and_restart(writers, folder: Path, cold, times: int) -> tuple[int, int]:
    """How many starts found half-written files, and how many found something to restore."""
    moments = random.Random(times)
    interrupted = restored = 0
    for seed in range(times):
        writers(seed, moments.uniform(0.0, 0.25))
        left = len(list(folder.glob("*/*.part")))
        core = make_core(
            checkpoint("qwen3_5"), prefix_cache_dir=str(folder), block_size=64,
            prefix_cache_dir_limit="24MiB",
        )  # fmt: skip
        assert core.tier.files.found.half_written == left
        assert not list(folder.glob("*/*.part"))
        if left:
            interrupted += 1
            assert any(f"{left} half-written removed" in str(d) for d in core.resolved.decisions)
        [answer] = run(core, [PROMPT], PARAMS, seeds=[3])
        assert (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs)
        assert core.tiers.counters.reads_failed == 0  # what has its name is whole
        restored += core.tiers.counters.restores
        core.tier.close()  # without a flush: what is there shall be the killed engines'
        core.worker.close()
        assert sum(path.stat().st_size for path in folder.glob("*/*.[ps]*")) <= 24 * 2**20
    return interrupted, restored


def test_killed_a_few_times(writers, tmp_path, cold):
    kill_and_restart(writers, tmp_path, cold, 4)


@pytest.mark.slow
def test_killed_fifty_times(writers, tmp_path, cold):
    interrupted, restored = kill_and_restart(writers, tmp_path, cold, 50)
    assert interrupted > 0, "no kill came during a write"
    assert restored > 10


@pytest.mark.slow
def test_two_at_once_killed_one_by_one(tmp_path, cold):
    """Engines in processes of their own, on one folder: each is killed while the other goes on writing."""
    moments = random.Random(2)
    with forks(tmp_path) as one, forks(tmp_path) as two, ThreadPoolExecutor(2) as pool:

        def both(seed: int, seconds: float) -> None:
            later = pool.submit(two, 1000 + seed, moments.uniform(0.0, 0.4))
            one(seed, seconds)
            later.result()

        _, restored = kill_and_restart(both, tmp_path, cold, 25)
    assert restored > 5
