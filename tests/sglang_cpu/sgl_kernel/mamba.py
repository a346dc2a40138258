"""Gated DeltaNet's convolution and recurrence, one sequence after the other.

Sequences lie packed behind each other; `starts` (int32[B+1]) says where. Each has a slot in the
pool of states, and its state there is updated in place.
"""

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Any = None,
) -> torch.Tensor:
    """x: [D, T]; weight: [D, K]; conv_states: [slots, D, K-1], the last inputs. Returns [D, T]."""
    sequences = pairwise(query_start_loc.tolist())
    continues = has_initial_state.tolist()
    outputs = [
        _convolve(x[:, start:end], weight, bias, activation, conv_states[slot], old)
        for slot, old, (start, end) in zip(
            cache_indices.tolist(), continues, sequences, strict=True
        )
    ]
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """One more token of each sequence. x: [B, D]; the rest as above. Returns [B, D]."""
    outputs = [
        _convolve(row[:, None], weight, bias, activation, conv_states[slot], continues=True)
        for row, slot in zip(x, conv_state_indices.tolist(), strict=True)
    ]
    return torch.cat(outputs, dim=1).T.contiguous()


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    state: torch.Tensor,
    continues: bool,
) -> torch.Tensor:
    """x: [D, T]; state: [D, K-1], replaced by the inputs that the next token's kernel sees."""
    before = state if continues else torch.zeros_like(state)
    seen = torch.cat([before.to(x.dtype), x], dim=1)
    state.copy_(seen[:, -state.shape[1] :])
    bias = None if bias is None else bias.float()
    y = functional.conv1d(seen.float(), weight.float()[:, None], bias, groups=len(weight))
    return (functional.silu(y) if activation else y).to(x.dtype)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, None, None]:
    """Of a prefill. Shapes as in `gated_delta_rule`, each with a leading 1."""
    assert use_qk_l2norm_in_kernel
    assert not head_first
    slots, starts = initial_state_indices, cu_seqlens
    output = gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], initial_state, slots, starts)
    return output[None], None, None


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Gated Delta Networks (arXiv 2412.06464), equation 10, token by token in fp32.

    q, k: [T, heads of keys, K]; v: [T, H, V]; g (log of the decay), beta: [T, H];
    states: [slots, H, V, K], updated in place. Returns [T, H, V], v's dtype.
    """
    repeats = v.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5
    q_THK = _unit(q).repeat_interleave(repeats, dim=1) * scale
    k_THK = _unit(k).repeat_interleave(repeats, dim=1)
    decay_TH, beta_TH, v_THV = g.float().exp(), beta.float(), v.float()
    output = torch.empty_like(v)
    for slot, (start, end) in zip(slots.tolist(), pairwise(starts.tolist()), strict=True):
        S_HVK = states[slot].float()
        for t in range(start, end):
            S_HVK = S_HVK * decay_TH[t, :, None, None]
            error_HV = v_THV[t] - torch.einsum("hvk,hk->hv", S_HVK, k_THK[t])
            S_HVK = S_HVK + torch.einsum("h,hv,hk->hvk", beta_TH[t], error_HV, k_THK[t])
            output[t] = torch.einsum("hvk,hk->hv", S_HVK, q_THK[t])
        states[slot] = S_HVK
    return output


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
