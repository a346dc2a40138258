"""What the last checkpoint must say, computed from the prompt list alone."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from chaos.plan import Plan
from draftfeed_producer.engines.synthetic import (
    SyntheticConfig,
    synthetic_prompts,
    synthetic_sample,
)
from draftfeed_proto.ids import SampleId

EXAMPLES = 5


def content(input_ids: Any, loss_mask: Any, states: Any) -> str:
    """Digest of a sample's tensors: of what the producer made, and of what a trainer was given."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.asarray(input_ids, np.int32).tobytes())
    digest.update(np.asarray(loss_mask, np.uint8).tobytes())
    digest.update(np.ascontiguousarray(states).view(np.uint16).tobytes())
    return digest.hexdigest()


def expected(plan: Plan) -> dict[str, frozenset[str]]:
    """Id -> the digests that its sample may have, made here: no producer has touched it. That of a
    later epoch is the first one's, or one of its own where that had to be made again."""
    config = msgspec.structs.replace(plan.engine(), epochs=1)
    first = 1 if plan.source == "replayed" else 0
    found: dict[str, frozenset[str]] = {}
    for prompt in synthetic_prompts(config):
        archived = _made(prompt.id, config)
        for epoch in range(first, first + plan.epochs):
            id = msgspec.structs.replace(prompt.id, epoch=epoch)
            anew = _made(id, config) if plan.source == "archived" else archived
            found[str(id)] = frozenset((archived, anew))
    return found


def _made(id: SampleId, config: SyntheticConfig) -> str:
    sample = synthetic_sample(id, config)
    return content(sample.input_ids, sample.loss_mask, sample.hidden_states[:])


def faults(
    expected: Mapping[str, Collection[str]],
    counts: Mapping[str, int],
    digests: Mapping[str, str],
    terminal: Mapping[str, str],
) -> list[str]:
    """What does not hold, one sentence each. No sentence: every id exactly once.

    counts, digests: model state of the final checkpoint. terminal: id -> reason, as reported.
    """
    trained = {id for id, count in counts.items() if count}
    known = set(expected)
    other = (id for id in trained & known if digests.get(id) not in expected[id])
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
