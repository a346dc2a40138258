"""A plugin of SGLang (entry-point group `sglang.srt.plugins`): what it has for GPUs only."""

from typing import Protocol

import torch
from torch.nn import functional

_GATED_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward"


def load() -> None:
    """SGLang calls this in each of its processes, before it looks at any model."""
    from sglang.srt.plugins.hook_registry import (  # pyright: ignore[reportMissingImports]
        HookRegistry,
        HookType,
    )

    HookRegistry.register(_GATED_NORM, _gated_rms_norm, HookType.REPLACE)


class _Norm(Protocol):
    weight: torch.Tensor
    eps: float


def _gated_rms_norm(self: _Norm, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The norm after each Gated DeltaNet layer of Qwen3.5, a Triton kernel in SGLang.

    x, z: [..., D]; the mean square is of each row.
    """
    normed = functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
    return (normed * functional.silu(z.float())).to(x.dtype)
