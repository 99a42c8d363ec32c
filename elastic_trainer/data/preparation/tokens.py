"""A byte-level tokenizer: every byte is a token, and one more ends a document. Any text has tokens, none is unknown."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

END = 256  # of a document; also fills the last block of a part up
VOCABULARY = 257
DTYPE = "int16"  # what torch can index with after .long(), at two bytes a token


def encode(text: bytes) -> NDArray[np.int16]:
    """The tokens of a document with its end: int16, shape (len(text) + 1,)."""
    tokens = np.empty(len(text) + 1, dtype=np.int16)
    tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = END
    return tokens


def decode(tokens: NDArray[np.integer]) -> str:
    """The text of tokens; ends of documents are left out, and bytes that are no UTF-8 are shown as U+FFFD."""
    return bytes(int(token) for token in tokens if token != END).decode("utf-8", errors="replace")


def blocks_of(tokens: NDArray[np.int16], length: int) -> NDArray[np.int16]:
    """Tokens end to end in blocks of `length`, the last one filled up with END: int16, shape (n, length)."""
    count = -(-len(tokens) // length)
    blocks = np.full(count * length, END, dtype=np.int16)
    blocks[: len(tokens)] = tokens
    return blocks.reshape(count, length)
