"""A tap whose slabs nobody gives back: request_tap_child.py SETTINGS; prints how it ends."""

import sys

import msgspec
import numpy as np
import torch

from draftfeed_producer.engines.sglang.messages import Settings
from draftfeed_producer.engines.sglang.tap import HostGone, RequestTap

if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    n = settings.slabs * settings.slab_rows + 1
    tap = RequestTap(settings, torch.device("cpu"), n)
    packed = torch.zeros(n, settings.layers * settings.hidden, dtype=torch.bfloat16)
    index = np.arange(n)
    rows = index.astype(np.int32)
    taken = tap.take_pass(packed, index, rows, rows, torch.from_numpy(index), None)
    tap.copy_pass(taken, torch.Tensor.clone)
    try:
        tap.hand_over(taken)
    except HostGone as error:
        print(error, flush=True)  # noqa: T201
