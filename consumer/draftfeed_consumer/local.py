"""A producer on the same host hands over the files its chunks lie in: they are read out of the page
cache, straight to where they are wanted, and cross no network."""

import logging
import os
import socket
import stat
import weakref
from array import array

from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedChunk
from draftfeed_proto.limits import FILE_NUMBER_BYTES, MAX_LOCAL_FILES

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 1024
"""Files handed over and not named yet: those of samples that ended before they were told of."""


class HandoverLost(Exception):
    """The producer's files are out of reach; what they hold can still come over the network."""


class LocalFiles:
    """Those of one session. Belongs to the client's thread; what `at` gives may be read by any."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._files: dict[int, _File] = {}
        """In the order in which they came: so both ends forget the same ones."""

    @classmethod
    def of(cls, granted: m.Granted) -> "LocalFiles | None":
        """None when the producer is on another host, in another network namespace, or hands
        nothing over."""
        if not granted.local:
            return None
        link = None
        try:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.setblocking(False)
            link.connect(f"\0{granted.local}")
            link.send(granted.session.encode())
        except (OSError, ValueError) as error:
            logger.info("no files of the producer's here, its samples are sent: %s", error)
            if link is not None:
                link.close()
            return None
        return cls(link)

    def at(self, message: m.ChunksAt) -> "list[FrameAt]":
        """Raises HandoverLost."""
        for _ in range(MAX_AT_ONCE):
            if message.file in self._files:
                break
            self._receive()
        else:
            raise HandoverLost("files come without end, and not the one that is named")
        file = self._files[message.file]
        if file.failure:
            raise HandoverLost(file.failure)
        return [FrameAt(file, *place) for place in message.places]

    @property
    def over(self) -> bool:
        """The producer has closed its end, and nothing lies there any more."""
        try:
            return not self._link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _receive(self) -> None:
        """One file. It was sent before the chunk that is looked for in it was."""
        try:
            # recv_fds takes flags and passes none on: a trainer's children would get the files.
            data, beside, flags, _ = self._link.recvmsg(
                FILE_NUMBER_BYTES, socket.CMSG_LEN(array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise HandoverLost(f"no file came ({error.strerror})") from None
        if not data:
            raise HandoverLost("the producer hands over no more files")
        handed = [rights for _, kind, rights in beside if kind == socket.SCM_RIGHTS]
        fds = array("i", b"".join(handed))
        files = [_File(fd) for fd in fds]  # each closes its own, whatever is wrong with it
        if len(files) != 1 or flags & socket.MSG_CTRUNC:
            raise HandoverLost("it could not be opened here: is the limit of open files reached?")
        if not stat.S_ISREG(os.fstat(files[0].fd).st_mode):
            raise HandoverLost("what came is no file")
        self._files[int.from_bytes(data, "little")] = files[0]
        while len(self._files) > MAX_LOCAL_FILES:
            del self._files[next(iter(self._files))]

    def close(self) -> None:
        """What is being read is closed when it was."""
        self._link.close()
        self._files.clear()


class _File:
    """Closed when nobody refers to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.failure = ""
        """Why it cannot be read, when the system would not."""
        weakref.finalize(self, os.close, fd)


class FrameAt:
    """A chunk's frame in a file."""

    def __init__(self, file: _File, offset: int, size: int) -> None:
        self._file, self._offset, self._size = file, offset, size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, into: memoryview) -> None:
        """See `Placed`."""
        if offset + len(into) > self._size:
            raise MalformedChunk(f"{self._size} bytes, {offset + len(into)} are due")
        at = self._offset + offset
        try:
            while into:
                count = os.preadv(self._file.fd, [into], at)
                if not count:
                    raise MalformedChunk(f"its file ends at byte {at}")
                into, at = into[count:], at + count
        except OSError as error:
            self._file.failure = f"a file cannot be read: {error.strerror}"
            raise MalformedChunk(self._file.failure) from None


class Unreachable:
    """A frame in a file that is out of reach."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, into: memoryview) -> None:
        """See `Placed`."""
        raise MalformedChunk("the file it lies in is out of reach")
