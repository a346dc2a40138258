"""Where prompts come from: a file, or the synthetic engine's configuration."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import xxhash

from draftfeed_producer.archive import Archive
from draftfeed_producer.conversations import Writer
from draftfeed_producer.engines.config import ReplayConfig
from draftfeed_producer.engines.synthetic import (
    SyntheticConfig,
    synthetic_ids,
    synthetic_prompt,
)
from draftfeed_producer.prompts import Prompt, PromptFile
from draftfeed_producer.responses import ResponseReader
from draftfeed_proto.ids import IdSet, SampleId, Shards


class PromptSource(NamedTuple):
    """The prompts of one file, whoever owns its shards."""

    shards: Shards
    """All of the file."""
    ids: IdSet
    """Of the prompts that exist."""
    skipped: IdSet
    """Of the lines that are no prompts."""
    longest_prompt: int
    """In tokens, at most; its response, where it has one, included."""
    find: Callable[[SampleId], Prompt | None]
    """None for a line found to be no prompt only now. Raises PromptError."""
    responses: ResponseReader | None = None
    """None where the answers are not a target's."""
    writer: Writer | None = None
    """Of finished conversations. None where nobody wants them."""
    archive: Archive | None = None
    """That all of it lies in. None where a target answers."""


def file_source(file: PromptFile, longest_prompt: int, responses: ResponseReader) -> PromptSource:
    def find(id: SampleId) -> Prompt | None:
        prompt = file.find(id.ordinal)
        return None if prompt is None else msgspec.structs.replace(prompt, id=id)

    skipped = file.skipped()
    return PromptSource(file.shards, file.ids(), skipped, longest_prompt, find, responses)


def replay_source(archive: Archive, prompts: Shards, config: ReplayConfig) -> PromptSource:
    """prompts: all shards of the file that the archive is of."""
    shards = Shards(prompts.dataset, config.first_epoch, prompts.ranges, config.epochs)
    lines = archive.lines if config.subset == (0.0, 1.0) else _subset(archive, config.subset)
    ids = IdSet.union(lines.in_epoch(epoch) for epoch in shards.each_epoch)
    find = synthetic_prompt  # nobody reads what is in it
    return PromptSource(shards, ids, IdSet(), archive.longest_rows, find, archive=archive)


def _subset(archive: Archive, part: tuple[float, float]) -> IdSet:
    """By the user's own name of a prompt, so that it is the same in every archive of it."""
    low, high = (int(edge * 2**64) for edge in part)
    chosen = (
        record.header.id
        for record in archive.records()
        if low <= xxhash.xxh3_64_intdigest(record.header.key.encode()) < high
    )
    return IdSet(chosen).in_epoch(0) & archive.lines


def synthetic_source(config: SyntheticConfig) -> PromptSource:
    ids = synthetic_ids(config)
    return PromptSource(config.shards, ids, IdSet(), 1, synthetic_prompt)
