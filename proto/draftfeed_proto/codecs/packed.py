"""Codec 2: sign and mantissa as they are, exponents in two bits and more; PROTOCOL.md has it.

There are several implementations, and all write the same bytes: C, for three instruction sets, and
NumPy, where the C could not be compiled.
"""

import logging
import os
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from draftfeed_proto.codecs import packed_numpy
from draftfeed_proto.codecs.packed_native import ISAS, NotCompiled, implementations
from draftfeed_proto.errors import UnavailableISA

logger = logging.getLogger(__name__)

VARIABLE = "DRAFTFEED_CODEC_ISA"
"""Environment variable that forces one of NAMES."""
NUMPY = "numpy"
NAMES = (*ISAS, NUMPY)
"""The fastest first."""


class Implementation(Protocol):
    """As in Codec."""

    def encode(self, states: np.ndarray, out: memoryview) -> int: ...

    def decode(self, payload: memoryview, out: np.ndarray) -> None: ...


class Available(NamedTuple):
    implementations: dict[str, Implementation]
    """By name, the fastest first."""
    lacking: str
    """Why there is only NumPy; empty when there is more."""


class Packed:
    name = "packed"
    number = 2

    def encode(self, states: np.ndarray, out: memoryview) -> int:
        return self._implementation.encode(states, out)

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        self._implementation.decode(payload, out)

    def prepare(self) -> None:
        """Choose an implementation now, and not at the first chunk: what services do at their
        start. Raises UnavailableISA."""
        name, lacking = self.implementation, available().lacking
        if lacking and not os.environ.get(VARIABLE):
            logger.warning(
                "the codec is not compiled and NumPy replaces it, at a tenth of the speed: %s; "
                "install a C compiler, then draftfeed again (in a checkout: make venv)",
                lacking,
            )
        logger.debug("codec packed: %s", name)

    @cached_property
    def implementation(self) -> str:
        """Name of the one that this process uses: that which the environment forces, or the
        fastest that the machine has. Raises UnavailableISA."""
        able, lacking = available()
        forced = os.environ.get(VARIABLE, "")
        if forced and forced not in able:
            raise UnavailableISA(VARIABLE, forced, NAMES, tuple(able), lacking)
        return forced or next(iter(able))

    @cached_property
    def _implementation(self) -> Implementation:
        return available().implementations[self.implementation]


def available() -> Available:
    """What this machine can run."""
    numpy: dict[str, Implementation] = {NUMPY: packed_numpy}
    try:
        return Available({**implementations(), **numpy}, "")
    except NotCompiled as error:
        return Available(numpy, str(error))
