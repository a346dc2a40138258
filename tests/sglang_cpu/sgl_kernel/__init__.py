"""SGLang's CPU kernels in plain torch: slow, and only what SmolLM2 (Llama), Qwen3 and Qwen3.5 call.

SGLang imports some by name, and reaches others as `torch.ops.sgl_kernel.NAME`. There is no
`convert_weight_packed` among them on purpose: by its absence SGLang tells that it has to do
everything else (norms, rotary embeddings, activations, attention) with torch as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from . import ops  # noqa: F401  (defines torch.ops.sgl_kernel)

__version__ = "0.0.0+draftfeed"


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    kv_slots: torch.Tensor,
    row_length: int,
) -> None:
    """Write down which KV slots hold tokens [start, end) of each request.

    requests, starts, ends: int[B]; req_to_token: int32[requests, row_length], written;
    kv_slots: int64, of one request after the other.
    """
    lengths = (ends - starts).tolist()
    pieces = zip(requests.tolist(), starts.tolist(), kv_slots.split(lengths), strict=True)
    for request, start, slots in pieces:
        req_to_token[request, start : start + len(slots)] = slots.to(req_to_token.dtype)


_ONLY_IMPORTED = (  # by the modules of speculative decoding, which capturing loads
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in _ONLY_IMPORTED:
        raise AttributeError(f"the stand-in for sgl_kernel has no {name}")
    return partial(_not_here, name)


def _not_here(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}, which SGLang called")
