"""What a trainer does with a sample whose values look wrong."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import torch

Action = Literal["reject", "warn"]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nonfinite: Action = "reject"
    """Inf or NaN anywhere. One such sample, trained on, makes every weight NaN."""
    saturated: Action = "warn"
    """Values beyond fp16's 65504, clamped by the tap: the direction is right, the size is not."""
    zero_rows: Action = "reject"
    """A row of a layer that is all zero: no target makes one, so it was never written."""


class Verdict(NamedTuple):
    action: Literal["accept", "warn", "reject"]
    reason: str
    """Empty when accepted; otherwise what was found, and in which layers (positions in L, that of
    the final state being the last)."""


def verdict(policy: Policy, item: Mapping[str, Any]) -> Verdict:
    """Judge one sample of a stream by the tap's counters and by the values themselves.

    item: its `counters`, `hidden_states`, and `final_states` if there are any. The values are
    looked at as well, because a row that nobody wrote is not counted by anybody either.
    """
    counters = item["counters"]
    peaks_NL = torch.cat(list(_peaks(item)), dim=1).float()
    assert len(counters) == peaks_NL.shape[1], (len(counters), peaks_NL.shape)
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


def _peaks(item: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The largest magnitude of each row and layer, [n, L] and [n, 1]. It shows both at once: it is
    0 for a row of zeros, and Inf or NaN where one value is."""
    assert item["hidden_states"].ndim == 3, item["hidden_states"].shape
    yield item["hidden_states"].abs().amax(dim=-1)
    if "final_states" in item:
        yield item["final_states"].abs().amax(dim=-1, keepdim=True)


def _where(counts: Iterable[int]) -> list[int]:
    return [layer for layer, count in enumerate(counts) if count]


def _words(what: str, layers: list[int]) -> str:
    return f"{what} (layers {', '.join(map(str, layers))})"


def _verdict(faults: list[tuple[Action, str]]) -> Verdict:
    if not faults:
        return Verdict("accept", "")
    worst: Action = "reject" if any(action == "reject" for action, _ in faults) else "warn"
    return Verdict(worst, "; ".join(words for action, words in faults if action == worst))
