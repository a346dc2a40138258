"""No engine: what is in an archive is served as it is, and what is not cannot be made."""

from collections.abc import Callable, Iterator

from draftfeed_producer.archive import Archive
from draftfeed_producer.errors import ArchiveGone, EngineError
from draftfeed_producer.prompts import Prompt
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample

REASON = "its archived sample is damaged, and a replay has no target to make it again"


class ReplayEngine:
    """See `Engine`. It gives up whatever it is asked for, unless that could not be read."""

    loading = False
    captured = recaptured = 0

    def __init__(self, archive: Archive) -> None:
        self._archive, self.descriptor = archive, archive.descriptor

    def max_rows(self, prompt_tokens: int) -> int:
        """See `Engine.max_rows`: what the archive's samples have."""
        return prompt_tokens

    def run(
        self, prompts: Iterator[Prompt], give_up: Callable[[SampleId, str], None] | None = None
    ) -> Iterator[Sample]:
        """See `Engine.run`. Raises ArchiveGone: what ends here ends for good, and a drive can be
        mounted again, or answer again."""
        for prompt in prompts:
            if (gone := self._archive.unread(prompt.id)) is not None:
                reason = f"{gone.reason}; see to its drive, and start again"
                raise ArchiveGone(gone.root, reason)
            if give_up is None:
                raise EngineError(f"sample {prompt.id}: {REASON}")
            give_up(prompt.id, REASON)
        yield from ()

    def stop(self) -> None:
        """There is nothing to stop."""

    def close(self) -> None:
        """There is nothing to free."""
