"""What the stand-in for SGLang computes: states and tokens that anyone can compute again."""

from collections.abc import Iterable

import msgspec
import numpy as np

LAYERS, HIDDEN = 3, 128
ROW_BYTES = 2 * LAYERS * HIDDEN
VOCAB = 400
LARGEST = 65504.0

SKIP_ONCE, SKIP_ALWAYS = 1001, 1002
"""First tokens of prompts that are answered badly. Here: the row at position 2 never comes."""
FOREIGN_ONCE = 1003
"""It is the row of another token."""
ABORT_ONCE, ABORT_ALWAYS = 1004, 1005
ABORT_LATE = 1006
"""Aborted once, and said to be finished some passes later."""
FINISHED_FIRST = 1007
"""Said to be finished before its last rows come."""
TWICE = 1008
"""Everything that is said of its end is said twice."""
NO_ANSWER = 1009
NOT_FINISHED = 1010
"""There is an answer, and the plugin never says that the request is finished."""
TOO_LONG = 1011
"""One token more than was allowed."""
GARBAGE, WRONG_SLAB, WRONG_POSITIONS = 1012, 1013, 1014
"""Words that make no sense."""
KILLER = 1015
"""The scheduler dies with it."""
ONCE = {SKIP_ONCE, FOREIGN_ONCE, ABORT_ONCE, ABORT_LATE, FINISHED_FIRST}


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`standin` among the arguments of the engine."""

    chunk: int = 64
    """Tokens of prompts in a pass."""
    longest: int | None = None
    """Rows of the longest pass, as the ring is told; None: what it will be."""
    kv_tokens: int = 4096
    most_input_tokens: int = 0
    """That it admits to; 0: those that the cache holds."""
    refuses_tokens: int = 0
    """Inputs of so many and more are aborted; 0: none."""
    kill_at: int = 1
    """Token of its answer at which a `KILLER` takes the scheduler along."""
    overlap: bool = True
    """A pass is launched before the results of the one before are looked at."""
    mixed: bool = False
    """Prompts and running requests share passes."""
    retract_every: int = 0
    """Passes of running requests; then one of them starts again."""
    lives: str = ""
    """File with one byte for each start, when `deaths` matter."""
    die_at_pass: int = 0
    """0: never. Pass 1 is that of the first request, which tries the hook."""
    deaths: int = 1
    """Lives that end so."""
    die_at_start: tuple[int, ...] = ()
    """Lives, from 1 on, that end before the engine is up."""
    die_by: int = 9
    """Signal; 0: exit code 7."""
    die_after_copy: bool = False
    """With the rows of the pass announced; else before it."""
    silent: tuple[int, ...] = ()
    """Lives whose engine never comes up."""
    deaf: bool = False
    """It ignores Quit."""
    children: int = 0
    """Processes that it starts and that would run on."""
    failed: str = ""
    """Why it cannot start."""
    chatter: int = 0
    """Lines that it prints for each command."""


def states(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float32 [n, L, H], exact in bf16 and fp16, but for one value in some rows that is too
    large for fp16."""
    layer, channel = np.arange(LAYERS)[:, None], np.arange(HIDDEN)
    mixed = tokens * 31 + positions * 17
    values = (mixed[:, None, None] + layer * 41 + channel * 7) % 251 - 125
    out = values.astype(np.float32)
    out[large(tokens), 1, 5] = 2.0**17
    return out


def large(tokens: np.ndarray) -> np.ndarray:
    return tokens % 7 == 3


def next_token(token: int, position: int) -> int:
    """3 is the lowest; see `stops`."""
    return (token * 131 + position * 29 + 7) % (VOCAB - 3) + 3


def answer(prompt: Iterable[int], max_new_tokens: int, ends: Iterable[int]) -> list[int]:
    """What is generated."""
    tokens, out, ends = list(prompt), [], set(ends)
    while len(out) < max_new_tokens and not (out and out[-1] in ends):
        out.append(next_token(([*tokens, *out])[-1], len(tokens) + len(out) - 1))
    return out
