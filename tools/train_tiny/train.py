"""The training loop: a few processes of one thread each that average their gradients.

On two cores two processes are a third to a half faster than one with two threads. A run can be stopped (by
SIGTERM or Ctrl-C) or frozen at any time, and goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from tokenizers import Tokenizer
from torch.nn import functional as F

from tools.train_tiny.evaluate import accuracies, held_out_sets
from tools.train_tiny.log import Log
from tools.train_tiny.model import Shape, TinyLM
from tools.train_tiny.stages import STAGES, Stage
from tools.train_tiny.state import Progress, Run
from tools.train_tiny.text import Encoder, rows

_FROZEN_FOR = timedelta(hours=24)
"""How long a process may be silent before the others give up."""
_WARM_UP = 60
_LOG_EVERY = 20
_LAST_RATE = 0.03


@dataclass(frozen=True, slots=True)
class Options:
    """Args:
    folder: of the run; holds ``tokenizer/``.
    processes: that train together.
    seed: of the weights and of the text.
    rate: the learning rate before it falls.
    average_over: steps over which weights are averaged, about.
    evaluate_every: tokens.
    items: held-out questions of each kind in an evaluation.
    save_every: seconds.
    until: tokens of the whole run; 0: until it is stopped.
    anneal: tokens at the end over which the learning rate falls to nearly nothing; without ``until``, the
        end begins now.
    """

    folder: Path
    processes: int = 2
    seed: int = 1
    rate: float = 4e-3
    average_over: int = 250
    evaluate_every: int = 500_000
    items: int = 64
    save_every: float = 180.0
    until: int = 0
    anneal: int = 0


def launch(options: Options) -> None:
    """Start the processes and wait for them."""
    rendezvous = options.folder / f"rendezvous-{os.getpid()}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = processes.start_processes(
        _process, (options, str(rendezvous)), options.processes, join=False, start_method="spawn"
    )

    def pass_on(number: int, _frame: object) -> None:
        for pid in context.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        while not context.join():
            pass
    finally:
        rendezvous.unlink(missing_ok=True)


def _process(rank: int, options: Options, rendezvous: str) -> None:
    torch.set_num_threads(1)
    if options.processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=options.processes,
            timeout=_FROZEN_FOR,
        )
    Trainer(rank, options).run()
    if options.processes > 1:
        dist.destroy_process_group()


class Trainer:
    """One process of a run; all of them hold the same weights."""

    def __init__(self, rank: int, options: Options):
        self._rank, self._options = rank, options
        tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer" / "tokenizer.json"))
        self._encoder = Encoder(tokenizer)
        self._log = Log(options.folder, rank)
        self._stop = False
        shape = Shape(vocab_size=tokenizer.get_vocab_size())
        model, average = TinyLM(shape, options.seed), TinyLM(shape, options.seed)
        self._run = Run(model, average.requires_grad_(False), _optimizer(model, options.rate), Progress())
        resumed = self._run.load(options.folder)
        if options.anneal and not self.progress.anneal_over:
            end = options.until or self.progress.tokens + options.anneal
            self.progress.anneal_from, self.progress.anneal_over = end - options.anneal, options.anneal
        self._sets = held_out_sets(self._encoder, options.items)
        self._began = (time.monotonic() - self.progress.wall, self.progress.cpu)
        self._saved = time.monotonic()
        self._loss: float | None = None
        parameters = sum(weight.numel() for weight in model.parameters())
        self._log.write(
            "start", resumed=resumed, parameters=parameters, vocabulary=shape.vocab_size,
            tokens=self.progress.tokens, processes=options.processes, seed=options.seed, rate=options.rate,
        )  # fmt: skip

    @property
    def progress(self) -> Progress:
        return self._run.progress

    @property
    def _stage(self) -> Stage:
        return STAGES[self.progress.stage]

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        while not self._over():
            before = self.progress.tokens
            stopped = self._step()
            if self._rank == 0 and time.monotonic() - self._saved > self._options.save_every:
                self._save()
            if stopped:
                break
            if before // self._options.evaluate_every != self.progress.tokens // self._options.evaluate_every:
                self._evaluate()
        else:
            self._evaluate()
        if self._rank == 0:
            self._save()
        self._log.write("end", tokens=self.progress.tokens, wall=round(self.progress.wall, 1))

    def _ask_to_stop(self, number: int, _frame: object) -> None:
        self._stop = True

    def _over(self) -> bool:
        progress = self.progress
        if self._options.until and progress.tokens >= self._options.until:
            return True
        return bool(progress.anneal_over) and progress.tokens >= progress.anneal_from + progress.anneal_over

    def _rate(self) -> float:
        """Rises, stays, and falls in a straight line at the end."""
        progress = self.progress
        rate = self._options.rate * min(1.0, (progress.step + 1) / _WARM_UP)
        if progress.anneal_over:
            done = (progress.tokens - progress.anneal_from) / progress.anneal_over
            rate *= 1 - (1 - _LAST_RATE) * min(1.0, max(0.0, done))
        return rate

    def _step(self) -> bool:
        """One step; whether some process was asked to stop."""
        stage, progress, model = self._stage, self.progress, self._run.model
        count = max(1, stage.batch // stage.length // self._options.processes)
        seed = f"{self._options.seed} {stage.name} {progress.stage_step} {self._rank}"
        ids, weights = (torch.from_numpy(part) for part in rows(self._encoder, stage, count, seed))
        losses = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        scale = weights[:, 1:].flatten()
        (losses * scale).sum().div(scale.sum()).backward()
        answers = scale == 1
        loss = float(losses.detach()[answers].mean())
        stopped = self._share(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in self._run.optimizer.param_groups:
            group["lr"] = self._rate()
        self._run.optimizer.step()
        self._run.optimizer.zero_grad(set_to_none=False)
        self._follow()
        progress.step += 1
        progress.stage_step += 1
        taken = count * stage.length * self._options.processes
        progress.tokens += taken
        progress.stage_tokens += taken
        return stopped

    def _share(self, loss: float) -> bool:
        """Average gradients between processes, and figures with them; whether one was asked to stop."""
        gradients = [weight.grad for weight in self._run.model.parameters() if weight.grad is not None]
        figures = torch.tensor([loss, float(self._stop), time.process_time()])
        if self._options.processes > 1:
            flat = torch.cat([*(gradient.flatten() for gradient in gradients), figures])
            dist.all_reduce(flat)
            flat /= self._options.processes
            at = 0
            for gradient in gradients:
                gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
                at += gradient.numel()
            figures = flat[at:]
        mean, stopped, cpu = figures.tolist()
        self._loss = mean if self._loss is None else 0.95 * self._loss + 0.05 * mean
        progress = self.progress
        progress.wall = time.monotonic() - self._began[0]
        progress.cpu = self._began[1] + cpu * self._options.processes
        if progress.step % _LOG_EVERY == 0:
            self._log.write("step", **self._figures(), loss=round(self._loss, 4), rate=round(self._rate(), 6))
        return stopped > 0

    def _figures(self) -> dict[str, object]:
        progress = self.progress
        return {
            "step": progress.step, "stage": self._stage.name, "tokens": progress.tokens,
            "wall": round(progress.wall, 1), "cpu": round(progress.cpu, 1),
        }  # fmt: skip

    @torch.no_grad()
    def _follow(self) -> None:
        """The running mean follows the weights; quickly at first."""
        share = 1 / min(self._options.average_over, self.progress.step + 1)
        theirs = list(self._run.average.parameters())
        torch._foreach_lerp_(theirs, list(self._run.model.parameters()), share)

    def _evaluate(self) -> None:
        """Measure, log, and go on to the next stage where this one has reached its goals."""
        found = accuracies(self._run.average, self._sets, self._rank, self._options.processes)
        self._log.write("evaluation", **self._figures(), accuracy=found)
        stage, progress = self._stage, self.progress
        if progress.stage + 1 == len(STAGES):
            return
        reached = all(found[name] >= goal for name, goal in stage.goals.items())
        if progress.stage_tokens >= stage.most or (reached and progress.stage_tokens >= stage.least):
            if not reached:
                progress.missed.append(stage.name)
            progress.stage += 1
            progress.stage_step = progress.stage_tokens = 0
            self._log.write("stage", **self._figures(), reached=reached)
            if self._rank == 0:
                self._save()

    def _save(self) -> None:
        self._run.save(self._options.folder)
        self._saved = time.monotonic()


def _optimizer(model: TinyLM, rate: float) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
