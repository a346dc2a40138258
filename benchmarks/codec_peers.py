"""Other libraries' compressors, as `draftfeed_deploy.bench_codec` measures them.

Each gets values that already lie layer after layer, 4 MiB at a time, and one thread. One that
returns memory of its own may: what it returned is not copied to where it is needed.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

from draftfeed_deploy.bench_codec import Buffer, Coder, Encoded


class Lz4:
    name = package = "lz4"
    by_layer = True
    note = "lz4.block, default mode; new bytes both ways"

    def __init__(self, bf16: bool) -> None:
        self._lz4: Any = importlib.import_module("lz4.block")

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        return Encoded(self._lz4.compress(_bytes(values), store_size=False))

    def decode(self, encoded: Encoded, out: np.ndarray) -> Buffer:
        decoded: bytes = self._lz4.decompress(encoded.payload, uncompressed_size=out.nbytes)
        return decoded


class Zstd1:
    name, package = "zstd-1", "zstandard"
    by_layer = True
    note = "the values as they lie, level 1; new bytes both ways"

    def __init__(self, bf16: bool) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        return Encoded(self._compressor.compress(_bytes(values)))

    def decode(self, encoded: Encoded, out: np.ndarray) -> Buffer:
        return self._decompressor.decompress(encoded.payload)


class Blosc2:
    name = package = "blosc2"
    by_layer = True
    note = "shuffle of 2-byte values, then zstd at level 1; new bytes when it encodes"

    def __init__(self, bf16: bool) -> None:
        self._blosc2: Any = importlib.import_module("blosc2")
        self._blosc2.set_nthreads(1)
        self._how = {
            "typesize": 2,
            "clevel": 1,
            "codec": self._blosc2.Codec.ZSTD,
            "filters": [self._blosc2.Filter.SHUFFLE],
            "nthreads": 1,
        }

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        return Encoded(self._blosc2.compress2(values, **self._how))

    def decode(self, encoded: Encoded, out: np.ndarray) -> np.ndarray:
        self._blosc2.decompress2(encoded.payload, dst=out)
        return out


class ZipNN:
    name = package = "zipnn"
    by_layer = True
    note = (
        "its own choice of method; new bytes both ways; what it encodes is copied first, in the "
        "time that counts, as it overwrites bf16 values"
    )

    def __init__(self, bf16: bool) -> None:
        zipnn: Any = importlib.import_module("zipnn")
        dtype = "bfloat16" if bf16 else "float16"
        self._zipnn = zipnn.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
        self._scratch = bytearray()

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        if len(self._scratch) != values.nbytes:
            self._scratch = bytearray(values.nbytes)
        self._scratch[:] = _bytes(values)
        return Encoded(self._zipnn.compress(self._scratch))

    def decode(self, encoded: Encoded, out: np.ndarray) -> Buffer:
        decoded: bytes = self._zipnn.decompress(encoded.payload)
        return decoded


class OpenZL:
    name = package = "openzl"
    by_layer = True
    note = (
        "what its parser of safetensors does with such values, with order-0 entropy coding of its "
        "choice: fp16 as two planes of bytes, of bf16 the exponents apart and the rest stored; "
        "new bytes both ways"
    )

    def __init__(self, bf16: bool) -> None:
        self._zl: Any = importlib.import_module("openzl.ext")
        graphs, nodes = self._zl.graphs, self._zl.nodes
        compressor = self._zl.Compressor()
        compressor.set_parameter(self._zl.CParam.FormatVersion, self._zl.MAX_FORMAT_VERSION)
        if bf16:
            graph = nodes.BFloat16Deconstruct()(compressor, graphs.Store(), graphs.Entropy())
        else:
            graph = nodes.TransposeSplit()(compressor, graphs.Entropy())
        compressor.select_starting_graph(graph)
        self._compressor = compressor  # the context does not keep it alive
        self._encoder, self._decoder = self._zl.CCtx(), self._zl.DCtx()
        self._encoder.ref_compressor(compressor)
        self._encoder.set_parameter(self._zl.CParam.StickyParameters, 1)

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        numbers = values.view(np.uint16).reshape(-1)
        return Encoded(self._encoder.compress([self._zl.Input(self._zl.Type.Numeric, numbers)]))

    def decode(self, encoded: Encoded, out: np.ndarray) -> np.ndarray:
        (decoded,) = self._decoder.decompress(encoded.payload)
        values: np.ndarray = decoded.content.as_nparray()
        return values


PEERS = (Lz4, Zstd1, Blosc2, ZipNN, OpenZL)
NOTES = {peer.name: peer.note for peer in PEERS}


def missing() -> dict[str, str]:
    """Those that cannot be loaded here, and why."""
    found = {}
    for peer in PEERS:
        try:
            peer(bf16=False)
        except ImportError as error:
            found[peer.name] = str(error)
    return found


def peers(bf16: bool, without: dict[str, str]) -> list[Coder]:
    return [peer(bf16) for peer in PEERS if peer.name not in without]


def versions(without: dict[str, str]) -> dict[str, str]:
    packages: Sequence[str] = [peer.package for peer in PEERS if peer.name not in without]
    return {package: importlib.metadata.version(package) for package in packages}


def _bytes(values: np.ndarray) -> memoryview:
    return values.view(np.uint8).reshape(-1).data
