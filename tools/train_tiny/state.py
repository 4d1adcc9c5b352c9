"""What a run is: everything that it goes on from."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tools.train_tiny.model import TinyLM


@dataclass(slots=True)
class Progress:
    """Args:
    step, tokens: so far.
    stage, stage_step, stage_tokens: where the run is in the curriculum.
    wall, cpu: seconds, the latter of all processes together.
    anneal_from, anneal_over: tokens at which the learning rate began to fall, and over how many; 0: not yet.
    """

    step: int = 0
    tokens: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_tokens: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    anneal_from: int = 0
    anneal_over: int = 0
    missed: list[str] = field(default_factory=list)
    """stages that ended without their goals"""


@dataclass(slots=True)
class Run:
    model: TinyLM
    average: TinyLM
    """a running mean of the weights: what is evaluated and kept"""
    optimizer: torch.optim.Optimizer
    progress: Progress

    def save(self, folder: Path) -> None:
        """Write ``state.pt``; an old one is replaced in one go."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        scratch = folder / "state.pt.new"
        torch.save(state, scratch)
        os.replace(scratch, folder / "state.pt")

    def load(self, folder: Path) -> bool:
        """Go on from ``state.pt``; whether there is one."""
        path = folder / "state.pt"
        if not path.exists():
            return False
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        known = {one.name for one in fields(Progress)}
        self.progress = Progress(**{k: v for k, v in state["progress"].items() if k in known})
        return True
