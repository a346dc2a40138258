"""Where the target's files are asked for: who gets the next piece, and what waits for whom.

Everything here is called by the server's thread. Reading and hashing are a thread's of their own,
so that a slow disk holds no samples up.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from draftfeed_producer.assets import ServedFile, described, find_assets
from draftfeed_producer.errors import ModelError
from draftfeed_proto import messages as m

logger = logging.getLogger(__name__)

MAX_REQUESTS = 8
"""Of one peer, that wait."""
MAX_ALL_REQUESTS = 64
MAX_UNSENT_PIECES = 2
"""Of one peer: what ZeroMQ holds for it until the network has taken it."""
MAX_ALL_UNSENT_PIECES = 32
"""128 MiB. Of those who take what they asked for."""
MAX_PEERS = 64
"""That wait for anything or have not taken it: 512 MiB, if none of them reads."""
SLOW_SECONDS = 5.0
"""Who has taken nothing for so long is no reason for others to wait."""
STALL_SECONDS = 60.0
"""A peer that takes nothing for so long is not waited for."""


class Piece(NamedTuple):
    sender: bytes
    message: m.AssetPiece | m.Refused
    data: bytes = b""


class _Peer:
    def __init__(self, now: float) -> None:
        self.requests: deque[m.FetchAsset] = deque()
        self.reading = 0
        """Pieces that are read, or about to be sent."""
        self.unsent: deque[zmq.MessageTracker] = deque()
        self.moved_at = now
        """When something went out to it last."""

    def look(self, now: float) -> None:
        """Forget what has gone out, and a peer that does not read."""
        while self.unsent and self.unsent[0].done:
            self.unsent.popleft()
            self.moved_at = now
        if self.idle:
            self.moved_at = now
        if now - self.moved_at > STALL_SECONDS:
            self.requests.clear()

    def slow(self, now: float) -> bool:
        return now - self.moved_at > SLOW_SECONDS

    @property
    def idle(self) -> bool:
        return not (self.requests or self.reading or self.unsent)


class AssetDesk:
    """Serves the files of one target, or says why there are none."""

    def __init__(self, stream_id: str, directory: Path | None, reason: str = "") -> None:
        """directory: the target's; without one, the reason why not."""
        self._stream_id, self._directory = stream_id, directory
        self._listing: m.Assets | None = None
        if directory is None:
            self._listing = m.Assets(stream_id=stream_id, reason=reason)
        self._files: dict[str, ServedFile] = {}
        self._peers: dict[bytes, _Peer] = {}
        """In the order of their turns."""
        self._jobs: queue.SimpleQueue[tuple[bytes, m.FetchAsset] | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._reading = False
        self._stopped = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="assets", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """wake: called by our thread when a piece has been read."""
        self._wake = wake
        if self._directory is not None:
            self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for a piece that is not being read."""
        return not self._read.empty() or any(peer.requests for peer in self._peers.values())

    def answer(
        self, sender: bytes, message: m.ListAssets | m.FetchAsset, now: float
    ) -> m.Assets | m.Refused | None:
        """None: a piece follows."""
        listing = self._listing
        if listing is None:
            reason = "the target's files are still being read; ask again"
            return m.Refused(code="preparing", reason=reason)
        if isinstance(message, m.ListAssets):
            return listing
        file = self._files.get(message.name)
        if file is None or message.offset + message.bytes > file.bytes:
            what = f"{message.bytes} bytes from {message.offset} on of {message.name!r}"
            return m.Refused(code="asset", reason=f"there are no {what} here")
        self._look(now)
        waiting = sum(len(peer.requests) for peer in self._brisk(now))
        peer = self._peers.get(sender) or _Peer(now)
        if sender not in self._peers and len(self._peers) >= MAX_PEERS:
            reason = f"{MAX_PEERS} others are being served; ask again"
            return m.Refused(code="busy", reason=reason)
        if len(peer.requests) >= MAX_REQUESTS or waiting >= MAX_ALL_REQUESTS:
            reason = f"{len(peer.requests)} requests of yours wait, of {waiting}; ask again"
            return m.Refused(code="busy", reason=reason)
        self._peers[sender] = peer
        peer.requests.append(message)
        return None

    def next_piece(self, now: float) -> Piece | None:
        """What is to be sent now, if anything has been read; `sent` or `dropped` follows. The
        next one is read meanwhile."""
        piece = None
        if not self._read.empty():
            piece = self._read.get()
            self._reading = False
        if not self._reading:
            self._begin(now)
        return piece

    def sent(self, piece: Piece, tracker: zmq.MessageTracker) -> None:
        peer = self._peers[piece.sender]
        peer.reading -= 1
        peer.unsent.append(tracker)

    def dropped(self, piece: Piece) -> None:
        """The peer is gone or does not read, or was refused: what else it asked for is void."""
        peer = self._peers[piece.sender]
        peer.reading -= 1
        peer.requests.clear()

    def _begin(self, now: float) -> None:
        """Have the first request read whose peer has room for it."""
        self._look(now)
        out = sum(len(peer.unsent) + peer.reading for peer in self._brisk(now))
        if out >= MAX_ALL_UNSENT_PIECES:
            return
        for sender, peer in self._peers.items():
            if peer.requests and len(peer.unsent) + peer.reading < MAX_UNSENT_PIECES:
                peer.reading += 1
                self._reading = True
                self._jobs.put((sender, peer.requests.popleft()))
                self._peers[sender] = self._peers.pop(sender)  # the others come first now
                return

    def _look(self, now: float) -> None:
        for sender, peer in list(self._peers.items()):
            peer.look(now)
            if peer.idle:
                del self._peers[sender]

    def _brisk(self, now: float) -> list[_Peer]:
        return [peer for peer in self._peers.values() if not peer.slow(now)]

    # the thread

    def _run(self) -> None:
        try:
            self._prepare()
        except InterruptedError:
            return
        # Trainers would wait for an answer that never comes.
        except Exception as error:
            logger.exception("the target's files cannot be served")
            self._close_files()
            self._listing = m.Assets(
                stream_id=self._stream_id, reason=f"they are unusable: {error}"
            )
            return
        while (job := self._jobs.get()) is not None:
            self._read.put(self._piece(*job))
            self._wake()

    def _prepare(self) -> None:
        assert self._directory is not None
        try:
            files = find_assets(self._directory)
            self._files = {file.name: file for file in files}
            listed = [described(file, self._stopped.is_set) for file in files]
        except (ModelError, OSError) as error:
            if self._stopped.is_set():
                raise InterruptedError from None
            self._close_files()
            logger.warning("training nodes need the target's own directory: %s", error)
            self._listing = m.Assets(stream_id=self._stream_id, reason=str(error))
            return
        self._listing = m.Assets(stream_id=self._stream_id, files=listed)
        total = sum(file.bytes for file in listed)
        logger.info("the target's files for trainers: %d, %.1f MB", len(listed), total / 1e6)

    def _piece(self, sender: bytes, request: m.FetchAsset) -> Piece:
        try:
            data = self._files[request.name].read(request.offset, request.bytes)
        except OSError as error:
            logger.error("a piece of the target cannot be read: %s", error)
            reason = f"{request.name} cannot be read here any more"
            return Piece(sender, m.Refused(code="asset", reason=reason))
        return Piece(sender, m.AssetPiece(name=request.name, offset=request.offset), data)
