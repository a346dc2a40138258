"""Launches the gather kernels. Imports Triton; `gather` checks the arguments, and imports this."""

from typing import Any, NamedTuple

from torch import Tensor

from draftfeed_producer.tap import kernel


class Blocking(NamedTuple):
    """How a program goes through its row."""

    block: int
    """Elements at once; a warp's lane reads 16 bytes when there are 256 of them to a warp."""
    ahead: int
    """How many blocks are read before any is written."""
    warps: int

    def options(self) -> dict[str, int]:
        return {"BLOCK": self.block, "AHEAD": self.ahead, "num_warps": self.warps}


ONE_INPUT = Blocking(block=1024, ahead=5, warps=4)
TWO_INPUTS = Blocking(block=1024, ahead=3, warps=4)


def launch_packed(
    packed_TLH: Tensor,
    row_map: Tensor,
    rows_SLH: Tensor,
    counters_SL4: Tensor,
    blocking: Blocking = ONE_INPUT,
) -> None:
    """A slot may have more layers than `packed_TLH`: those behind keep what they held."""
    slots, layers, hidden = rows_SLH.shape
    packed = packed_TLH.shape[1] // hidden
    programs: Any = kernel.packed_kernel
    programs[(len(row_map) * packed,)](
        packed_TLH,
        packed_TLH.stride(0) // 8,
        row_map,
        rows_SLH,
        counters_SL4,
        slots,
        packed,
        layers,
        hidden,
        **blocking.options(),
    )


def launch_layer(
    hidden_TH: Tensor,
    residual_TH: Tensor | None,
    layer: int,
    row_map: Tensor,
    rows_SLH: Tensor,
    counters_SL4: Tensor,
    blocking: Blocking | None = None,
) -> None:
    slots, layers, hidden = rows_SLH.shape
    programs: Any = kernel.layer_kernel
    blocking = blocking or (ONE_INPUT if residual_TH is None else TWO_INPUTS)
    programs[(len(row_map),)](
        hidden_TH,
        hidden_TH.stride(0) // 8,
        residual_TH,
        0 if residual_TH is None else residual_TH.stride(0) // 8,
        layer,
        row_map,
        rows_SLH,
        counters_SL4,
        slots,
        layers,
        hidden,
        **blocking.options(),
    )
