"""The packed form with other blockings of its kernel, to see which should be the default."""

from collections.abc import Callable
from functools import partial

BLOCKINGS = (
    (256, 5, 1),
    (512, 5, 2),
    (512, 10, 2),
    (1024, 1, 4),
    (1024, 2, 4),
    (1024, 3, 4),
    (2048, 1, 8),
    (2048, 3, 8),
)
"""(block, ahead, warps), see `draftfeed_producer.tap.launch.Blocking`. 256 elements to a warp:
each lane reads 16 bytes."""


def packed_forms() -> dict[str, Callable[..., None]]:
    """By the words of its blocking, each called like `gather_packed`; nothing is checked."""
    # Here, because it imports Triton.
    from draftfeed_producer.tap.launch import ONE_INPUT, Blocking, launch_packed

    named = {_words(Blocking(*numbers)): Blocking(*numbers) for numbers in BLOCKINGS}
    named[f"{_words(ONE_INPUT)} (default)"] = ONE_INPUT
    return {name: partial(launch_packed, blocking=blocking) for name, blocking in named.items()}


def _words(blocking: tuple[int, int, int]) -> str:
    block, ahead, warps = blocking
    return f"blocks of {block}, {ahead} ahead, {warps} warps"
