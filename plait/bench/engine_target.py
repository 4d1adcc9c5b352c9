"""An engine started from this process, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.bench.record import Record
from plait.bench.target import Clock, Message
from plait.bench.workload import Content
from plait.bench.writers import TokenWriter
from plait.config import EngineArgs
from plait.core.sampling_params import SamplingParams
from plait.engine.async_engine import AsyncEngine
from plait.engine.outputs import EngineDeadError, RequestFailed, RequestRefused


class EngineTarget:
    """Token ids in, token ids out; messages are joined as they are, without a chat template."""

    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self.name = name
        self.engine = engine

    @classmethod
    async def start(
        cls, name: str, args: EngineArgs, on_stage: Callable[[str], None] | None = None
    ) -> EngineTarget:
        """Load the model. Raises as ``AsyncEngine.start``."""
        return cls(name, await AsyncEngine.start(args, on_stage=on_stage))

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self.engine.info.pid

    def writer(self) -> TokenWriter:
        """Writes prompts for this engine."""
        tokenizer = self.engine.tokenizer
        return TokenWriter(self.engine.info.vocab_size, tokenizer.special_ids if tokenizer else ())

    async def ask(
        self, history: Sequence[Message], output_len: int, record: Record, clock: Clock
    ) -> Content | None:
        prompt = [token for message in history for token in message.content]
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        answer: list[int] = []
        record.sent = clock()
        record.prompt_tokens = len(prompt)
        try:
            async for delta in self.engine.stream({"prompt_token_ids": prompt}, params):
                if delta.token_ids:
                    record.chunks.append(clock())
                    answer += delta.token_ids
                record.cached_tokens = delta.num_cached_tokens
                record.finish_reason = delta.finish_reason
        except (RequestRefused, RequestFailed, EngineDeadError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended = clock()
        record.output_tokens = len(answer)
        return tuple(answer) if record.ok else None

    async def prepare(self) -> None:
        await self.engine.reset_prefix_cache()

    async def close(self) -> None:
        await self.engine.close()
