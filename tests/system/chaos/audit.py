"""What the last checkpoint must say, computed from the prompt list alone."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from draftfeed_producer.engines.synthetic import (
    SyntheticConfig,
    synthetic_prompts,
    synthetic_sample,
)

EXAMPLES = 5


def content(input_ids: Any, loss_mask: Any, states: Any) -> str:
    """Digest of a sample's tensors: of what the producer made, and of what a trainer was given."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.asarray(input_ids, np.int32).tobytes())
    digest.update(np.asarray(loss_mask, np.uint8).tobytes())
    digest.update(np.ascontiguousarray(states).view(np.uint16).tobytes())
    return digest.hexdigest()


def expected(config: SyntheticConfig) -> dict[str, str]:
    """Id -> digest of every prompt's sample, made here: no producer has touched it."""
    ids = [prompt.id for prompt in synthetic_prompts(config)]
    samples = (synthetic_sample(id, config) for id in ids)
    return {str(s.id): content(s.input_ids, s.loss_mask, s.hidden_states[:]) for s in samples}


def faults(
    expected: Mapping[str, str],
    counts: Mapping[str, int],
    digests: Mapping[str, str],
    terminal: Mapping[str, str],
) -> list[str]:
    """What does not hold, one sentence each. No sentence: every id exactly once.

    counts, digests: model state of the final checkpoint. terminal: id -> reason, as reported.
    """
    trained = {id for id, count in counts.items() if count}
    known = set(expected)
    other = (id for id in trained & known if digests.get(id) != expected[id])
    checks = {
        "lost: neither trained nor reported as terminal": known - trained - set(terminal),
        "trained more than once": {id for id, count in counts.items() if count > 1},
        "trained and reported as terminal": trained & set(terminal),
        "trained on other content than was generated": other,
        "not in the prompt list": (trained | set(terminal)) - known,
    }
    return [sentence for what, ids in checks.items() if (sentence := _sentence(what, ids))]


def _sentence(what: str, ids: Iterable[str]) -> str:
    found = sorted(ids, key=lambda id: (len(id), id))
    if not found:
        return ""
    more = ", ..." if len(found) > EXAMPLES else ""
    return f"{len(found)} {what}: {', '.join(found[:EXAMPLES])}{more}"
