"""The SGLang engine: prompts into its host process, samples out of the rows that come back."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from draftfeed_producer.engines.config import CaptureConfig, SGLangConfig
from draftfeed_producer.engines.seeds import sample_seed
from draftfeed_producer.engines.sglang.messages import Finished, Progress, Response, Start
from draftfeed_producer.engines.sglang.process import Died
from draftfeed_producer.engines.sglang.requests import Faults, GiveUp, Lost, Peekable, Request
from draftfeed_producer.engines.sglang.rows import Collected
from draftfeed_producer.engines.sglang.slabs import SlabShape
from draftfeed_producer.engines.sglang.supervisor import Supervisor
from draftfeed_producer.engines.trial import Trial
from draftfeed_producer.errors import CaptureError, EngineError, LayerIdError, ModelError
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.target import Target, end_tokens
from draftfeed_proto.descriptor import Descriptor, Final
from draftfeed_proto.sample import Sample

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.5.23",)
"""Of SGLang: those whose functions the plugin was written for."""
TRIES = 2
"""Of a prompt whose rows are not all there, or which SGLang aborts."""
_ROWS_SECONDS = 60.0
"""After its response, word of a request's rows is waited for; it is sent before the response."""
_SLABS = 16
_PREFILL: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}


class SGLangEngine:
    """See `Engine`. SGLang is started when the first prompt comes, and started again, with all
    that was in it, when it dies."""

    def __init__(
        self,
        config: SGLangConfig,
        target: Target,
        layer_ids: Sequence[int] | None = None,
        capture: CaptureConfig | None = None,
        final: Final = "none",
        trial: Trial | None = None,
    ) -> None:
        """Raises LayerIdError, LimitExceeded, ModelError, EngineError."""
        self.descriptor = target.descriptor(layer_ids, final)
        self.recaptured = 0
        self._config = config
        self._capture = capture or CaptureConfig()
        self._row_bytes = self.descriptor.row_bytes()
        self._trial = trial
        captures = trial is None or trial.captures
        self._sampling = _sampling(config, target)
        if trial is not None:
            self._sampling["ignore_eos"] = True
        _check(config, target, self.descriptor)
        self._engine = Supervisor(
            config.python,
            Start(
                args=self._arguments(target, captures),
                known_versions=KNOWN_VERSIONS,
                captures=captures,
            ),
            _slab_shape(config.ring_bytes, self.descriptor),
            by_slot=self._capture.prefix_cache,
            final=final != "none",
            start_timeout_seconds=config.start_timeout_seconds,
            response_tokens=self._to_come,
        )
        self._requests: dict[int, Request] = {}
        """In the engine, by handle."""
        self._lost, self._faults = Lost(), Faults()
        self._stopped = False

    @property
    def loading(self) -> bool:
        return self._engine.starting

    @property
    def captured(self) -> int:
        return self._engine.captured

    def max_rows(self, prompt_tokens: int) -> int:
        """See `Engine.max_rows`. The last token is sampled, or given, and never fed."""
        return prompt_tokens + self._to_come - 1

    @property
    def session(self) -> int | None:
        """The session that the engine's processes are in. None: it is not running."""
        return self._engine.session

    @property
    def _captures(self) -> bool:
        return self._trial is None or self._trial.captures

    @property
    def _to_come(self) -> int:
        """Tokens of the longest response that is not given."""
        return 0 if self._capture.mode == "prefill" else self._config.sampling.max_new_tokens

    def run(self, prompts: Iterator[Prompt], give_up: GiveUp | None = None) -> Iterator[Sample]:
        """See `Engine.run`. Raises CaptureError, EngineError."""
        waiting = Peekable(prompts)
        self._faults = Faults(give_up)
        try:
            while not self._stopped:
                self._admit(waiting)
                if not self._requests:
                    break
                yield from self._samples()
            if not self._stopped:
                self._faults.settle()
        finally:
            self._abandon()

    def stop(self) -> None:
        self._stopped = True
        self._engine.interrupt()

    def close(self) -> None:
        self.stop()
        self._engine.close()

    def _admit(self, waiting: Peekable) -> None:
        """Memory for every row of a request is set aside before it is submitted."""
        for request in [] if self._on_trial else self._lost.take():
            self._submit(request)
        while not (self._on_trial or self._full or self._stopped):
            prompt = waiting.peek()
            if prompt is None:
                return
            request = self._request(prompt)
            if self._requests and not self._fits(request):
                return
            waiting.pop()
            self._engine.start()
            if not self._stopped and self._takes(request):
                self._submit(request)

    @property
    def _full(self) -> bool:
        return len(self._requests) >= self._config.concurrency

    @property
    def _on_trial(self) -> bool:
        """Whether a suspect is in the engine, and nobody else may be."""
        return any(request.suspect for request in self._requests.values())

    def _takes(self, request: Request) -> bool:
        """Whether the engine takes so long an input; if not, it is given up. Raises EngineError."""
        n, most = len(request.fed), self._engine.most_input_tokens
        if n > most:
            reason = (
                f"{n} tokens are to be fed, the engine takes {most}: "
                "raise memory_fraction, or lower max_prompt_tokens"
            )
            self._faults.certain(request.prompt.id, reason)
        return n <= most

    def _request(self, prompt: Prompt) -> Request:
        fed = prompt.input_ids.tolist()
        if prompt.response_ids is None:
            return Request(prompt, fed, self.max_rows(len(fed)))
        fed += prompt.response_ids[:-1].tolist()
        return Request(prompt, fed, len(fed))

    def _fits(self, request: Request) -> bool:
        """A sample that is larger than all there may be is made alone."""
        rows = request.most_rows + sum(other.most_rows for other in self._requests.values())
        return rows * self._row_bytes <= self._capture.staging_bytes

    def _submit(self, request: Request) -> None:
        # Without a capture nobody tells that all rows are there.
        request.response, request.finished = None, not self._captures
        sampling = self._sampling_of(request.prompt)
        # A row that is missing is missing for everyone who finds its token in the prefix cache.
        watched = self._trial is not None
        handle = self._engine.submit(
            request.fed,
            request.most_rows,
            sampling,
            uncached=request.tries > 1 or watched,
            watched=watched,
        )
        self._requests[handle] = request

    def _sampling_of(self, prompt: Prompt) -> dict[str, Any]:
        """SGLang looks at a request's own seed in its deterministic mode only, and would there
        take one and the same for all that have none: equal prompts would get equal responses."""
        if prompt.response_ids is not None:
            return _PREFILL
        if not self._config.args.get("enable_deterministic_inference"):
            return self._sampling
        seed = sample_seed(self._config.sampling.seed, prompt.id) >> 65
        return {**self._sampling, "sampling_seed": seed}

    def _abandon(self) -> None:
        """What is in the engine is made again some other time."""
        if self._requests:
            self._engine.abort_all()
        self._forget()
        self._lost = Lost()

    def _forget(self) -> list[Request]:
        requests = list(self._requests.values())
        for handle in self._requests:
            self._engine.rows.drop(handle)
        self._requests.clear()
        return requests

    def _samples(self) -> Iterator[Sample]:
        match self._engine.next_event():
            case Died(reason):
                self._start_again(reason)
            case Progress() as progress if progress.handle in self._requests:
                assert self._trial is not None
                id = self._requests[progress.handle].prompt.id
                self._trial.progress(id, progress.tokens, progress.at)
            case Response() as response if response.handle in self._requests:
                self._requests[response.handle].response = response
                self._requests[response.handle].answered_at = time.monotonic()
                yield from self._completed(response.handle)
            case Finished() as finished if finished.handle in self._requests:
                self._requests[finished.handle].finished = True
                yield from self._completed(finished.handle)
            case None:
                yield from self._overdue()

    def _overdue(self) -> Iterator[Sample]:
        """Requests whose end the plugin was not told of: their rows are there or they are not."""
        since = time.monotonic() - _ROWS_SECONDS
        for handle, request in list(self._requests.items()):
            if request.response is not None and request.answered_at < since:
                request.finished = True
                yield from self._completed(handle)

    def _start_again(self, reason: str) -> None:
        """Raises EngineError."""
        on_trial = self._on_trial
        requests = self._forget()
        if on_trial:
            self._engine.works()  # a death that is its prompt's does not count as the engine's
        self._engine.start_again(reason)
        if self._stopped:
            return
        for request in requests:
            request.deaths += 1
        if on_trial:
            self._engine.works()
            self._blame(requests.pop(), reason)
            return
        logger.warning("%d prompts that were in the engine are generated again", len(requests))
        for request in requests:
            self._lost.add(request)

    def _blame(self, request: Request, reason: str) -> None:
        """Raises EngineError."""
        times = f"the engine died {request.deaths} times with it, the last time with nothing else"
        self._faults.likely(request.prompt.id, f"{times} in it; {reason}")

    def _completed(self, handle: int) -> Iterator[Sample]:
        request = self._requests[handle]
        if not request.complete:
            return
        response = request.response
        assert response is not None
        sample = None if request.aborted else self._sample(handle, request, response)
        del self._requests[handle]
        self._engine.rows.drop(handle)
        if sample is not None:
            self._engine.works()
            self._faults.settle()
            yield sample
        elif request.tries < TRIES:
            self._try_again(request, response)
        else:
            self._faults.likely(request.prompt.id, f"SGLang aborted it: {response.error}")

    def _try_again(self, request: Request, response: Response) -> None:
        if request.aborted:
            words = (request.prompt.id, response.error)
            logger.warning("made again: sample %s: SGLang aborted it: %s", *words)
        request.tries += 1
        self.recaptured += 1
        self._submit(request)

    def _sample(self, handle: int, request: Request, response: Response) -> Sample | None:
        """None when a row is missing for the first time. Raises CaptureError."""
        input_ids, loss_mask = _tokens(request.prompt, response)
        n = len(input_ids) - 1
        collected = self._engine.rows.collect(handle, input_ids[:n])
        if isinstance(collected, int):
            cause = "SGLang's scheduler handed out others, or none; see its log"
            error = CaptureError(str(request.prompt.id), collected, n, cause)
            if request.tries == TRIES:
                raise error
            logger.warning("made again: %s", error)
            return None
        return self._record(request.prompt, response, input_ids, loss_mask, collected)

    def _record(
        self,
        prompt: Prompt,
        response: Response,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        collected: Collected,
    ) -> Sample:
        generated = prompt.response_ids is None
        reason = response.finish_reason if generated else prompt.finish_reason
        return Sample(
            id=prompt.id,
            key=prompt.key,
            input_ids=input_ids,
            loss_mask=loss_mask,
            hidden_states=collected.hidden_states,
            counters=collected.counters,
            finish_reason=reason or "unknown",
            sampling=self._config.sampling.record() if generated else {},
        )

    def _arguments(self, target: Target, captures: bool = True) -> dict[str, Any]:
        """Of `sgl.Engine`."""
        config = self._config
        arguments: dict[str, Any] = {
            "model_path": str(target.path),
            "skip_tokenizer_init": True,
            "tp_size": config.tp_size,
            "base_gpu_id": config.replica * config.tp_size,
            "max_running_requests": config.concurrency,
            "dtype": config.dtype,
            "random_seed": config.sampling.seed,
            "disable_radix_cache": not self._capture.prefix_cache,
        }
        if captures:
            # Names the convention of the layer ids; no drafter is loaded.
            arguments["speculative_algorithm"] = "DFLASH"
            arguments["enable_return_aux_hidden_states"] = True
            arguments["return_aux_hidden_state_layer_ids"] = list(self.descriptor.layer_ids)
        if config.memory_fraction is not None:
            arguments["mem_fraction_static"] = config.memory_fraction
        return {**arguments, **config.args}


def _tokens(prompt: Prompt, response: Response) -> tuple[np.ndarray, np.ndarray]:
    """input_ids int32 [n+1] and loss_mask uint8 [n+1]."""
    answer = response.output_ids if prompt.response_ids is None else prompt.response_ids
    input_ids = np.concatenate([prompt.input_ids, answer]).astype(np.int32)
    loss_mask = np.zeros(len(input_ids), np.uint8)
    loss_mask[len(prompt.input_ids) :] = 1
    return input_ids, loss_mask


def _sampling(config: SGLangConfig, target: Target) -> dict[str, Any]:
    """SGLang's sampling parameters."""
    sampling = config.sampling
    ends = {*end_tokens(target), *sampling.stop_token_ids}
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": sorted(ends),
    }


def _check(config: SGLangConfig, target: Target, descriptor: Descriptor) -> None:
    """Raises LayerIdError, ModelError, EngineError."""
    if descriptor.layer_ids[-1] == target.num_layers - 1:
        reason = (
            "SGLang does not give out the last block's output, only what the final norm makes of "
            'it, with [target] final = "postnorm"'
        )
        raise LayerIdError(descriptor.layer_ids, target.num_layers - 1, reason)
    if descriptor.final == "prenorm":
        raise EngineError(
            '[target] final = "prenorm": SGLang keeps the final state after the norm only; set '
            '"postnorm", from which `draftfeed export` computes the state before it'
        )
    dtype = str(target.text_config.dtype).removeprefix("torch.")
    if config.dtype == "auto" and dtype != "bfloat16":
        # SGLang's own "auto" runs fp32 checkpoints in fp16, and those that do not say.
        reason = f'its config says {dtype}: set [engine] dtype = "bfloat16" (or "float32")'
        raise ModelError(target.path, reason)


def _slab_shape(ring_bytes: int, descriptor: Descriptor) -> SlabShape:
    """Slabs of whole rows, 16 of them where rows are small enough."""
    rows = max(1, ring_bytes // (_SLABS * descriptor.row_bytes()))
    return SlabShape(_SLABS, rows, descriptor.layers, descriptor.hidden_size)
