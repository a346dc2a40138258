"""A plugin of SGLang's for a test: each rank writes down what its packed states were.

One line per forward pass: rows, and a digest of their bits.
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false

import hashlib
import os
from pathlib import Path
from typing import Any

DIRECTORY = "DRAFTFEED_TEST_RANKS"


def load() -> None:
    if DIRECTORY in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        sample = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
        HookRegistry.register(sample, _after_sample, HookType.AFTER)


def _after_sample(
    result: Any, runner: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> None:
    from sglang.srt.runtime_context import get_parallel

    packed = logits_output.hidden_states
    if packed is not None:
        digest = hashlib.blake2b(packed.contiguous().numpy().tobytes(), digest_size=16)
        file = Path(os.environ[DIRECTORY]) / f"rank{get_parallel().tp_rank}"
        with file.open("a") as out:
            out.write(f"{len(packed)} {digest.hexdigest()}\n")
