"""What the services write down while they run, one JSON object a line, and the demo afterwards.

The same Structs are written, shown live and read back for the report. Fields that a reader may
find missing have defaults.
"""

import math
from typing import Annotated

import msgspec


class ProducerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `producer/stats.jsonl`: counters since the process began, levels now.

    Lists have one entry a layer.
    """

    time_seconds: float
    """Monotonic: since the machine started in the file, since the first snapshot in a report."""
    phase: str = ""
    """loading, generating, delivering or done"""
    prompts: int = 0
    samples: int
    tokens: int
    """Tokens fed to the target in those, which is the number of their rows."""
    captured: int = 0
    """Rows captured, of samples still being generated too."""
    recaptured: int = 0
    """Samples that lacked rows and were made again."""
    response_tokens: int = 0
    response_lengths: list[int] = []
    """Those samples by the tokens of their response: up to 1, 2, 4 ..., and more."""
    generating_seconds: float = 0.0
    """Time in which the engine was there and prompts were left; pauses are in it."""
    logical_bytes: int
    """Hidden states alone, as the target made them: tokens x layers x hidden size x 2."""
    encoded_bytes: int = 0
    """The same samples as chunks, with their token ids and masks."""
    wire_bytes: int
    """Everything handed to the socket: chunks, messages, what was sent again."""
    spool_bytes: int = 0
    spool_quota_bytes: int = 0
    spool_capacity_bytes: int = 0
    """To what the spool can grow, by its quota or the disk, whichever ends first."""
    alarm: str = ""
    """Why no prompts are admitted; empty while they are."""
    term: int = 0
    """Rises when another consumer takes the stream."""
    members: list[str] = []
    """Ranks that have a session."""
    leased: int = 0
    spooled: int = 0
    """In the spool, and nobody has them."""
    committed: int = 0
    rejected: int = 0
    """Ended untrained, in whatever state."""
    ended: dict[str, int] = {}
    """Those by state: rejected, quarantined, tail."""
    regenerated: int = 0
    """Samples made again because the first record was damaged or lost."""
    quality_window: int = 0
    """Finished samples that the quality gate looks at."""
    quality_degenerate: int = 0
    """Of those."""
    quality_closed: bool = False
    oldest_uncommitted_seconds: float = 0.0
    """Age of the oldest sample that is not terminal."""
    commit_age_seconds: float = 0.0
    """Since the last commit, or since the start."""
    commits: int = 0
    swaps: int = 0
    """Consumers that were granted the stream, but for the first."""
    sent_bytes: dict[str, int] = {}
    """By member."""
    sent_logical_bytes: dict[str, int] = {}
    """By member: the hidden states in those."""
    credit_bytes: dict[str, int] = {}
    """By member: encoded, what it may be sent and was not."""
    asset_bytes: int = 0
    """Of the target's files, sent; not among the wire bytes."""
    loop_age_seconds: float = 0.0
    """Since the loop that moves data last came round."""
    stall_seconds: dict[str, float] = {}
    layers: list[str] = []
    """Which the lists below are of: layer ids, and "final" for the final state."""
    nonfinite: list[int] | None = None
    saturated: list[int] = []
    inexact: list[int] = []
    zero_rows: list[int] | None = None
    replayed: int = 0
    """Samples served out of the archive, or once more out of the spool."""
    archive_bytes: int = 0
    archive_quota_bytes: int = 0
    """0: what the drives hold, or there is no archive."""
    archive_segments: int = 0
    archive_samples: int = 0
    """Prompts of which the archive has a sample."""
    archive_missed: int = 0
    """Samples that were not archived."""
    archive_alarm: str = ""
    """Why nothing is archived at the moment; empty when it is not so."""


class ConsumerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `consumer/stats.jsonl`: counters since the process began, levels now."""

    time_seconds: float
    """Monotonic: since the machine started in the file, since the first snapshot in a report."""
    attached: bool = False
    term: int = 0
    producers: dict[str, str] = {}
    """Address -> "down", "linked", "fenced", "granted", "open", "done" or "out"."""
    draining: bool = False
    samples: int
    tokens: int
    logical_bytes: int
    """Hidden states alone, as the target made them: tokens x layers x hidden size x 2."""
    encoded_bytes: int = 0
    """Chunks received, those of a sample that came again included."""
    wire_bytes: int
    buffer_bytes: int = 0
    buffer_capacity_bytes: int = 0
    received_bytes: dict[str, int] = {}
    """By producer."""
    received_logical_bytes: dict[str, int] = {}
    """By producer: the hidden states of whole samples."""
    due_bytes: dict[str, int] = {}
    """By producer: decoded, asked for and not here yet."""
    loop_age_seconds: float = 0.0
    """Since the loop that moves data last came round."""
    offered: dict[str, int] = {}
    """Samples that a producer has ready and there is no room for."""
    held: int = 0
    trained: int = 0
    uncommitted: int = 0
    """Trained, and in no durable checkpoint."""
    rejected: int = 0
    step: int = 0
    loss: float | None = None
    stall_seconds: dict[str, float] = {}


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
