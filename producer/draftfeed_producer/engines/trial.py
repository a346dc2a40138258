"""Running an engine to measure it: nothing that a producer does."""

from collections.abc import Callable
from dataclasses import dataclass

from draftfeed_proto.ids import SampleId

Progress = Callable[[SampleId, int, float], None]
"""(whose response, its tokens so far, when: `time.monotonic()` on this machine)"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Every response gets as long as it may, whatever ends one otherwise, so that runs compare; and
    no prefix cache helps."""

    progress: Progress
    """Called by the thread that runs the engine, in the order of time for each sample, its first
    token and its last among the calls."""
    captures: bool = True
    """Without, the engine is what it would be for others: no hooks, no states kept. Its samples
    have rows of no layers."""
