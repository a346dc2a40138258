"""Fuzzing of the codec's C, `make fuzz`: builds the target, writes seeds, runs libFuzzer."""

import argparse
import itertools
import os
import platform
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftfeed_proto.codecs import packed_numpy

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "proto/draftfeed_proto/codecs/native"
REGRESSIONS = HERE / "regressions"
"""Inputs that once found a bug; each runs before anything else."""

CLANG = "clang"
FLAGS = ["-std=c11", "-O2", "-g", "-Wall", "-Wextra"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COVERAGE = ["-fsanitize-coverage=inline-8bit-counters,pc-table"]
RENAMED = [f"-D{isa}_kernels=real_{isa}_kernels" for isa in ("portable", "avx2", "avx512")]
"""exact.c stands between the codec and these."""
EMULATED_AVX512 = f"-I{HERE}/emulated"
PRETEND_AVX512 = (
    '-D__builtin_cpu_supports(isa)=(!__builtin_strncmp(isa, "avx512", 6)'
    " || __builtin_cpu_supports(isa))"
)


class Finished(NamedTuple):
    executions: int
    covered: int
    """Of the edges of the codec and its kernels."""
    crashes: list[Path]
    """Inputs that made the target fail; empty when nothing was found."""
    output: str


def available() -> bool:
    """Whether there is a clang with libFuzzer, which is a package of its own."""
    if not shutil.which(CLANG):
        return False
    where = subprocess.run([CLANG, "-print-runtime-dir"], capture_output=True, text=True).stdout
    return any(Path(where.strip()).glob("libclang_rt.fuzzer*"))


def build(folder: Path) -> Path:
    """Compile the target into `folder`. Raises CalledProcessError with what the compiler said."""
    emulate = platform.machine() == "x86_64" and not _has_avx512()
    sources = {
        "portable.c": [*COVERAGE, *RENAMED],
        "avx2.c": [*COVERAGE, *RENAMED],
        "avx512.c": [*COVERAGE, *RENAMED, *([EMULATED_AVX512] if emulate else [])],
        "encode.c": COVERAGE,
        "decode.c": COVERAGE,
        "packed.c": [PRETEND_AVX512] if emulate else [],
    }
    native = _copy_with_gaps(folder)
    include = f"-I{native}"
    objects = [
        _compile(native / name, folder, [include, *flags]) for name, flags in sources.items()
    ]
    for name in ("target.c", "exact.c", "reference.c"):
        objects.append(_compile(HERE / name, folder, [include]))
    binary = folder / "packed_fuzz"
    _run([CLANG, "-fsanitize=fuzzer,address,undefined", *map(str, objects), "-o", str(binary)])
    return binary


def write_seeds(folder: Path) -> None:
    """Where the search begins: recipes of all kinds, and whole payloads."""
    seeds = itertools.chain(_states(), _edits(random.Random(0)), _payloads())
    for number, seed in enumerate(seeds):
        folder.joinpath(f"seed-{number:04}").write_bytes(seed)


def fuzz(binary: Path, corpus: Path, seeds: Path, crashes: Path, seconds: int) -> Finished:
    """Run the regressions, then search for so long. What is new goes to `corpus`, and an input
    that makes the target fail, which ends the search, to `crashes`."""
    known = sorted(REGRESSIONS.iterdir())
    before = set(crashes.iterdir())
    common = ["-timeout=60", "-rss_limit_mb=2048", f"-artifact_prefix={crashes}/"]
    output = ""
    for path in known:
        done = _target(binary, *common, str(path))
        output += done.stdout
        if done.returncode:
            return Finished(0, 0, [path], output)
    done = _target(
        binary,
        *common,
        f"-max_total_time={seconds}",
        "-len_control=0",
        "-entropic_scale_per_exec_time=1",
        "-max_len=4096",
        "-print_final_stats=1",
        *map(str, (corpus, seeds, REGRESSIONS)),
    )
    output += done.stdout
    found = sorted(set(crashes.iterdir()) - before)
    assert bool(found) == bool(done.returncode), output
    return Finished(
        executions=_last(r"number_of_executed_units: (\d+)", output),
        covered=_last(r"cov: (\d+)", output),
        crashes=found,
        output=output,
    )


# building


def _has_avx512() -> bool:
    """With the parts that our kernels need."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return {"avx512f", "avx512bw", "avx512_vbmi2", "avx512vbmi"} <= set(flags)


def _copy_with_gaps(folder: Path) -> Path:
    """The codec's sources, but a gap follows each member of the workspace. The target forbids to
    touch them: AddressSanitizer knows of no borders within an allocation."""
    native = folder / "native"
    shutil.copytree(NATIVE, native, dirs_exist_ok=True)
    header = native / "packed.h"
    before, opening, rest = header.read_text().partition("struct workspace {\n")
    members, closing, after = rest.partition("\n};")
    assert closing, "packed.h has no struct workspace"
    declared: list[str] = []
    for line in members.splitlines():
        member = re.fullmatch(r" *(\w+|struct \w+) (\w[^;]*);", line)
        assert member, f"not to be parsed: {line}"
        declared += [f"{member[1]} {name};" for name in member[2].split(", ")]
    gapped = (f"{member} uint8_t gap_{i}[64];" for i, member in enumerate(declared))
    header.write_text(before + opening + "\n".join(gapped) + closing + after)
    gaps = (f"GAP(gap_{i})\n" for i in range(len(declared)))
    native.joinpath("gaps.h").write_text("".join(gaps))
    return native


def _compile(source: Path, folder: Path, flags: list[str]) -> Path:
    to = folder / f"{source.stem}.o"
    _run([CLANG, *FLAGS, *SANITIZERS, *flags, "-c", str(source), "-o", str(to)])
    return to


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=sys.stderr)


def _target(binary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = {
        # The codec allocates nothing; and looking for leaks asks for rights that containers lack.
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=32:malloc_context_size=8",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [binary, *arguments],
        env=os.environ | options,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _last(pattern: str, output: str) -> int:
    return int((re.findall(pattern, output) or ["0"])[-1])


# seeds

PAYLOAD, STATES, EDITS = range(3)
"""What follows a recipe."""
BF16, EXACT, SEVERAL_BLOCKS = 4, 8, 192
SMALL, VECTORS, ODD, GREATEST = 0, 16, 32, 48
"""What `hidden` means: itself, 64 times as much, 37 times, or about as much as there may be."""


def _recipe(what: int, layout: int, rows: int, layers: int, hidden: int, odds: bytes) -> bytes:
    """`struct recipe` of target.c; odds: spread, outliers, inexact."""
    return struct.pack("<BBBBB3s4sH", what, layout, rows, layers, hidden, odds, b"seed", 0xFFFF)


SIZES = (
    (SMALL, 25, 50),
    (SMALL, 126, 65),  # a tile of 4,096 values ends one value after a row
    (SMALL, 34, 241),  # and one before it
    (VECTORS, 30, 3),
    (ODD, 2, 200),
    (SMALL | SEVERAL_BLOCKS, 255, 140),
)
ODDS = ((100, 0, 0), (200, 20, 60), (120, 10, 5), (240, 0, 255), (0, 3, 1))
EXACT_COUNT = 248
"""From here on `outliers` asks for 2,044 exceptions a block, 2,045, and so on."""


def _states() -> Iterator[bytes]:
    """All ranks or few, exceptions, low bits, large and odd shapes."""
    for number, (size, odds) in enumerate(itertools.product(SIZES, ODDS)):
        for flags in (0, BF16, EXACT, EXACT | BF16):
            what, layout, layers = (
                STATES | size[0] | flags,
                number % 4 | number << 2 & 255,
                1 + number % 3,
            )
            literal = bytes(range(0, 250, 5))
            yield _recipe(what, layout, size[1], layers, size[2], bytes(odds)) + literal
    for hidden in range(3):
        yield _recipe(STATES | GREATEST, 0, 1, 1, hidden, bytes(ODDS[0]))
    for flags, outliers in itertools.product((0, BF16), range(EXACT_COUNT, 256)):
        what = STATES | SMALL | SEVERAL_BLOCKS | flags
        yield _recipe(what, 0, 255, 1, 140, bytes((0, outliers, 0)))


DAMAGED = (  # size, layers, odds
    (SIZES[0], 2, (0, 3, 1)),
    (SIZES[1], 1, (0, 1, 0)),
    (SIZES[3], 1, (200, 20, 60)),
    (SIZES[5], 2, (0, 1, 0)),
)


def _edits(rng: random.Random) -> Iterator[bytes]:
    """Each kind of damage, to the first block and to the second."""
    for (size, layers, odds), flags, kind, block in itertools.product(
        DAMAGED, (0, BF16, EXACT, EXACT | BF16), range(8), range(2)
    ):
        recipe = _recipe(EDITS | size[0] | flags, 0, size[1], layers, size[2], bytes(odds))
        for _ in range(2):
            yield recipe + bytes((kind | block << 3,)) + rng.randbytes(3)


def _payloads() -> Iterator[bytes]:
    """Small enough for libFuzzer to change them byte by byte; the smallest cut off everywhere."""
    rng = np.random.default_rng(0)
    for rows, layers, hidden in ((1, 2, 3), (25, 1, 2), (3, 2, 7), (25, 1, 33), (2, 1, 64)):
        for flags in (0, BF16, EXACT, EXACT | BF16):
            values = rng.standard_normal((rows, layers, hidden), np.float32)
            states = values.astype(np.float16)
            if flags & BF16:
                states = (values.view(np.uint32) >> 16).astype(np.uint16)
            states[0, 0, -1] = 0
            room = np.empty(states.nbytes * 2 + 100 * layers, np.uint8)
            payload = room[: packed_numpy.encode(states, room.data)].tobytes()
            assert payload, "states that cannot be packed are no seed"
            recipe = _recipe(PAYLOAD | SMALL | flags, 2, rows, layers, hidden, bytes(3))
            for size in range(len(payload) if rows * layers * hidden <= 50 else 0):
                yield recipe + payload[:size]
            yield recipe + payload


# by hand


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--dir", type=Path, default=Path("runs/fuzz"))
    options = parser.parse_args()
    folders = [options.dir / name for name in ("corpus", "seeds", "crashes")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    corpus, seeds, crashes = folders
    binary = build(options.dir)
    write_seeds(seeds)
    finished = fuzz(binary, corpus, seeds, crashes, options.seconds)
    if finished.crashes:
        sys.stdout.write(finished.output + f"\nfails: {finished.crashes[0]}\n")
        return 1
    sys.stdout.write(
        f"{finished.executions:,} inputs in {options.seconds} s, {finished.covered} edges covered,"
        " no failure\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
