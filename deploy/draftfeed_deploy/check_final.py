"""Whether the final state of a stream is of the kind that its descriptor says.

A state before the norm has the shape of one after it, and either trains without complaint. What the
norm multiplied by tells them apart: divided by it, a state after the norm has a mean square of 1.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from draftfeed_consumer.errors import FinalNormError
from draftfeed_consumer.final_norm import read_final_norm
from draftfeed_proto.descriptor import Descriptor
from draftfeed_proto.sample import Sample


class FinalStates(NamedTuple):
    rows: int
    """That were looked at."""
    faults: list[str]
    unknown: str
    """Why it cannot be told for this target; empty when it can."""


def check_final(
    target: Path, descriptor: Descriptor, samples: Iterable[Sample]
) -> FinalStates | None:
    """None: the stream has no final states. target: its directory."""
    if descriptor.final == "none":
        return None
    try:
        norm = read_final_norm(target)
    except FinalNormError as error:
        return FinalStates(0, [], str(error))
    rows, faults = 0, []
    for sample in samples:
        states = torch.from_numpy(sample.hidden_states[:, -1])
        if norm.puts_out(states) != (descriptor.final == "postnorm"):
            kind = "the state before" if descriptor.final == "postnorm" else "what came out of"
            faults.append(f"that of sample {sample.key} is {kind} the target's norm")
        rows += len(states)
    return FinalStates(rows, faults, "")
