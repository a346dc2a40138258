"""The kernels for AVX-512 on processors that lack it: compiled with intrinsics in plain C."""

import os
import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "proto/draftfeed_proto/codecs/native"

NEEDED = {"avx512f", "avx512bw", "avx512vbmi", "avx512_vbmi2"}
PRETENDED = (
    '-D__builtin_cpu_supports(isa)=(!__builtin_strncmp(isa, "avx512", 6)'
    " || __builtin_cpu_supports(isa))"
)


def is_due() -> bool:
    """Whether this is an x86 processor without what the kernels need."""
    if platform.machine() != "x86_64":
        return False
    return not set(Path("/proc/cpuinfo").read_text().split()) >= NEEDED


def flags(source: str) -> list[str]:
    """What the compiler is told in addition for one of the codec's sources; nothing where the
    processor has all that is needed."""
    if not is_due():
        return []
    return {"avx512.c": [f"-I{HERE}/emulated"], "packed.c": [PRETENDED]}.get(source, [])


def build_library(folder: Path) -> Path:
    """The codec as a shared library that runs all kernels, by the usual compiler. Raises
    CalledProcessError, whose text has what the compiler said."""
    compiler = [os.environ.get("CC", "cc"), "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden"]
    objects = []
    for source in sorted(NATIVE.glob("*.c")):
        objects.append(str(folder / f"{source.stem}.o"))
        _run([*compiler, *flags(source.name), "-c", str(source), "-o", objects[-1]])
    library = folder / "_packed.so"
    _run([*compiler, "-shared", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, text=True, stderr=subprocess.PIPE)
