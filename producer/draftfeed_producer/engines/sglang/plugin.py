"""The plugin that SGLang loads into its processes, through the entry point `sglang.srt.plugins`.

It hooks two functions of SGLang 0.5.23 and patches none:

* after `ModelRunner.sample` the packed states of the pass are gathered, and the state after the
  final norm with them if that is wanted; they join the results that SGLang itself carries to the
  host and hands back when it processes them;
* before `_maybe_collect_routed_experts`, which runs for each request that has finished while it
  still has its KV slots, those are noted; only with the prefix cache on.

Without the environment variable of `messages.VARIABLE` it does nothing at all.
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from draftfeed_producer.engines.sglang.messages import VARIABLE, Settings
from draftfeed_producer.engines.sglang.tap import Pass, RequestTap

RID_PREFIX = "draftfeed-"
SAMPLE = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
FINISHING = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)

loaded: Settings | None = None
"""What `load` was told; None: it did not run, or had nothing to do."""
_capture: "_Capture | None" = None


def load() -> None:
    """Called by SGLang in each of its processes."""
    global loaded
    if (raw := os.environ.get(VARIABLE)) is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    settings = msgspec.json.decode(raw, type=Settings)
    HookRegistry.register(SAMPLE, _after_sample, HookType.AFTER)
    if settings.by_slot:
        HookRegistry.register(FINISHING, _before_release, HookType.BEFORE)
    loaded = settings


def rid_of(handle: int) -> str:
    return f"{RID_PREFIX}{handle}"


def _handle_of(rid: str) -> int:
    """-1: not ours."""
    return int(rid.removeprefix(RID_PREFIX)) if rid.startswith(RID_PREFIX) else -1


def _after_sample(
    result: Any, runner: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> None:
    """Hook. On one rank of a tensor-parallel group: all of them have the same states."""
    global _capture
    packed = logits_output.hidden_states
    if runner.is_draft_worker or packed is None or forward_batch.forward_mode.is_idle():
        return
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank != 0:
        return
    if _capture is None:
        assert loaded is not None
        _capture = _Capture(loaded, runner)
    taken = _capture.take(packed, logits_output.last_hidden_states, forward_batch)
    if taken is not None:
        logits_output.auxiliary_device_output = append_auxiliary_output(
            logits_output.auxiliary_device_output, _OnDevice(taken)
        )


def _before_release(processor: Any, request: Any) -> None:
    """Hook."""
    if _capture is not None:
        _capture.note_kv_slots(request)


class _Capture:
    def __init__(self, settings: Settings, runner: Any) -> None:
        _check_read_back()
        self._by_slot, self._final = settings.by_slot, settings.final
        self._requests_to_slots = runner.req_to_token_pool.req_to_token
        self.tap = RequestTap(settings, torch.device(runner.device), _longest_pass(runner))
        capacity = runner.kv_index_translator.capture_token_capacity(runner.max_token_pool_size)
        self.tap.attached(int(capacity))
        self._kv_slots: dict[int, np.ndarray] = {}
        """Of requests that finish in the batch being processed."""

    def take(self, packed: torch.Tensor, last: torch.Tensor | None, batch: Any) -> Pass | None:
        """last: [T, H], what the head of the model was given or could have been."""
        handles, positions = _rows_of(batch)
        n = len(handles)
        kv_slots = batch.out_cache_loc_virtual
        if kv_slots is None:
            kv_slots = batch.out_cache_loc
        wanted = np.flatnonzero(handles >= 0)
        if not len(wanted):
            return None
        assert len(packed) >= n, (packed.shape, n, batch.forward_mode)
        if not self._final:
            last = None
        else:  # of every token, as `packed` is: SGLang keeps both or neither
            assert last is not None, "SGLang keeps no final state of this model"
            assert len(last) == len(packed), (last.shape, packed.shape)
        return self.tap.take_pass(
            packed[:n],
            wanted,
            handles[wanted],
            positions[wanted],
            batch.input_ids[:n],
            kv_slots[:n] if self._by_slot else None,
            None if last is None else last[:n],
        )

    def note_kv_slots(self, request: Any) -> None:
        if (handle := _handle_of(request.rid)) >= 0:
            n = _fed(request)
            slots = self._requests_to_slots[request.kv.req_pool_idx, :n]
            self._kv_slots[handle] = slots.cpu().numpy()

    def hand_over(self, taken: Pass, requests: Sequence[Any]) -> None:
        self.tap.hand_over(taken)
        for request in requests:
            handle = _handle_of(request.rid)
            if handle >= 0 and request.finished():
                self._finish(handle)

    def _finish(self, handle: int) -> None:
        """A finished request can be seen once more, in the pass that was launched meanwhile: the
        producer has forgotten it by then, or hears it twice."""
        self.tap.finished(handle, self._kv_slots.pop(handle, None))


class _OnDevice:
    """SGLang's `DeviceAuxiliaryOutput`."""

    def __init__(self, taken: Pass) -> None:
        self._taken = taken

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> "_OnHost":
        assert _capture is not None
        _capture.tap.copy_pass(self._taken, copy_tensor)
        return _OnHost(self._taken)


class _OnHost:
    """SGLang's `HostAuxiliaryOutput`."""

    def __init__(self, taken: Pass) -> None:
        self._taken = taken

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        assert _capture is not None
        _capture.hand_over(self._taken, batch.reqs)


def _rows_of(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """handles and positions, int32 [T]: which request, and where in it, each row belongs to."""
    handles = np.array([_handle_of(rid) for rid in batch.rids], np.int32)
    if not batch.forward_mode.is_extend():
        return handles, batch.seq_lens_cpu.numpy().astype(np.int32) - 1
    lengths = np.asarray(batch.extend_seq_lens_cpu, np.int32)
    starts = np.asarray(batch.extend_prefix_lens_cpu, np.int32)
    within = np.arange(lengths.sum(), dtype=np.int32) - np.repeat(
        np.cumsum(lengths, dtype=np.int32) - lengths, lengths
    )
    return np.repeat(handles, lengths), np.repeat(starts, lengths) + within


def _check_read_back() -> None:
    """The tap is one thread's, and SGLang reads results back in another under confidential
    computing. Raises RuntimeError."""
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.utils.common import is_confidential_compute

    if is_confidential_compute() and not get_schedule().disable_overlap_schedule:
        raise RuntimeError(
            "Error: under confidential computing set args.disable_overlap_schedule = true"
        )


def _longest_pass(runner: Any) -> int:
    """Tokens."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    prefill = schedule.chunked_prefill_size or 0
    if prefill <= 0:
        prefill = max(schedule.max_prefill_tokens, runner.model_config.context_len)
    # A pass can mix a chunk of a prompt with a token of every running request.
    return int(prefill + runner.req_to_token_pool.size)


def _fed(request: Any) -> int:
    """Tokens of a finished request that went through the model."""
    return len(request.origin_input_ids) + len(request.output_ids) - 1
