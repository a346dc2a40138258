"""What a trainer does with a sample whose values look wrong."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import torch

from draftfeed_proto.sample import LayerCounters

Action = Literal["reject", "warn"]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nonfinite: Action = "reject"
    """Inf or NaN anywhere. One such sample, trained on, makes every weight NaN."""
    saturated: Action = "warn"
    """Values beyond fp16's 65504, clamped by the tap: the direction is right, the size is not."""
    zero_rows: Action = "reject"
    """A row of a layer that is all zero: no residual stream has one, so it was never written."""


class Verdict(NamedTuple):
    action: Literal["accept", "warn", "reject"]
    reason: str
    """Empty when accepted; otherwise what was found, and in which layers (positions in L)."""


def verdict(
    policy: Policy, counters: Sequence[LayerCounters], hidden_states: torch.Tensor
) -> Verdict:
    """Judge one sample by the tap's counters and by the values themselves.

    counters: L of them. hidden_states: [n, L, H], fp16 or bf16. The values are looked at as well,
    because a row that nobody wrote is not counted by anybody either.
    """
    assert hidden_states.ndim == 3, hidden_states.shape
    assert len(counters) == hidden_states.shape[1], (len(counters), hidden_states.shape)
    # The largest magnitude of a row shows both at once: it is 0 for a row of zeros and Inf or NaN
    # where one value is.
    peaks_NL = hidden_states.abs().amax(dim=-1).float()
    nonfinite_L = (~peaks_NL.isfinite()).sum(dim=0).tolist()
    zeros_L = (peaks_NL == 0).sum(dim=0).tolist()
    nonfinite = _where(c.nonfinite + n for c, n in zip(counters, nonfinite_L, strict=True))
    zero_rows = _where(c.zero_rows + n for c, n in zip(counters, zeros_L, strict=True))
    found: list[tuple[Action, str, list[int]]] = [
        (policy.nonfinite, "values that are not finite", nonfinite),
        (policy.zero_rows, "rows that are all zero", zero_rows),
        (policy.saturated, "values clamped to fp16's range", _where(c.saturated for c in counters)),
    ]
    return _verdict([(action, _words(what, where)) for action, what, where in found if where])


def _where(counts: Iterable[int]) -> list[int]:
    return [layer for layer, count in enumerate(counts) if count]


def _words(what: str, layers: list[int]) -> str:
    return f"{what} (layers {', '.join(map(str, layers))})"


def _verdict(faults: list[tuple[Action, str]]) -> Verdict:
    if not faults:
        return Verdict("accept", "")
    worst: Action = "reject" if any(action == "reject" for action, _ in faults) else "warn"
    return Verdict(worst, "; ".join(words for action, words in faults if action == worst))
