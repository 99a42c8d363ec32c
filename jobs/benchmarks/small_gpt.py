"""The model that all sides of a benchmark train, and how a process marks a done step. Needs torch alone."""

from __future__ import annotations

import os
import threading
import time

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, TOKENS = 1024, 32
FOLDER = "ELASTIC_TRAINER_BENCHMARK_FOLDER"
STEP_S = 0.05  # a step is filled up to this: it stands for an accelerator's work


class Layer(nn.Module):
    """A transformer layer; input and output (rows, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a feed-forward network."""
        rows, tokens, width = x.shape
        parts = self.attend(self.first(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """Input (rows, tokens) of int64, output (rows, tokens, vocabulary)."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of each next token."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; `tokens` (rows, TOKENS + 1)."""
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def tokens_of(rows: int, seed: int) -> torch.Tensor:
    """Random tokens: int64, (rows, TOKENS + 1)."""
    return torch.randint(0, VOCABULARY, (rows, TOKENS + 1), generator=torch.Generator().manual_seed(seed))


def deadlock_of(pid: int) -> str:
    """The file that has this process come to a stand in its next step."""
    return os.path.join(os.environ.get(FOLDER, "/nonexistent"), f"{pid}.deadlock")


def fill_up(began: float) -> None:
    """Sleep until the step that began at this time has lasted STEP_S; for good where a benchmark wants a deadlock."""
    if os.path.exists(deadlock_of(os.getpid())):
        threading.Event().wait()
    time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
