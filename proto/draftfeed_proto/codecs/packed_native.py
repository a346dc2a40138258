"""The C of codec 2, through ctypes, which lets go of the interpreter while it runs.

C believes what it is told of arrays, so that is checked here; payloads are checked there.
"""

import ctypes
import json
import threading
from functools import cache
from pathlib import Path

import numpy as np

from draftfeed_proto.errors import MalformedChunk

ISAS = ("avx512", "avx2", "c")
"""The fastest first."""
_NUMBERS = {"c": 0, "avx2": 1, "avx512": 2}
_LIBRARY = Path(__file__).with_name("_packed.so")
_REPORT = Path(__file__).with_name("_build.json")
"""What the build has to say, when there is no library."""


class NotCompiled(Exception):
    """There is no library that could be loaded; the text is the reason."""


class _Shape(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_size_t),
        ("layers", ctypes.c_size_t),
        ("hidden", ctypes.c_size_t),
        ("row_stride", ctypes.c_ssize_t),
        ("layer_stride", ctypes.c_ssize_t),
        ("bf16", ctypes.c_int32),
        ("isa", ctypes.c_int32),
    )


class Native:
    """The library with one instruction set. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._library, self._isa = library, _NUMBERS[isa]
        self._local = threading.local()

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        """Bytes written into `out`; 0 when the states do not fit, or are not worth packing."""
        target = np.frombuffer(out, np.uint8)
        if not target.flags.writeable:
            raise ValueError("out cannot be written to")
        written: int = self._library.draftfeed_encode(
            self._shape(states), _address(states), _address(target), len(target), self._workspace()
        )
        return written

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        """Raises MalformedChunk."""
        source = np.frombuffer(payload, np.uint8)
        if not out.flags.writeable:
            raise ValueError("out cannot be written to")
        error = self._library.draftfeed_decode(
            self._shape(out), _address(source), len(source), _address(out), self._workspace()
        )
        if error:
            raise MalformedChunk(f"packed: {self._library.draftfeed_error(error).decode()}")

    def _shape(self, states: np.ndarray) -> _Shape:
        if states.ndim != 3 or states.dtype not in (np.float16, np.uint16) or not states.size:
            raise ValueError(f"{states.dtype} {list(states.shape)} are no 16-bit states")
        rows, layers, hidden = states.shape
        row_stride, layer_stride, value_stride = states.strides
        contiguous = value_stride == 2 or hidden == 1
        if not contiguous or row_stride % 2 or layer_stride % 2 or not states.flags.aligned:
            raise ValueError("the values of a row and layer must be contiguous and aligned")
        bf16 = states.dtype == np.uint16
        return _Shape(rows, layers, hidden, row_stride // 2, layer_stride // 2, bf16, self._isa)

    def _workspace(self) -> int:
        """Address of this thread's own."""
        try:
            space = self._local.space
        except AttributeError:
            space = np.empty(self._library.draftfeed_workspace_bytes(), np.uint8)
            self._local.space = space
        return _address(space)


def implementations() -> dict[str, Native]:
    """Those that this machine can run, by name, the fastest first. Raises NotCompiled."""
    library = _load(_LIBRARY)
    able = library.draftfeed_isas()
    return {isa: Native(library, isa) for isa in ISAS if able >> _NUMBERS[isa] & 1}


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError) as error:  # none, or one of other sources
        raise NotCompiled(_reported() or str(error)) from None
    return library


def _declare(library: ctypes.CDLL) -> None:
    shape, size, pointer = ctypes.POINTER(_Shape), ctypes.c_size_t, ctypes.c_void_p
    for name, result, arguments in (
        ("draftfeed_isas", ctypes.c_uint, ()),
        ("draftfeed_workspace_bytes", size, ()),
        ("draftfeed_encode", size, (shape, pointer, pointer, size, pointer)),
        ("draftfeed_decode", ctypes.c_int, (shape, pointer, size, pointer, pointer)),
        ("draftfeed_error", ctypes.c_char_p, (ctypes.c_int,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _reported() -> str:
    """First line of why the build made no library; empty when it says nothing of it."""
    try:
        reason = json.loads(_REPORT.read_text())["reason"]
    except (OSError, ValueError, KeyError):
        return ""
    return str(reason).partition("\n")[0]


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
