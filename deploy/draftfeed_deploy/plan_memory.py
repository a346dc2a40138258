"""What a replica's GPUs have to hold, and how many requests fit."""

import math
from typing import NamedTuple

from draftfeed_deploy.plan_inputs import Inputs

VALUE_BYTES = 2
"""fp16 and bf16."""
COUNTER_BYTES = 16
"""Of a row and layer, beside it while it is staged."""


class Memory(NamedTuple):
    """Bytes of one GPU of a replica, and requests."""

    budget: float
    weights: float
    cache_of_a_token: float
    state_of_a_request: float
    cache_at_batch: float
    """For `batch` requests of the longest length."""
    staging_ring: float
    """On the first GPU of each replica, beside the budget."""
    fits_longest: float
    """Requests of the longest length at a time; 0 where not even the weights fit."""
    fits_mean: float


def memory_of(inputs: Inputs, row_bytes: float) -> Memory | None:
    """row_bytes: of a row's states. None where it is not known what the target's layers keep."""
    target, layout, work = inputs.target, inputs.layout, inputs.workload
    if target.kv_layers is None or target.kv_heads is None or target.head_dim is None:
        return None
    gpus = layout.gpus_per_replica
    heads = max(1.0, target.kv_heads / gpus)  # fewer heads than GPUs: each GPU has a copy
    token = target.kv_layers * 2 * heads * target.head_dim * VALUE_BYTES
    state = (target.request_state_bytes or 0.0) / gpus
    budget = inputs.hardware.memory_bytes * inputs.hardware.memory_fraction
    room = budget - target.weights_bytes / gpus
    longest = token * work.longest_tokens + state
    mean = token * (work.prompt_tokens + work.response_tokens) + state
    tokens = layout.chunked_prefill_tokens + layout.batch
    return Memory(
        budget=budget,
        weights=target.weights_bytes / gpus,
        cache_of_a_token=token,
        state_of_a_request=state,
        cache_at_batch=layout.batch * longest,
        staging_ring=2 * tokens * staged_row_bytes(inputs, row_bytes),
        fits_longest=_requests(room, longest),
        fits_mean=_requests(room, mean),
    )


def _requests(room: float, bytes_of_each: float) -> float:
    return float(math.floor(max(0.0, room) / bytes_of_each)) if bytes_of_each else math.inf


def staged_row_bytes(inputs: Inputs, row_bytes: float) -> float:
    """With the counters beside it."""
    return row_bytes + COUNTER_BYTES * inputs.target.tapped_layers
