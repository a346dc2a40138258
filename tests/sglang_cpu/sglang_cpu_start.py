"""Every Python of .venv-sglang imports this as it starts: nothing has to be exported to use it."""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# In bf16, SGLang's default, a convolution's state alone makes decoding in fp32 wrong by 1e-3.
os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")


class _BeforeTorchvision(MetaPathFinder):
    """torchvision built for CUDA cannot load its operators beside a CPU build of torch, and then
    cannot be imported either: it describes two that must exist. Nothing here calls them."""

    library: Any = None
    """The operators last as long as it does."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                self.library.define(schema)


def _built_for_cpu(package: str) -> bool:
    return importlib.metadata.version(package).endswith("+cpu")


try:
    _operators_missing = _built_for_cpu("torch") and not _built_for_cpu("torchvision")
except importlib.metadata.PackageNotFoundError:  # while they are being installed
    _operators_missing = False
if _operators_missing:
    sys.meta_path.insert(0, _BeforeTorchvision())
