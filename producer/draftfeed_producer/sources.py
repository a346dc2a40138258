"""Where prompts come from: a file, or the synthetic engine's configuration."""

from collections.abc import Callable
from typing import NamedTuple

from draftfeed_producer.conversations import Writer
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


def file_source(file: PromptFile, longest_prompt: int, responses: ResponseReader) -> PromptSource:
    def find(id: SampleId) -> Prompt | None:
        return file.find(id.ordinal)

    skipped = file.skipped()
    return PromptSource(file.shards, file.ids(), skipped, longest_prompt, find, responses)


def synthetic_source(config: SyntheticConfig) -> PromptSource:
    ids = synthetic_ids(config)
    return PromptSource(config.shards, ids, IdSet(), 1, synthetic_prompt)
