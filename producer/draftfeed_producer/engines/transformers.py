"""The transformers engine: captures batches, while generating or in one pass."""

import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from draftfeed_producer.engines.capture import BlockTap, NoTap
from draftfeed_producer.engines.config import CaptureConfig, TransformersConfig
from draftfeed_producer.engines.sampling import SeededSampler
from draftfeed_producer.engines.trial import Progress, Trial
from draftfeed_producer.errors import CaptureError, ModelError
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.tap.ring import for_device, make_ring
from draftfeed_producer.target import Target, end_tokens
from draftfeed_proto.descriptor import Final
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = 8192
"""Of one forward pass over responses that are there, padding included, unless one sample is
longer: what a pass holds at once grows with them."""


@dataclass(frozen=True)
class _Response:
    tokens: np.ndarray
    finish_reason: str | None
    """None: stopped before it was finished."""


class TransformersEngine:
    """Batches through the model, forward hooks on the tapped blocks.

    Live, left-padded prompts go through `generate`, and a batch is as long as its longest response.
    Prompts that have their responses, right-padded, go through the decoder once. A batch is started
    with what `prompts` gives, up to `batch_size`; samples are yielded when it ends.
    """

    loading = False

    def __init__(
        self,
        config: TransformersConfig,
        target: Target,
        layer_ids: Sequence[int] | None = None,
        capture: CaptureConfig = CaptureConfig(),  # noqa: B008 - frozen
        final: Final = "none",
        trial: Trial | None = None,
    ) -> None:
        """Loads the weights. Raises LayerIdError, LimitExceeded, ModelError."""
        self.descriptor = target.descriptor(layer_ids, final)
        self.recaptured = 0
        """Samples made again because a row was missing. Anything but 0 deserves a look."""
        self._config = config
        self._given = capture.mode == "prefill"
        self._staged_rows = capture.staging_bytes // self.descriptor.row_bytes()
        self._model: Any = _load_model(config, target.path)
        self._tap: BlockTap | NoTap = self._no_tap()
        if trial is None or trial.captures:
            self._tap = self._block_tap(target, final)
        ends = {*end_tokens(target), *config.sampling.stop_token_ids} if trial is None else set()
        self._end_tokens = torch.tensor(sorted(ends), dtype=torch.int64)
        self._progress = None if trial is None else trial.progress
        self._model.generation_config = _generation_config(config, target, self._end_tokens)
        self._stopped = threading.Event()

    def max_rows(self, prompt_tokens: int) -> int:
        """See `Engine.max_rows`. The last token is sampled and never fed."""
        to_come = 0 if self._given else self._config.sampling.max_new_tokens
        return prompt_tokens + to_come - 1

    def run(
        self, prompts: Iterator[Prompt], give_up: Callable[[SampleId, str], None] | None = None
    ) -> Iterator[Sample]:
        """See `Engine.run`. Gives nothing up. Raises CaptureError."""
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        size = self._config.batch_size
        open_prompts = itertools.takewhile(lambda _: not self._stopped.is_set(), prompts)
        while together := list(itertools.islice(open_prompts, size)):
            for batch in self._batches(together):
                if self._stopped.is_set():
                    return
                yield from self._samples(batch)

    @property
    def captured(self) -> int:
        return self._tap.captured

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        self._model = None
        self._tap.close()

    def uncaptured(self) -> "TransformersEngine":
        """Around the same weights, one that captures nothing: both can be measured in turns."""
        other = copy.copy(self)
        other._tap = self._no_tap()
        return other

    def forget(self) -> None:
        """Frees the memory for rows, which is otherwise kept for the next batch."""
        self._tap.forget()

    def _no_tap(self) -> NoTap:
        return NoTap(self._model.device, self.descriptor.hidden_size)

    def _block_tap(self, target: Target, final: Final) -> BlockTap:
        """Raises ModelError."""
        blocks = decoder_blocks(self._model, target)
        tapped = [blocks[k] for k in self.descriptor.layer_ids]
        if final != "none":
            tapped.append(blocks[-1] if final == "prenorm" else _final_norm(self._model, target))
        ring = make_ring(*for_device(self._model.device), len(tapped), self.descriptor.hidden_size)
        return BlockTap(tapped, ring)

    def _batches(self, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
        """In parts whose rows there is memory for, all to be generated or none."""
        live = [prompt for prompt in prompts if prompt.response_ids is None]
        given = [prompt for prompt in prompts if prompt.response_ids is not None]
        to_come = self._config.sampling.max_new_tokens
        yield from _cut(live, lambda p: p.tokens + to_come - 1, self._staged_rows)
        given.sort(key=lambda prompt: prompt.tokens)  # so that little of a pass is padding
        yield from _cut(given, lambda p: p.tokens - 1, min(self._staged_rows, _PREFILL_TOKENS))

    def _samples(self, batch: list[Prompt]) -> Iterator[Sample]:
        incomplete = []
        for sample, prompt in zip(self._capture(batch), batch, strict=True):
            if isinstance(sample, Sample):
                yield sample
            elif sample is not None:
                incomplete.append(prompt)
        yield from self._again(incomplete)

    def _again(self, incomplete: list[Prompt]) -> Iterator[Sample]:
        for prompt in incomplete:
            logger.warning("sample %s has missing rows: making it again, alone", prompt.id)
            self.recaptured += 1
            (sample,) = self._capture([prompt])
            if isinstance(sample, CaptureError):
                raise sample
            if sample is not None:
                yield sample

    def _capture(self, batch: list[Prompt]) -> Iterator[Sample | CaptureError | None]:
        """One for each prompt: its sample, what is missing of it, or None when stopped."""
        given = batch[0].response_ids is not None
        return self._prefill(batch) if given else self._generate(batch)

    def _prefill(self, batch: list[Prompt]) -> Iterator[Sample | CaptureError | None]:
        input_ids = _right_padded(batch, self._pad_token)
        self._tap.begin_given([prompt.tokens - 1 for prompt in batch])
        with torch.inference_mode(), self._tap.attached():
            # No mask: nothing looks ahead, so what stands behind a sequence changes none of its
            # rows. And no head: logits of a whole sequence would be larger than all the rest.
            self._model.get_decoder()(input_ids.to(self._model.device), use_cache=False)
        _tell(self._progress, batch, 1)
        for sequence, prompt in enumerate(batch):
            assert prompt.response_ids is not None
            response = _Response(prompt.response_ids, prompt.finish_reason or "unknown")
            yield self._finish(sequence, prompt, response)

    def _generate(self, batch: list[Prompt]) -> Iterator[Sample | CaptureError | None]:
        lengths = [len(prompt.input_ids) for prompt in batch]
        input_ids, attention_mask = _left_padded(batch, self._pad_token)
        self._tap.begin(lengths, self._config.sampling.max_new_tokens)
        with torch.inference_mode(), self._tap.attached():
            sequences = self._model.generate(
                input_ids.to(self._model.device),
                attention_mask=attention_mask.to(self._model.device),
                logits_processor=self._processors(batch),
                stopping_criteria=StoppingCriteriaList([self._watch(batch)]),
            )
        responses = sequences[:, max(lengths) :].cpu().numpy()
        for sequence, prompt in enumerate(batch):
            yield self._finish(sequence, prompt, self._response(responses[sequence]))

    @property
    def _pad_token(self) -> int:
        return int(self._model.generation_config.pad_token_id)

    def _processors(self, batch: list[Prompt]) -> LogitsProcessorList:
        sampling = self._config.sampling
        greedy = sampling.temperature == 0
        return LogitsProcessorList(
            [] if greedy else [SeededSampler(sampling, [prompt.id for prompt in batch])]
        )

    def _watch(self, batch: list[Prompt]) -> "_Watch":
        told = partial(_tell, self._progress, batch)
        return _Watch(self._end_tokens, self._tap.finished, self._stopped, told)

    def _response(self, generated: np.ndarray) -> _Response:
        ends = np.isin(generated, self._end_tokens.numpy())
        if ends.any():
            return _Response(generated[: int(ends.argmax()) + 1], "stop")
        full = len(generated) == self._config.sampling.max_new_tokens
        return _Response(generated, "length" if full else None)

    def _finish(
        self, sequence: int, prompt: Prompt, response: _Response
    ) -> Sample | CaptureError | None:
        if response.finish_reason is None:
            return None
        input_ids = np.concatenate([prompt.input_ids, response.tokens]).astype(np.int32)
        n = len(input_ids) - 1  # the last token was sampled and never fed
        if missing := self._tap.missing(sequence, n):
            return CaptureError(str(prompt.id), missing, n)
        loss_mask = np.zeros(n + 1, np.uint8)
        loss_mask[len(prompt.input_ids) :] = 1
        return Sample(
            id=prompt.id,
            key=prompt.key,
            input_ids=input_ids,
            loss_mask=loss_mask,
            hidden_states=self._tap.rows(sequence, n),
            counters=self._tap.counters(sequence, n),
            finish_reason=response.finish_reason,
            sampling={} if prompt.response_ids is not None else self._config.sampling.record(),
        )


class _Watch:
    """Stopping criterion: tells the tap which sequences have ended, and ends all on `stop()`."""

    def __init__(
        self,
        end_tokens: Tensor,
        finished: Tensor,
        stopped: threading.Event,
        told: Callable[[int], None],
    ) -> None:
        """told: called with how many tokens each response has, once they are known."""
        self._end_tokens, self._finished, self._stopped = end_tokens, finished, stopped
        self._told, self._tokens = told, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._finished |= torch.isin(input_ids[:, -1].cpu(), self._end_tokens)
        self._tokens += 1
        self._told(self._tokens)
        done = self._finished
        if self._stopped.is_set():
            done = torch.ones_like(done)
        return done.to(input_ids.device)


def _tell(progress: Progress | None, batch: list[Prompt], tokens: int) -> None:
    if progress is not None:
        now = time.monotonic()
        for prompt in batch:
            progress(prompt.id, tokens, now)


def decoder_blocks(model: Any, target: Target) -> nn.ModuleList:
    """The list whose entry k puts out layer id k. Raises ModelError when there is none."""
    blocks = getattr(model.get_decoder(), "layers", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != target.num_layers:
        name = type(model).__name__
        raise ModelError(target.path, f"{name} has no list of {target.num_layers} decoder blocks")
    return blocks


def _final_norm(model: Any, target: Target) -> nn.Module:
    """What puts out the state that the head is given. Raises ModelError when there is none."""
    norm = getattr(model.get_decoder(), "norm", None)
    if not isinstance(norm, nn.Module):
        name = type(model).__name__
        reason = f'{name} has no norm behind its blocks; [target] final = "prenorm" needs none'
        raise ModelError(target.path, reason)
    return norm


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """ "auto": bfloat16 where the device computes in it."""
    if name == "auto":
        features = torch.cpu.get_capabilities() if device == "cpu" else {"bf16": True}
        native = any("bf16" in feature and has for feature, has in features.items())
        name = "bfloat16" if native else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _load_model(config: TransformersConfig, path: Path) -> Any:
    transformers_logging.disable_progress_bar()
    dtype = resolve_dtype(config.dtype, config.device)
    logger.info("loading %s, %s on %s", path, dtype, config.device)
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model = load(path, dtype=dtype, local_files_only=True).to(config.device)
    # transformers raises almost anything on broken weights; the user needs the one line of it.
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(path, f"its weights cannot be loaded: {lines[0]}") from None
    return model.eval().requires_grad_(False)


def _generation_config(
    config: TransformersConfig, target: Target, end_tokens: Tensor
) -> GenerationConfig:
    """Replaces the model's own: its penalties and temperatures are not in a sample's record."""
    pad = target.tokenizer.pad_token_id
    return GenerationConfig(
        max_new_tokens=config.sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=end_tokens.tolist() or None,
        pad_token_id=0 if pad is None else pad,
    )


def _left_padded(batch: list[Prompt], pad_token: int) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask, int64 [B, longest]."""
    width = max(len(prompt.input_ids) for prompt in batch)
    input_ids = np.full((len(batch), width), pad_token, np.int64)
    mask = np.zeros((len(batch), width), np.int64)
    for sequence, prompt in enumerate(batch):
        first = width - len(prompt.input_ids)
        input_ids[sequence, first:] = prompt.input_ids
        mask[sequence, first:] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


def _right_padded(batch: list[Prompt], pad_token: int) -> Tensor:
    """int64 [B, longest]: prompts and responses but for the last token, which is never fed."""
    input_ids = np.full((len(batch), max(p.tokens for p in batch) - 1), pad_token, np.int64)
    for sequence, prompt in enumerate(batch):
        assert prompt.response_ids is not None
        fed = np.concatenate([prompt.input_ids, prompt.response_ids])[:-1]
        input_ids[sequence, : len(fed)] = fed
    return torch.from_numpy(input_ids)


def _cut(
    prompts: Iterable[Prompt], rows: Callable[[Prompt], int], limit: int
) -> Iterator[list[Prompt]]:
    """Stretches of prompts that have so many rows when all are as long as the longest; at least
    one prompt each."""
    batch: list[Prompt] = []
    for prompt in prompts:
        longest = max(map(rows, [*batch, prompt]))
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
