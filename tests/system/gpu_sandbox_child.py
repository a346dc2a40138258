"""What a service with GPUs does on a processor, run as a unit's ExecStart: torch with its compiler
of kernels, the codec's C through ctypes, memory shared between processes."""

import mmap
import multiprocessing
import sys
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch

from draftfeed_proto.codecs import PACKED


def executable_memory() -> bool:
    """Whether code may be written and run, as CUDA and Triton do."""
    try:
        mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except PermissionError:
        return False
    return True


def torch_computes() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    layer(torch.randn(2, 16, 64)).sum().backward()
    image = torch.ones(1, 3, 32, 32)
    assert torch.nn.Conv2d(3, 8, 3)(image).shape == (1, 8, 30, 30)  # oneDNN's kernels


def codec_keeps_its_word() -> None:
    PACKED.prepare()
    assert PACKED.implementation in ("avx512", "avx2", "c"), PACKED.implementation
    states = np.random.default_rng(0).normal(size=(64, 2, 128)).astype(np.float16)
    out = bytearray(2 * states.nbytes)
    size = PACKED.encode(states, memoryview(out))
    back = np.empty_like(states)
    PACKED.decode(memoryview(out)[:size], back)
    assert np.array_equal(states.view(np.uint16), back.view(np.uint16))


def write(name: str) -> None:
    shared = SharedMemory(name)
    assert shared.buf is not None
    shared.buf[:4] = b"here"
    shared.close()


def processes_share_memory() -> None:
    shared = SharedMemory(create=True, size=1 << 20)
    try:
        child = multiprocessing.get_context("spawn").Process(target=write, args=(shared.name,))
        child.start()
        child.join(60)
        assert shared.buf is not None
        assert (child.exitcode, bytes(shared.buf[:4])) == (0, b"here")
    finally:
        shared.close()
        shared.unlink()


if __name__ == "__main__":
    torch_computes()
    codec_keeps_its_word()
    processes_share_memory()
    words = "may" if executable_memory() else "may not"
    sys.stdout.write(f"all of it works; memory {words} be written and executed\n")
