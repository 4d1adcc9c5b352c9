"""Engines that write a prefix cache's folder until they are killed.

``python killed_writer.py MODEL FOLDER`` imports everything once; for each line on standard input it forks an
engine that answers one prompt after the other, and prints its process id.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from checkpoints import VOCAB
from offline import make_core, run

from plait.core.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def serve(model: Path, folder: Path, seed: int, prompt: list[int]) -> None:
    """Until killed: the common prompt, with a new one before each time."""
    rng = random.Random(seed)
    core = make_core(model, prefix_cache_dir=str(folder), block_size=64, prefix_cache_dir_limit="24MiB")
    while True:
        run(core, [[rng.randrange(3, VOCAB) for _ in range(200)], prompt], PARAMS, at_once=1)
        core.reset_prefix_cache()


def main() -> None:
    model, folder = map(Path, sys.argv[1:3])
    prompt = [int(token) for token in sys.argv[3].split(",")]
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(model, folder, int(line), prompt)
        print(pid, flush=True)
        os.waitpid(pid, 0)  # until whoever asked for it kills it
        print("over", flush=True)


if __name__ == "__main__":
    main()
