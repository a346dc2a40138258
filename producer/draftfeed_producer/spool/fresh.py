"""Frames that were just written, for a member that gets them at once."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from draftfeed_producer.spool.segments import Record
from draftfeed_proto.chunk import Apart

FRESH_BYTES = 64 << 20
"""Of memory: a sample of 1,200 tokens in five layers of 5,120."""


class Fresh:
    """The newest frames, each until it is read once: what is asked for again is asked for because
    it arrived damaged, and then the disk has the word.

    One thread puts in, another takes out.
    """

    def __init__(self) -> None:
        self.wanted = False
        """Whether somebody is there to whom they will go. Any thread may say so."""
        self._writing: deque[tuple[int, memoryview]] = deque()
        """Of the record that is being written: nothing of it may be read yet."""
        self._frames: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        """By (segment, offset), where nothing else ever lies; oldest first."""

    def passing(
        self, frames: Iterable[bytes | memoryview | Apart]
    ) -> Iterator[bytes | memoryview | Apart]:
        """A record's frames, on their way to the disk."""
        self._writing.clear()
        for index, frame in enumerate(frames):
            if self.wanted and isinstance(frame, memoryview):
                self._writing.append((index, frame))
                self._shrink()
            yield frame

    def written(self, record: Record) -> None:
        """The frames that passed are this record's, and on the disk as the policy says."""
        while self._writing:
            index, frame = self._writing.popleft()
            self._frames[record.segment, record.chunks[index][0]] = frame
        if not self.wanted:
            self._frames.clear()

    def take(self, record: Record, index: int) -> memoryview | None:
        return self._frames.pop((record.segment, record.chunks[index][0]), None)

    def _shrink(self) -> None:
        while self._bytes() > FRESH_BYTES:
            try:
                self._frames.popitem(last=False)
            except KeyError:  # all of it is of this record
                self._writing.popleft()

    def _bytes(self) -> int:
        frames = [*list(self._frames.values()), *(frame for _, frame in self._writing)]
        return sum(memoryview(frame.obj).nbytes for frame in frames)
