"""Where prompts come from: a file, or the synthetic engine's configuration."""

from collections.abc import Callable
from typing import NamedTuple

from draftfeed_producer.engines.synthetic import (
    SyntheticConfig,
    synthetic_ids,
    synthetic_prompt,
)
from draftfeed_producer.prompts import Prompt, PromptFile
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


def file_source(file: PromptFile, longest_prompt: int) -> PromptSource:
    def find(id: SampleId) -> Prompt | None:
        return file.find(id.ordinal)

    return PromptSource(file.shards, file.ids(), file.skipped(), longest_prompt, find)


def synthetic_source(config: SyntheticConfig) -> PromptSource:
    ids = synthetic_ids(config)
    return PromptSource(config.shards, ids, IdSet(), 1, synthetic_prompt)
