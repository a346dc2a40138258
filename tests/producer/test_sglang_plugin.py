"""What the plugin reads off a batch, and the arguments that cannot go with a capture."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from draftfeed_producer.engines import SGLangConfig
from draftfeed_producer.engines.sglang import plugin
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.engines.sglang.messages import VARIABLE
from draftfeed_producer.errors import EngineError, LayerIdError, ModelError
from standin_engine import LAYER_IDS, make_target


def batch(rids: list[str], *, extend: bool, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rids=rids, forward_mode=SimpleNamespace(is_extend=lambda: extend), **fields
    )


def rows_of(one: SimpleNamespace) -> tuple[list[int], list[int]]:
    handles, positions = plugin._rows_of(one)
    assert (handles.dtype, positions.dtype) == (np.int32, np.int32)
    return handles.tolist(), positions.tolist()


def test_each_running_request_has_a_row_at_its_last_token():
    lengths = torch.tensor([5, 2, 1])
    one = batch([plugin.rid_of(3), "a-health-check", plugin.rid_of(7)], extend=False)
    one.seq_lens_cpu = lengths
    assert rows_of(one) == ([3, -1, 7], [4, 1, 0])
    assert lengths.tolist() == [5, 2, 1], "it is the engine's own"


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_chunks_of_prompts_have_rows_behind_what_is_there_already(kind: Any):
    """Chunked prefill, a prefix from the cache, and a running request in the same pass."""
    one = batch(
        [plugin.rid_of(0), "not-ours", plugin.rid_of(2), plugin.rid_of(9)],
        extend=True,
        extend_seq_lens_cpu=kind([3, 2, 1, 0]),
        extend_prefix_lens_cpu=kind([0, 4, 8, 1]),
    )
    assert rows_of(one) == ([0, 0, 0, -1, -1, 2], [0, 1, 2, 4, 5, 8])


def test_of_a_finished_request_all_but_the_last_token_was_fed():
    assert plugin._fed(SimpleNamespace(origin_input_ids=[1, 2, 3], output_ids=[4, 5])) == 4


def test_without_its_variable_the_plugin_touches_nothing():
    """SGLang loads it for whoever has installed us, also when they capture nothing."""
    code = (
        "import sys; from draftfeed_producer.engines.sglang import plugin; plugin.load(); "
        "assert plugin.loaded is None; assert not any(m.startswith('sglang') for m in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"speculative_algorithm": "EAGLE"}, "rows are lost under speculative decoding"),
        ({"speculative_algorithm": None}, "rows are lost under speculative decoding"),
        ({"speculative_num_steps": 3}, "rows are lost under speculative decoding"),
        ({"enable_hierarchical_cache": True}, "moved to the host"),
        ({"hicache_ratio": 2.0}, "moved to the host"),
        ({"pp_size": 2}, "capture needs every layer in one engine; it must be 1"),
        ({"nnodes": 2}, "it must be 1"),
        ({"dp_size": 2}, "start one producer for each replica"),
        ({"model_path": "x"}, r"it follows from \[target\] path"),
        ({"tp_size": 2}, r"it follows from \[engine\] tp_size"),
        ({"dtype": "float16"}, r"it follows from \[engine\] dtype"),
        ({"disable_radix_cache": False}, r"it follows from \[capture\] prefix_cache"),
        ({"skip_tokenizer_init": False}, "the producer tokenises"),
        ({"enable_lmcache": True}, "moved to the host"),
        ({"disaggregation_mode": "prefill"}, "fed in another engine"),
        ({"enable_layernorm_sp": True}, "a part of each layer"),
        ({"allow_auto_truncate": True}, "not have the prompt"),
        ({"preferred_sampling_params": "{}"}, "how they were drawn"),
        ({"chunked_prefill_size": -1}, "must be above 0"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_go_with_a_capture_are_refused(args: dict[str, Any], words: str):
    """They are taken, and rows are missing a day later."""
    key = next(iter(args))
    with pytest.raises(msgspec.ValidationError, match=rf"args\.{key}.*{words}"):
        msgspec.convert({"name": "sglang", "args": args}, SGLangConfig)


def test_other_arguments_are_the_users():
    args = {"pp_size": 1, "enable_hierarchical_cache": False, "chunked_prefill_size": 512}
    assert msgspec.convert({"name": "sglang", "args": args}, SGLangConfig).args == args


def test_the_final_state_before_the_norm_is_refused_and_says_what_to_do(tmp_path: Path):
    """SGLang would start, and give the one after the norm under that name."""
    target = make_target(tmp_path)
    with pytest.raises(EngineError, match='after the norm only; set "postnorm"') as caught:
        SGLangEngine(SGLangConfig(), target, LAYER_IDS, final="prenorm")
    assert "\n" not in str(caught.value)
    engine = SGLangEngine(SGLangConfig(), target, LAYER_IDS, final="postnorm")
    assert engine.descriptor.layers == len(LAYER_IDS) + 1
    engine.close()


def test_the_last_block_is_refused_and_says_what_there_is_instead(tmp_path: Path):
    """Asking for the last block."""
    with pytest.raises(LayerIdError, match=r'with \[target\] final = "postnorm"'):
        SGLangEngine(SGLangConfig(), make_target(tmp_path), (1, 6))


@pytest.mark.parametrize(
    ("last", "says"),
    [(None, "SGLang keeps no final state"), (torch.zeros(1, 8), r"torch\.Size\(\[1, 8\]\)")],
    ids=["nothing", "of the last token only"],
)
def test_an_engine_that_keeps_no_final_state_of_each_token_is_an_error(
    last: torch.Tensor | None, says: str
):
    """One row for each sequence, as engines keep it for sampling, would be a row too few; without
    any the last layer of a row is what an earlier pass left there."""
    capture = object.__new__(plugin._Capture)
    capture._final, capture._by_slot = True, False
    one = batch(
        [plugin.rid_of(0)], extend=True, extend_seq_lens_cpu=[3], extend_prefix_lens_cpu=[0]
    )
    one.out_cache_loc_virtual = one.out_cache_loc = torch.arange(3)
    one.input_ids = torch.arange(3)
    with pytest.raises(AssertionError, match=says):
        capture.take(torch.zeros(3, 16), last, one)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_that_would_run_in_fp16_is_refused(tmp_path: Path, dtype: str):
    """SGLang's own "auto" runs fp32 checkpoints in fp16, and so they are rounded twice."""
    target = make_target(tmp_path)
    target.text_config.dtype = getattr(torch, dtype)
    with pytest.raises(ModelError, match=f"says {dtype}: set .engine. dtype"):
        SGLangEngine(SGLangConfig(), target, LAYER_IDS)
    SGLangEngine(SGLangConfig(dtype="bfloat16"), target, LAYER_IDS).close()
