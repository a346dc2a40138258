"""A decoder with random weights, of the sizes of Qwen3.6-27B, in plain torch: one decode step.

It is there to move the bytes that a real one moves. All its blocks are full attention over a
cache of fixed length, and every step is at its last position.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


class DecoderSizes(NamedTuple):
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    blocks: int
    """Of the whole model; as many of them as fit are made."""
    taps: int
    batch: int
    positions: int

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def block_bytes(self) -> int:
        """Weights of one block, bf16."""
        attention = self.hidden * (3 * self.query_width + 2 * self.kv_width)
        return 2 * (attention + 3 * self.hidden * self.mlp)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one block."""
        return 2 * 2 * self.batch * self.positions * self.kv_width

    @property
    def head_bytes(self) -> int:
        return 2 * self.hidden * self.vocabulary


class Block:
    def __init__(self, sizes: DecoderSizes, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            # Not zeros, on which some cards draw less power and run faster.
            made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return made.normal_(std=0.02)

        self._sizes = sizes
        # Queries, a gate for each of them, keys and values: one product, as servers fuse it.
        self._inward = weight(sizes.hidden, 2 * sizes.query_width + 2 * sizes.kv_width)
        self._outward = weight(sizes.query_width, sizes.hidden)
        self._gate_up = weight(sizes.hidden, 2 * sizes.mlp)
        self._down = weight(sizes.mlp, sizes.hidden)
        cache = (sizes.batch, sizes.kv_heads, sizes.positions, sizes.head_size)
        self._keys = torch.empty(cache, dtype=torch.bfloat16, device=device).normal_()
        self._values = torch.empty(cache, dtype=torch.bfloat16, device=device).normal_()

    def __call__(self, x_BH: Tensor) -> Tensor:
        x_BH = x_BH + self._attention(_norm(x_BH))
        gate, up = (_norm(x_BH) @ self._gate_up).chunk(2, dim=-1)
        return x_BH + (silu(gate) * up) @ self._down

    def _attention(self, x_BH: Tensor) -> Tensor:
        sizes, batch = self._sizes, len(x_BH)
        widths = (sizes.query_width, sizes.query_width, sizes.kv_width, sizes.kv_width)
        query, gate, key, value = (x_BH @ self._inward).split(widths, dim=-1)
        each = (batch, sizes.kv_heads, -1, sizes.head_size)
        self._keys[:, :, -1:].copy_(key.reshape(each))
        self._values[:, :, -1:].copy_(value.reshape(each))
        scores = query.reshape(each) @ self._keys.transpose(-1, -2)
        mixed = torch.softmax(scores * sizes.head_size**-0.5, dim=-1) @ self._values
        return (mixed.reshape(batch, -1) * gate.sigmoid()) @ self._outward


class Decoder:
    """`step` may be captured: it reads and writes fixed buffers."""

    def __init__(self, sizes: DecoderSizes, blocks: int, device: torch.device) -> None:
        self.sizes = sizes
        self.tokens = torch.zeros(sizes.batch, dtype=torch.int64, device=device)
        """Fed by the next step, sampled by the last."""
        shape = (sizes.batch, sizes.taps * sizes.hidden)
        self.packed = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        """bf16 [batch, L*H]: what the tapped blocks put out in the last step."""
        head = torch.empty(sizes.vocabulary, sizes.hidden, dtype=torch.bfloat16, device=device)
        self._head = head.normal_(std=0.02)
        self._blocks = [Block(sizes, device) for _ in range(blocks)]
        last = blocks - 1
        self._tapped = [round(tap * last / (sizes.taps - 1)) for tap in range(sizes.taps)]

    def step(self) -> None:
        x_BH = self._head[self.tokens]
        for number, block in enumerate(self._blocks):
            x_BH = block(x_BH)
            if number in self._tapped:
                tap = self._tapped.index(number)
                mine = slice(tap * self.sizes.hidden, (tap + 1) * self.sizes.hidden)
                self.packed[:, mine].copy_(x_BH)
        self.tokens.copy_((_norm(x_BH) @ self._head.T).argmax(dim=-1))


def _norm(x_BH: Tensor) -> Tensor:
    return rms_norm(x_BH, x_BH.shape[-1:])
