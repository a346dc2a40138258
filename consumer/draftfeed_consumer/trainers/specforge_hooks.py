"""SpecForge's three extension points, filled with a stream.

    stream -> Feeder -> Shelf <- ShelfStore (SpecForge fetches tensors)
                                 Ledger     (SpecForge says what a step has used)
                                 Checkpoints (SpecForge saves; our state goes along)

Written against SpecForge 0.2.0; needs the `specforge` extra.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from specforge.runtime.contracts import SCHEMA_VERSION, FeatureHandle, SampleRef
from specforge.runtime.control_plane.metadata_store import MetadataStore
from specforge.runtime.data_plane.feature_store import FeatureStore
from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel
from specforge.training.checkpoint import CheckpointManager

from draftfeed_consumer.checkpoints import fsync_path, write_durably
from draftfeed_consumer.policy import Policy, verdict
from draftfeed_consumer.trainers import Item, SampleStream
from draftfeed_consumer.trainers.specforge_algorithms import Algorithm
from draftfeed_consumer.trainers.specforge_checkpoints import checkpoint_name, rotate
from draftfeed_proto.ids import SampleId

logger = logging.getLogger(__name__)

ACKNOWLEDGED = "optimizer-boundary-durable-ack"
"""SpecForge's reason for dropping a sample that was trained; every other reason is a loss."""
LONGEST_PAUSE = 9
"""Between checkpoints that do not help: 2**9 seconds."""


class Shelved(NamedTuple):
    id: SampleId
    tensors: dict[str, torch.Tensor]


class Shelf:
    """Samples between the stream and the trainer, by name. Bounded in number.

    They are copies: a whole optimizer step must be here before SpecForge starts on it, and in the
    stream's own buffer that could be more than fits, which would be a deadlock.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._samples: dict[str, Shelved] = {}
        self._closed = False
        self.tail: list[SampleId] = []

    def wait_for_room(self) -> bool:
        """Blocks while full. False when the shelf was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._samples) < self._capacity)
            return not self._closed

    def put(self, name: str, sample: Shelved) -> None:
        with self._changed:
            self._samples[name] = sample

    def get(self, name: str) -> Shelved:
        with self._changed:
            return self._samples[name]

    def drop(self, name: str, reason: str) -> None:
        with self._changed:
            sample = self._samples.pop(name, None)
            if sample is not None and reason != ACKNOWLEDGED:
                self.tail.append(sample.id)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed


class ShelfStore(FeatureStore):  # type: ignore[misc]  # SpecForge is untyped
    """Where SpecForge fetches tensors: on every rank."""

    retain_on_release = True  # it fetches once and drops after the optimizer step

    def __init__(self, shelf: Shelf, dtype: torch.dtype) -> None:
        self._shelf, self._dtype = shelf, dtype

    def get(
        self, sample_ref: SampleRef, *, device: Any = "cpu", names: Any = None
    ) -> tuple[dict[str, torch.Tensor], FeatureHandle]:
        """The algorithm's tensors, the states in the training dtype."""
        name = sample_ref.sample_id
        # fp16 overflows inside a drafter; the stream's values are exact in fp32.
        tensors = {
            key: tensor.to(self._dtype) if tensor.is_floating_point() else tensor
            for key, tensor in self._shelf.get(name).tensors.items()
        }
        return tensors, FeatureHandle(name, 1, name)

    def abort(self, sample_id: str, *, reason: str) -> None:
        self._shelf.drop(sample_id, reason)

    def release(self, handle: FeatureHandle, *, reason: str = "consumed") -> None:
        """Nothing: `abort` ends a sample's stay."""

    def adopt(self, ref: SampleRef) -> None:
        """Nothing: whatever is known here was put here."""

    def health(self) -> dict[str, Any]:
        return {"release_pending": 0}

    def put(self, tensors: Any, *, sample_id: str, metadata: Any) -> SampleRef:
        raise NotImplementedError("samples come from the stream")


class AckLedger(MetadataStore):  # type: ignore[misc]
    """What SpecForge takes for its database: it only passes acknowledgements on."""

    def __init__(
        self,
        stream: SampleStream,
        shelf: Shelf,
        metrics: Callable[[], dict[str, float]],
        step: int | None,
    ) -> None:
        """step: of the checkpoint resumed from; SpecForge insists that they agree."""
        self._stream, self._shelf, self._metrics = stream, shelf, metrics
        self._refs: dict[str, SampleRef] = {}
        self._lock = threading.Lock()
        self.step = step
        self.trained = 0
        self.error: BaseException | None = None
        self.on_step: Callable[[], None] = lambda: None
        """Called between a step and SpecForge's decision to save."""

    def commit_sample(self, ref: SampleRef) -> bool:
        with self._lock:
            self._refs[ref.sample_id] = ref
        return True

    def is_committed(self, sample_id: str) -> bool:
        return sample_id in self._refs

    def get_committed(self, sample_id: str) -> SampleRef | None:
        # Asked for once, right after the acknowledgement: no history is kept.
        with self._lock:
            return self._refs.pop(sample_id, None)

    def committed_count(self) -> int:
        return len(self._refs)

    def all_committed_ids(self) -> list[str]:
        return []  # after a resume the stream itself delivers what is missing

    def record_train_ack(
        self, sample_ids: list[str], *, global_step: int | None, optimizer_durable: bool
    ) -> None:
        assert optimizer_durable
        assert global_step is not None
        ids = [self._shelf.get(name).id for name in sample_ids]
        try:
            self._stream.trained(ids, global_step, self._metrics())
        except BaseException as error:
            self.error = error  # SpecForge passes on only its text
            raise
        self.step = global_step
        self.trained += len(ids)
        self.on_step()

    def durable_marker(self) -> dict[str, Any]:
        return {"acked": set(), "global_step": self.step, "optimizer_durable": True}


class Checkpoints(CheckpointManager):  # type: ignore[misc]
    """SpecForge's checkpoints, with the stream's state inside, durable before they are reported,
    and with names that keep apart what different nodes save."""

    def __init__(self, stream: SampleStream, ledger: AckLedger, **options: Any) -> None:
        super().__init__(**options)
        self._stream, self._ledger = stream, ledger
        self._name = ""
        """Of the checkpoint being made."""
        self.last: Path | None = None
        self.error: BaseException | None = None

    def save(
        self, state: dict[str, Any] | None, step: int, *, rank_state: dict[str, Any] | None = None
    ) -> str:
        assert state is not None
        assert self._ledger.step == step, (self._ledger.step, step)
        state["draftfeed"] = made = self._stream.state_dict()
        self._name = checkpoint_name(made, step)
        # At the end of a stream SpecForge counts the epoch as done, and a resume would train
        # nothing. Where we are in the data is the stream's to know.
        state.update(epoch=0, epoch_batch=0, epoch_samples=0)
        saved: str = super().save(state, step, rank_state=rank_state)
        self.last = Path(saved)
        logger.info("checkpoint of step %d in %s", step, saved)
        self._stream.committed(made)
        return saved

    def checkpoint_dir(self, step: int) -> str:
        return str(Path(self.output_dir) / self._name)

    def _atomic_save(self, obj: Any, path: str) -> None:  # pyright: ignore
        """Before older checkpoints are rotated away, this one is on the disk."""
        try:
            write_durably(Path(path), lambda file: torch.save(obj, file))
            fsync_path(Path(path).parent.parent)
        except BaseException as error:
            self.error = error  # SpecForge passes on only its text
            raise

    def _rewind(self, step: int) -> None:
        """Nothing: SpecForge would first delete what has as many steps, the last checkpoint when
        it is made again, and those of a newer node when this one was replaced."""

    def _point(self, name: str, ckpt_dir: str) -> None:
        """Nothing: whoever comes last would point to his own."""

    def _rotate(self, keep_step: int) -> None:
        made = Path(self.checkpoint_dir(keep_step))
        rotate(Path(self.output_dir), made, self.max_checkpoints)


class IdleCheckpoints:
    """Makes the checkpoint that a producer wants while the training thread waits for samples.

    A full spool waits for a checkpoint; a trainer that saves only after a step would wait for the
    spool, and both for ever. A producer frees what its last few checkpoints all contain, so that
    more than one may be needed with nothing trained in between. If that does not help either,
    each further one comes after a longer pause.
    """

    def __init__(
        self, stream: SampleStream, save: Callable[[], object], step: Callable[[], int | None]
    ) -> None:
        """step: the last one, at an optimizer boundary; None elsewhere."""
        self._stream, self._save, self._step = stream, save, step
        self._saved_step = -1
        self._repeats = 0
        self._due = 0.0
        self._warned = False

    def sleep(self, seconds: float) -> None:
        """What SpecForge does between two looks at the feed."""
        if self._stream.checkpoint_wanted and time.monotonic() >= self._due:
            self._make()
        time.sleep(seconds)

    def _make(self) -> None:
        step = self._step()
        if step == 0 and not self._warned:
            logger.warning("the producer's spool is full before one optimizer step has its samples")
            self._warned = True
        if not step:
            return
        self._repeats = self._repeats + 1 if step == self._saved_step else 0
        self._saved_step = step
        self._save()
        self._due = time.monotonic() + 2 ** min(self._repeats, LONGEST_PAUSE) - 1


class Feeder:
    """A thread that takes samples off the stream, judges them and hands them to SpecForge.

    It waits in two places: for the stream, and for room on the shelf. The first ends when the
    stream is closed by its owner, the second when the shelf is closed.
    """

    def __init__(
        self,
        stream: SampleStream,
        shelf: Shelf,
        channel: StreamingRefChannel,
        policy: Policy,
        algorithm: Algorithm,
    ) -> None:
        self._stream, self._shelf, self._channel, self._policy = stream, shelf, channel, policy
        self._algorithm = algorithm
        self._thread = threading.Thread(target=self._run, name="draftfeed-feeder", daemon=True)
        self.rejected = 0
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """The shelf is closed first. A thread that still waits for the stream ends with it."""
        self._shelf.close()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._feed()
        except BaseException as error:  # noqa: BLE001  # passed on to the training thread
            if self._shelf.closed:
                return
            self.error = error
            self._channel.fail(f"{type(error).__name__}: {error}")

    def _feed(self) -> None:
        samples: Iterator[Item] = iter(self._stream)
        while self._shelf.wait_for_room():
            item = next(samples, None)
            if self._shelf.closed:
                return
            if item is None:
                self._channel.close()
                return
            self._offer(item)

    def _offer(self, item: Item) -> None:
        id, name = item["id"], str(item["id"])
        reason = self._fault(item)
        if reason:
            self.rejected += 1
            self._stream.reject(id, reason)
            return
        tensors = self._algorithm.tensors(item)
        self._shelf.put(name, Shelved(id, tensors))
        self._stream.release([id])
        self._channel.publish(_reference(name, self._algorithm, tensors["input_ids"].shape[1]))

    def _fault(self, item: Item) -> str:
        """Why not to train on it, or nothing."""
        judged = verdict(self._policy, item)
        if judged.action == "warn":
            logger.warning("sample %s: %s", item["id"], judged.reason)
        if judged.action == "reject":
            return judged.reason
        return self._algorithm.fault(item)


def _reference(name: str, algorithm: Algorithm, tokens: int) -> SampleRef:
    return SampleRef(
        sample_id=name,
        run_id="draftfeed",
        source_task_id=None,
        feature_store_uri=f"draftfeed://{name}",
        feature_keys={key: key for key in algorithm.features},
        feature_specs={},
        strategy=algorithm.strategy,
        schema_version=SCHEMA_VERSION,
        num_tokens=tokens,
        metadata={"target_repr": algorithm.target_repr},
    )
