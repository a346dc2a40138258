"""`HiddenStateStream`: what a trainer imports."""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from draftfeed_consumer.actions import Attach, Identity
from draftfeed_consumer.attachment import Options
from draftfeed_consumer.buffer import Buffer, BufferConfig, BufferStatistics
from draftfeed_consumer.client import Client, ClientConfig
from draftfeed_consumer.errors import ConsumerError, InWorkerProcess, StateError, StreamClosed
from draftfeed_consumer.ledger import Ledger, parse, plain
from draftfeed_consumer.membership import Membership
from draftfeed_consumer.ranks import Agreement, Life, Ranks
from draftfeed_consumer.statistics import ClientStatistics
from draftfeed_proto import codecs
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample
from draftfeed_proto.workers import Workers

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2

Item = dict[str, Any]


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    producer: ClientConfig = ClientConfig()
    expect: Expectation = Expectation()
    """What the stream must be; the producer refuses a consumer that expects something else."""
    buffer: BufferConfig = BufferConfig()


class StreamStatistics(NamedTuple):
    client: ClientStatistics
    buffer: BufferStatistics
    held: int
    trained: int
    uncommitted: int
    """Trained, and in no durable checkpoint."""
    rejected: int
    step: int
    metrics: dict[str, float]
    """Of the last acknowledged step."""


class HiddenStateStream(torch.utils.data.IterableDataset[Item]):
    """Samples of one or more producers, each trained exactly once.

    The order of calls: make it, `load_state_dict` when resuming, iterate; `release` a sample when
    its tensors are copied, `trained` when an optimizer step has used it, `state_dict` into the
    checkpoint at a step boundary, `committed` when that checkpoint is durable, `close`.

    Iterating yields dicts of

        id             SampleId
        key            str
        input_ids      int32[n+1]     the last one has no row: it was sampled, never fed
        loss_mask      uint8[n+1]     1 on the response
        hidden_states  fp16 or bf16 [n, L, H], of the descriptor's layer_ids
        final_states   likewise [n, H], where its `final` is not "none"
        counters       LayerCounters of each layer, the final state's last
        finish_reason  str

    and ends when the producers have nothing more, or after `drain`. Every other end is an error:
    StreamLost, ProducerClosing, StreamRefused, Fenced, StreamClosed. The tensors stay valid for as
    long as somebody refers to them; `release` is about counting bytes.

    With `ranks`, each rank of a data-parallel run has a stream of its own, and `descriptor`,
    `state_dict`, `committed`, `wait_committed` and `agree` are collective: all ranks call them in
    the same order.
    """

    def __init__(
        self,
        config: StreamConfig,
        observe: Callable[[Sample], None] | None = None,
        attach: Attach = Attach(),  # noqa: B008 - frozen
        ranks: Ranks | None = None,
    ) -> None:
        """Begins to attach and returns at once. Raises ValueError when `attach` does not fit, and
        UnavailableISA when the environment asks for a codec that cannot run here.

        observe: called in another thread with every sample that arrives.
        """
        check_without(attach, config.producer.addresses)
        self._config, self._attach, self._ranks = config, attach, ranks
        self._process = secrets.token_hex(8)
        codecs.PACKED.prepare()
        self._workers = Workers(config.buffer.decode_threads)
        self._buffer = Buffer(config.buffer)
        self._ledger = Ledger()
        self._client = Client(config.producer, self._buffer, self._ledger, observe)
        self._shared = False
        self._filling: list[Item] = []
        """A batch that is not full yet."""
        self._iterated = False
        self._rejected = 0
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._on_step: Callable[[int, list[SampleId], dict[str, float]], None] | None = None
        self._on_idle_checkpoint: Callable[[], object] | None = None
        if ranks is None or ranks.leader:
            incarnation = ranks.incarnation if ranks else secrets.token_hex(8)
            self._client.start(self._membership(incarnation, term=1))

    def _membership(self, incarnation: str, term: int) -> Membership:
        rank, size = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
        identity = Identity(
            group=self._config.producer.group,
            member=str(rank),
            members=size,
            leader=rank == 0,
            incarnation=incarnation,
            process=self._process,
        )
        options = Options(
            attach=self._attach,
            expect=self._config.expect,
            capacity_bytes=self._config.buffer.capacity_bytes,
            batch_samples=self._config.buffer.batch_samples,
            term=term,
        )
        addresses = self._config.producer.addresses
        return Membership(addresses, identity, self._buffer, self._ledger, options, self._workers)

    @property
    def known_descriptor(self) -> Descriptor | None:
        """Without waiting for it."""
        return self._client.descriptor

    @property
    def descriptor(self) -> Descriptor:
        """What the stream carries. Waits for the producers; raises StreamError."""
        if self._ranks is not None and not self._shared:
            self._share(self._ranks)
        self._wait_granted()
        if self._client.failure is not None:
            raise self._client.failure
        assert self._client.descriptor is not None
        return self._client.descriptor

    def _wait_granted(self) -> None:
        while not self._client.granted.wait(POLL_SECONDS):
            if self.draining:
                raise StreamClosed

    def _share(self, ranks: Ranks) -> None:
        """The others attach in the term that the leader got."""
        life = None
        if ranks.leader:
            life = self._life(ranks)
        shared = ranks.share(life, given_up=lambda: self.draining)
        self._shared = True
        if ranks.leader:
            return
        if not shared.term:
            raise ConsumerError(f"the first rank did not get the stream: {shared.reason}")
        self._client.start(self._membership(shared.incarnation, shared.term))

    def _life(self, ranks: Ranks) -> Life:
        try:
            self._wait_granted()
        except StreamClosed as error:
            return Life(ranks.incarnation, 0, str(error))
        if self._client.failure is not None:
            return Life(ranks.incarnation, 0, str(self._client.failure))
        return Life(ranks.incarnation, self._client.term)

    def __reduce__(self) -> NoReturn:
        raise InWorkerProcess

    def __iter__(self) -> Iterator[Item]:
        if torch.utils.data.get_worker_info() is not None:
            raise InWorkerProcess
        return self._items()

    def _items(self) -> Iterator[Item]:
        descriptor = self.descriptor
        self._begin()
        while (sample := self._next(idle=self._save_if_wanted)) is not None:
            yield to_item(sample, descriptor)

    def batch(self, samples: int) -> list[Item]:
        """So many; fewer at the end and after `drain`; none when it cannot be filled now. For
        loops that `agree`, in which no rank may wait for samples while others wait for it: what
        it waits for may be with them, or stay away until all make a checkpoint."""
        descriptor = self.descriptor
        self._begin()
        started = time.monotonic()

        def stalled() -> bool:
            waited_seconds = time.monotonic() - started
            return self.checkpoint_wanted or waited_seconds > self._config.buffer.stall_seconds

        while len(self._filling) < samples and (sample := self._next(idle=stalled)) is not None:
            self._filling.append(to_item(sample, descriptor))
        if len(self._filling) < samples and not (self.draining or self._buffer.ended):
            return []
        batch, self._filling = self._filling, []
        return batch

    def _begin(self) -> None:
        if not self._iterated:
            self._iterated = True
            self._client.open()

    def _next(self, idle: Callable[[], bool]) -> Sample | None:
        """idle: called while nothing comes; when it is true there will be no sample this time."""
        while not self.draining and not self._buffer.wait(POLL_SECONDS):
            if idle():
                return None
        if self.draining or (sample := self._buffer.take()) is None:
            return None
        self._ledger.take(sample.id)
        self._client.at_work_changed()
        return sample

    def _save_if_wanted(self) -> bool:
        save = self._on_idle_checkpoint
        if save is not None and self.checkpoint_wanted:
            save()
        return False

    def on_idle_checkpoint(self, save: Callable[[], object]) -> None:
        """Call this, in the iterating thread, while it waits for a sample and the producer asks
        for a checkpoint: its disk is full, and the trainer would wait for it for ever."""
        self._on_idle_checkpoint = save

    def checkpoint_every(self, samples: int) -> None:
        """How many samples the whole group trains between two checkpoints; before iterating. The
        producers say so when their quota cannot hold as many."""
        self._client.checkpoint_samples = samples

    def agree(self, have_batch: bool) -> Agreement:
        """Before each step of a data-parallel run: what all ranks do. See `Agreement`.

        Raises StateError when they loaded different states."""
        draining, wanted = self.draining, self.checkpoint_wanted
        if self._ranks is None:
            over = not have_batch and (draining or self._buffer.ended)
            return Agreement(have_batch, wanted, draining, over)
        agreed = self._ranks.agree(
            have_batch,
            self._ledger.began,
            more=lambda: not self._buffer.ended,
            checkpoint=wanted,
            draining=draining,
        )
        if agreed.draining:
            self.drain()
        return agreed

    def drain(self) -> None:
        """Stop after what the trainer has: iteration ends, everything it has not seen goes back to
        the producers. Checkpoints and commits work until `close`. For signal handlers too."""
        self._client.drain()

    @property
    def draining(self) -> bool:
        return self._client.draining

    def release(self, ids: Iterable[SampleId]) -> None:
        """The tensors are copied or no longer needed: their room may be used again."""
        for id in ids:
            self._buffer.release(id)
        self._client.wake()

    def trained(
        self, ids: Iterable[SampleId], step: int, metrics: dict[str, float] | None = None
    ) -> None:
        """A completed optimizer step used all of each of these samples.

        Raises ValueError for an id that is not held by this consumer.
        """
        done = list(ids)
        self._ledger.train(done)
        self._client.at_work_changed()
        self._step, self._metrics = step, metrics or {}
        self.release(done)
        if self._on_step is not None:
            self._on_step(step, done, self._metrics)

    def on_step(self, callback: Callable[[int, list[SampleId], dict[str, float]], None]) -> None:
        """Call this with (step, ids, metrics) after every acknowledged step: order over a live
        stream cannot be reproduced from a seed, so it is recorded."""
        self._on_step = callback

    def reject(self, id: SampleId, reason: str) -> None:
        """This sample is not to be trained, now or ever; the producer reports it."""
        logger.warning("rejected sample %s: %s", id, reason)
        self._rejected += 1
        self._client.reject(id, reason, "rejected")
        self.release([id])

    def tail(self, ids: Iterable[SampleId]) -> None:
        """The last few, which did not fill an optimizer step of a trainer that needs full ones.
        They are not to be trained; the producer reports them as `tail`."""
        for id in ids:
            self._client.reject(id, "did not fill an optimizer step", "tail")
            self.release([id])

    @property
    def checkpoint_wanted(self) -> bool:
        """The producer asks for a checkpoint at the next step boundary: its disk fills up, and that
        frees some of it, or much was trained that is in none.

        A trainer that only saves at the end may ignore it, if the spool's quota holds everything.
        Not while a checkpoint would hold nothing new and there are samples here to train first.
        """
        if not self._client.checkpoint_wanted.is_set():
            return False
        return self._ledger.uncommitted or not self._buffer.statistics().ready

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint made now must hold. Plain values; take it at a step boundary.

        Of the whole group, the same on every rank: any number of ranks can load it.
        """
        self._client.checkpoint_wanted.clear()
        state = self._ledger.state(self.descriptor.stream_id())
        if self._ranks is None:
            return state
        merged = self._ranks.union(parse(state))
        self._ledger.join(merged)
        return plain(merged)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, before iterating.

        Raises StateError when it is no state of ours, or of another stream, or too late.
        """
        if self._iterated:
            raise StateError("load_state_dict comes before iterating: samples have come already")
        stream_id = self.descriptor.stream_id()
        loaded = parse(state)
        if loaded.stream_id != stream_id:
            raise StateError(
                f"the checkpoint belongs to stream {loaded.stream_id}, the producer serves "
                f"{stream_id}: other model, layers or tokenizer"
            )
        self._ledger.load(state)

    def committed(self, state: dict[str, Any]) -> None:
        """The checkpoint that holds `state` is durable. Returns at once; with ranks, when it is
        durable on all of them."""
        durable = parse(state)
        if self._ranks is not None:
            self._ranks.barrier()
        self._ledger.committed(durable)
        self._client.commit(durable)

    def wait_committed(self, timeout_seconds: float = 30.0) -> bool:
        """Whether every producer has stored the last commit, now or within the time."""
        if self._ranks is None:
            return self._client.wait_acknowledged(timeout_seconds)
        known = not self._ranks.leader or self._client.wait_acknowledged(timeout_seconds)
        return self._ranks.all_true(known)

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            self._client.statistics(),
            self._buffer.statistics(),
            self._ledger.held_count,
            self._ledger.trained_count,
            self._ledger.uncommitted_count,
            self._rejected,
            self._step,
            self._metrics,
        )

    def close(self, failed: bool = False) -> None:
        """Leave: what the trainer has not seen goes back to the producers at once, the rest when
        the next consumer attaches.

        failed: the trainer did. A sample that it was at work on three times in a row when it
        failed is given to nobody any more.
        """
        self._client.close(failed)
        self._workers.close()


def check_without(attach: Attach, addresses: tuple[str, ...]) -> None:
    """Raises ValueError."""
    strange = set(attach.without) - set(addresses)
    if strange:
        raise ValueError(
            f"--without {', '.join(sorted(strange))}: not one of [producer] addresses, which are "
            f"{', '.join(addresses)}"
        )
    if set(attach.without) == set(addresses):
        raise ValueError("--without names every producer; at least one must be there")


def to_item(sample: Sample, descriptor: Descriptor) -> Item:
    """The dict that iterating yields, of a sample of that stream. Its states are views of the
    sample's."""
    dtype = torch.float16 if descriptor.dtype == "fp16" else torch.bfloat16
    states, tapped = torch.from_numpy(sample.hidden_states).view(dtype), len(descriptor.layer_ids)
    assert states.shape[1] == descriptor.layers, states.shape
    item = {
        "id": sample.id,
        "key": sample.key,
        "input_ids": torch.from_numpy(sample.input_ids),
        "loss_mask": torch.from_numpy(sample.loss_mask.copy()),
        "hidden_states": states[:, :tapped],
        "counters": sample.counters,
        "finish_reason": sample.finish_reason,
    }
    return item if descriptor.final == "none" else {**item, "final_states": states[:, tapped]}
