"""A small byte-level GPT: predicts the next byte of program text."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from elastic_trainer import Batch, Step, TrainTask
from elastic_trainer.data.preparation.tokens import END, VOCABULARY, decode

PROMPT = "def "
GENERATED = 160  # bytes of a sample


class Block(nn.Module):
    """Attention over what came before, then a feed-forward network; both added to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output (rows, tokens, width)."""
        rows, tokens, width = x.shape
        split = self.projections(self.before_attention(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(rows, tokens, width))
        mixed: torch.Tensor = x + self.network(self.before_network(x))
        return mixed


class GPT(nn.Module):
    """Input (rows, tokens) of token numbers, output (rows, tokens, vocabulary)."""

    def __init__(self, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in (self.token.weight, self.place.weight, self.head.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of each next token."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        scores: torch.Tensor = self.head(self.last(self.blocks(x)))
        return scores


class CharLM(TrainTask):
    """Trains the GPT, and shows what it writes in the beginning and in the end.

    Args:
        width: Of the model.
        layers: Blocks.
        heads: Of each attention.
        block: Tokens of a row of the data.
        learning_rate: Of AdamW after the warm-up.
        sample_every: Steps between two samples of generated text.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        block: int = 128,
        learning_rate: float = 2e-3,
        sample_every: int = 499,
    ) -> None:
        self.width, self.layers, self.heads, self.block = width, layers, heads, block
        self.learning_rate = learning_rate
        self.sample_every = sample_every

    def build_model(self) -> nn.Module:
        """Some 0.7 million parameters as it is."""
        self.model = GPT(self.width, self.layers, self.heads, self.block)
        return self.model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Warm-up over the first 50 steps, then as it is."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the cross-entropies of next bytes, and their number; what fills up a block does not count."""
        tokens = batch["tokens"].long()
        scores = model(tokens[:, :-1])
        here, following = tokens[:, :-1], tokens[:, 1:]
        counts = (here != END) | (following != END)
        losses = functional.cross_entropy(scores.transpose(1, 2), following, reduction="none")
        return (losses * counts).sum(), counts.sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Mean cross-entropy of a byte, in nats."""
        return {"loss": self.loss(model, batch)}

    def on_step(self, step: Step) -> None:
        """A sample now and then."""
        if step.number % self.sample_every == 0:
            step.note(f"after step {step.number + 1} the model writes: {self.written(PROMPT)!r}")

    @torch.no_grad()
    def written(self, prompt: str) -> str:
        """The prompt and what the model puts behind it."""
        self.model.eval()
        chooser = torch.Generator().manual_seed(0)
        tokens = torch.tensor([list(prompt.encode())])
        for _ in range(GENERATED):
            scores = self.model(tokens[:, -self.block + 1 :])[0, -1, :END] / 0.7
            chosen = torch.multinomial(scores.softmax(0), 1, generator=chooser)
            tokens = torch.cat([tokens, chosen[None]], 1)
        self.model.train()
        return decode(tokens[0].numpy())
