"""What the services write down while they run, one JSON object a line, and the demo afterwards.

The same Structs are written, shown live and read back for the report. Fields that a reader may
find missing have defaults.
"""

import math
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Bounds are for readers: what is shown must be a figure that can be shown."""


class ProducerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `producer/stats.jsonl`: counters since the process began, levels now.

    Lists have one entry a layer.
    """

    time_seconds: Seconds
    """Monotonic: since the machine started in the file, since the first snapshot in a report."""
    phase: str = ""
    """loading, generating, delivering or done"""
    prompts: Count = 0
    samples: Count
    tokens: Count
    """Tokens fed to the target in those, which is the number of their rows."""
    captured: Count = 0
    """Rows captured, of samples still being generated too."""
    recaptured: Count = 0
    """Samples that lacked rows and were made again."""
    response_tokens: Count = 0
    response_lengths: list[Count] = []
    """Those samples by the tokens of their response: up to 1, 2, 4 ..., and more."""
    generating_seconds: Seconds = 0.0
    """Time in which the engine was there and prompts were left; pauses are in it."""
    logical_bytes: Count
    """Hidden states alone, as the target made them: tokens x layers x hidden size x 2."""
    encoded_bytes: Count = 0
    """The same samples as chunks, with their token ids and masks."""
    wire_bytes: Count
    """Everything handed to the socket: chunks, messages, what was sent again."""
    spool_bytes: Count = 0
    spool_quota_bytes: Count = 0
    spool_capacity_bytes: Count = 0
    """To what the spool can grow, by its quota or the disk, whichever ends first."""
    spool_paused: bool = False
    """For want of space."""
    alarm: str = ""
    """Why no prompts are admitted; empty while they are."""
    term: Count = 0
    """Rises when another consumer takes the stream."""
    members: list[str] = []
    """Ranks that have a session."""
    same_host: list[str] = []
    """Of these, those that read the spool's files; their bytes count as if they were sent."""
    leased: Count = 0
    spooled: Count = 0
    """In the spool, and nobody has them."""
    committed: Count = 0
    rejected: Count = 0
    """Ended untrained, in whatever state."""
    ended: dict[str, Count] = {}
    """Those by state: rejected, quarantined, tail."""
    regenerated: Count = 0
    """Samples made again because the first record was damaged or lost."""
    quality_window: Count = 0
    """Finished samples that the quality gate looks at."""
    quality_degenerate: Count = 0
    """Of those."""
    quality_closed: bool = False
    oldest_uncommitted_seconds: Seconds = 0.0
    """Age of the oldest sample that is not terminal."""
    commit_age_seconds: Seconds = 0.0
    """Since the last commit, or since the start."""
    commits: Count = 0
    swaps: Count = 0
    """Consumers that took the stream from one that was attached, with --takeover."""
    sent_bytes: dict[str, Count] = {}
    """By member."""
    sent_logical_bytes: dict[str, Count] = {}
    """By member: the hidden states in those."""
    credit_bytes: dict[str, Count] = {}
    """By member: encoded, what it may be sent and was not."""
    asset_bytes: Count = 0
    """Of the target's files, sent; not among the wire bytes."""
    loop_age_seconds: Seconds = 0.0
    """Since the loop that moves data last came round."""
    stall_seconds: dict[str, Seconds] = {}
    layers: list[str] = []
    """Which the lists below are of: layer ids, and "final" for the final state."""
    nonfinite: list[Count] | None = None
    saturated: list[Count] = []
    inexact: list[Count] = []
    zero_rows: list[Count] | None = None
    replayed: Count = 0
    """Samples served out of the archive, or once more out of the spool."""
    archive_bytes: Count = 0
    archive_quota_bytes: Count = 0
    """0: what the drives hold, or there is no archive."""
    archive_segments: Count = 0
    archive_samples: Count = 0
    """Prompts of which the archive has a sample."""
    archive_missed: Count = 0
    """Samples that were not archived."""
    archive_alarm: str = ""
    """Why nothing is archived at the moment; empty when it is not so."""

    @property
    def made(self) -> int:
        """Prompts that need not be generated any more, those of earlier processes included."""
        return self.committed + self.leased + self.spooled + self.rejected


class ConsumerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `consumer/stats.jsonl`: counters since the process began, levels now."""

    time_seconds: Seconds
    """Monotonic: since the machine started in the file, since the first snapshot in a report."""
    attached: bool = False
    term: Count = 0
    producers: dict[str, str] = {}
    """Address -> "down", "linked", "fenced", "granted", "open", "done" or "out"."""
    same_host: list[str] = []
    """Addresses of those whose files are read here."""
    draining: bool = False
    samples: Count
    tokens: Count
    logical_bytes: Count
    """Hidden states alone, as the target made them: tokens x layers x hidden size x 2."""
    encoded_bytes: Count = 0
    """Chunks received, those of a sample that came again included."""
    wire_bytes: Count
    buffer_bytes: Count = 0
    buffer_capacity_bytes: Count = 0
    received_bytes: dict[str, Count] = {}
    """By producer."""
    received_logical_bytes: dict[str, Count] = {}
    """By producer: the hidden states of whole samples."""
    due_bytes: dict[str, Count] = {}
    """By producer: decoded, asked for and not here yet."""
    loop_age_seconds: Seconds = 0.0
    """Since the loop that moves data last came round."""
    offered: dict[str, Count] = {}
    """Samples that a producer has ready and there is no room for."""
    held: Count = 0
    trained: Count = 0
    uncommitted: Count = 0
    """Trained, and in no durable checkpoint."""
    rejected: Count = 0
    step: Count = 0
    loss: float | None = None
    """None, too, in JSON, when it is no number."""
    done: bool = False
    """It has ended because there was nothing left to train."""
    loss_lost: bool = False
    """It is no number any more."""
    stall_seconds: dict[str, Seconds] = {}


class GeneratedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `producer/samples.jsonl`, written before the sample is encoded."""

    id: str
    key: str
    rows: int
    tokens: int
    digest: str
    prompt_tokens: int = 0
    finish_reason: str = ""
    time_seconds: float = 0.0


class ReceivedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `consumer/samples.jsonl`, written after the sample was decoded."""

    id: str
    rows: int
    tokens: int
    digest: str
    time_seconds: float = 0.0
    """As in the snapshots."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `consumer/steps.jsonl`: a completed optimizer step and the samples it used."""

    step: int
    ids: list[str]
    loss: float | None = None
    time_seconds: float = 0.0
    """As in the snapshots."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`checkpoint.json`: what the newest checkpoint says when all has ended."""

    step: int
    trained: list[str]
    """Ids of the samples whose effect it contains."""


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """`archived.json`: what the archive holds when all has ended, read back from its files."""

    segments: int
    bytes: int
    digests: dict[str, str]
    """Of the tensors of each sample, by the id that it was generated under."""
    damaged: list[str]
    """Of those, what is not what was written."""


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """`swap.json`: the second consumer of a run, started to take over from the first."""

    started_seconds: float
    """When its process was started; as in the snapshots."""
    first_exit_code: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `producer/rejected.jsonl`."""

    id: str
    reason: str


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """`evaluation.json`: the drafter before and after training, on the held-out prompts."""

    untrained_loss: float
    """Nats a label, like every loss here."""
    trained_loss: float
    vocab_size: Annotated[int, msgspec.Meta(ge=2)]
    accepted_length: float
    """Mean new tokens a target call, its own token included: at 1.0 no draft was accepted."""
    accepted_new_tokens: int
    accepted_target_calls: int
    same_as_greedy: bool
    """Whether speculative decoding printed what greedy decoding prints."""

    @property
    def uniform_loss(self) -> float:
        """Of a drafter that knows nothing and says so: ln(vocabulary)."""
        return math.log(self.vocab_size)


Snapshot = ProducerSnapshot | ConsumerSnapshot
