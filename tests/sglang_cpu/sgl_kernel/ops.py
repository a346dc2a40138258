"""`torch.ops.sgl_kernel`: the fused operations of Qwen3.5, unfused. T tokens, heads of size D."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from .mamba import gated_delta_rule

_library = torch.library.Library("sgl_kernel", "DEF")


def _op(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(_library.define(signature), function, "CPU")
        return function

    return register


@_op("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """x: [T, heads * D], written; gate: the same values in any shape."""
    x.copy_(x.float() * torch.sigmoid(gate.reshape(x.shape).float()))


@_op(
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight,"
    " float eps, int head_dim) -> (Tensor, Tensor)"
)
def qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k: [T, heads * D]. Returns each as [T * heads, D]."""
    return (
        _gemma_norm(q.reshape(-1, head_dim), q_weight, eps),
        _gemma_norm(k.reshape(-1, head_dim), k_weight, eps),
    )


@_op(
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight,"
    " Tensor k_weight, float eps, int head_dim, int num_heads) -> (Tensor, Tensor, Tensor)"
)
def qk_norm_with_gate(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_gate: [T, heads * 2D], a head's query beside its gate. Returns q, k and the gate,
    each as [T * heads, D]."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, dim=-1)
    q, k = qk_norm(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.contiguous()


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The kind of RMSNorm that multiplies by (1 + weight)."""
    return functional.rms_norm(x.float(), x.shape[-1:], 1 + weight.float(), eps).to(x.dtype)


@_op(
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int key_heads,"
    " int value_heads, int key_dim, int value_dim) -> (Tensor, Tensor, Tensor, Tensor)"
)
def split_projections(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkvz: [T, all q, all k, all v, all z]; ba: [T, all b, all a].
    Returns qkv [T, ...], z [T, value_heads, value_dim], b and a [T, value_heads]."""
    values = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = ba.split(value_heads, dim=-1)
    z = z.reshape(-1, value_heads, value_dim)
    return qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


@_op("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
def gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b: [T, H]; A_log, dt_bias: [H]. Returns log of the decay (fp32) and beta, [1, T, H]."""
    log_decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return log_decay[None], torch.sigmoid(b.float()).to(b.dtype)[None]


@_op(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k,"
    " Tensor v, Tensor a, Tensor b, Tensor(a!) initial_state_source,"
    " Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel,"
    " float softplus_beta, float softplus_threshold) -> Tensor"
)
def delta_rule_update(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Of a decode step: gating and recurrence in one. q, k, v: [1, T, heads, D]."""
    assert use_qk_l2norm_in_kernel
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)  # torch's own defaults
    log_decay, beta = gating(A_log, a, b, dt_bias)
    slots, starts = initial_state_indices, cu_seqlens
    return gated_delta_rule(
        q[0], k[0], v[0], log_decay[0], beta[0], initial_state_source, slots, starts
    )[None]
