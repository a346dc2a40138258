"""draftfeed's producer in transport.py: the whole of it but its engine, whose samples exist
already."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np

from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import Engine, SyntheticConfig
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.service import ProducerService
from draftfeed_producer.sources import PromptSource
from draftfeed_producer.spool import SpoolConfig
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import LayerCounters, Sample
from transport_orders import LOOPBACK, Order, Talk
from transport_states import StateSet

LOOK_SECONDS = 0.02
"""Between two looks at what was committed."""
LAYERS = 64
"""Of the target, which says nothing here: states of five of them are sent."""


def serve(order: Order, states: StateSet, talk: Talk) -> None:
    """For as long as transport.py lets it."""
    _, layers, hidden = states.samples[0].shape
    keys = order.keys
    config = ProducerConfig(
        engine=SyntheticConfig(
            samples=order.producers * order.all_samples,
            shard_size=order.all_samples,
            num_layers=LAYERS,
            layer_ids=tuple(range(layers)),
            hidden_size=hidden,
        ),
        spool=SpoolConfig(
            dir=order.directory / "spool",
            segment_bytes=order.segment_bytes,
            shards=str(order.number),
        ),
        server=ServerConfig(
            bind=f"tcp://{order.host}:*",
            insecure=keys is None and order.host != LOOPBACK,
            key=None if keys is None else keys / "producers.secret",
            clients=() if keys is None else (keys / "clients",),
            same_host=order.same_host,
        ),
    )
    _Producer(config, order, states, talk).run()


class _Producer(ProducerService):
    """All of it is as in `draftfeed producer`, but for where samples come from."""

    def __init__(self, config: ProducerConfig, order: Order, states: StateSet, talk: Talk) -> None:
        super().__init__(config)
        self._order, self._states, self._talk = order, states, talk

    def _load_engine(self, source: PromptSource, stack: ExitStack) -> Engine:
        assert self._listener is not None
        self._talk.tell("serving", address=self._listener.address)
        self._engine = _Engine(self._config, self._order, self._states, self._talk, self._committed)
        return self._engine

    def _committed(self) -> int:
        assert self._spool is not None
        return len(self._spool.committed)


class _Engine:
    """As fast as the trainer: it takes no time, and waits when it is too far ahead."""

    loading = False
    recaptured = 0

    def __init__(
        self,
        config: ProducerConfig,
        order: Order,
        states: StateSet,
        talk: Talk,
        committed: Callable[[], int],
    ) -> None:
        """committed: how many samples of this producer are in a checkpoint."""
        assert isinstance(config.engine, SyntheticConfig)
        self.descriptor = config.engine.descriptor()
        self.captured = 0
        self._order, self._states, self._talk = order, states, talk
        self._committed = committed
        longest = states.longest_rows
        self._ids, self._mask = np.zeros(longest + 1, np.int32), np.ones(longest + 1, np.uint8)

    def max_rows(self, prompt_tokens: int) -> int:
        return self._states.longest_rows

    def run(
        self, prompts: Iterator[Prompt], give_up: Callable[[SampleId, str], None] | None = None
    ) -> Iterator[Sample]:
        order = self._order
        first = order.number * order.all_samples
        for prompt in prompts:
            n = prompt.id.ordinal - first
            if word := {0: "warm", order.warm: "live", order.samples: "fill"}.get(n):
                self._talk.wait(word)
            while n < order.samples and n - self._committed() >= order.ahead:
                time.sleep(LOOK_SECONDS)
            yield self._sample(prompt, n)
        self._talk.tell("filled")

    def _sample(self, prompt: Prompt, n: int) -> Sample:
        index = self._order.index(self._order.number, n, len(self._states.samples))
        states = self._states.samples[index]
        rows, layers, _ = states.shape
        self.captured += rows
        return Sample(
            id=prompt.id,
            key=prompt.key,
            input_ids=self._ids[: rows + 1],
            loss_mask=self._mask[: rows + 1],
            hidden_states=states,
            counters=(LayerCounters(0, 0, 0, 0),) * layers,
            finish_reason="length",
            sampling={},
        )

    def stop(self) -> None: ...

    def close(self) -> None: ...
