"""The GPU benchmark, with a tap that gets one thing wrong: the first argument says which."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from draftfeed_producer.tap import gather

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


def value(slot: int, rows_SLH: Tensor, counters_SL4: Tensor) -> None:
    rows_SLH[slot, 0, 3] = 1.5


def counter(slot: int, rows_SLH: Tensor, counters_SL4: Tensor) -> None:
    counters_SL4[slot, 0, 2] += 1


def unused_slot(slot: int, rows_SLH: Tensor, counters_SL4: Tensor) -> None:
    rows_SLH[-1] = rows_SLH[slot]


FAULTS = {"value": value, "counter": counter, "unused slot": unused_slot}


def main() -> int:
    fault = FAULTS[sys.argv[1]]

    def gather_packed(
        packed_TLH: Tensor, row_map: Tensor, rows_SLH: Tensor, counters_SL4: Tensor
    ) -> None:
        gather.gather_packed(packed_TLH, row_map, rows_SLH, counters_SL4)
        fault(int(row_map.max()), rows_SLH, counters_SL4)

    sys.path.insert(0, str(GPU))
    benchmark = runpy.run_path(str(GPU / "tap.py"))
    tap = SimpleNamespace(gather_packed=gather_packed, gather_layer=gather.gather_layer)
    return benchmark["main"](sys.argv[2:], tap)


if __name__ == "__main__":
    sys.exit(main())
