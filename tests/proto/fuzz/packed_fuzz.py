"""Fuzzing of the codec's C, `make fuzz`: builds the target, writes seeds, runs libFuzzer."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fuzz import emulation
from fuzz.seeds import write_seeds

HERE = Path(__file__).resolve().parent
REGRESSIONS = HERE / "regressions"
"""Inputs that once found a bug; each runs before anything else."""

CLANG = "clang"
FLAGS = ["-std=c11", "-O2", "-g", "-Wall", "-Wextra"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COVERAGE = ["-fsanitize-coverage=inline-8bit-counters,pc-table"]
KERNELS = ("portable", "avx2", "avx512")
RENAMED = [f"-D{isa}_kernels=real_{isa}_kernels" for isa in KERNELS]
"""exact.c stands between the codec and these."""


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
    native = _copy_with_gaps(folder)
    objects: list[Path] = []
    for source in sorted(native.glob("*.c")):
        renamed = RENAMED if source.stem in KERNELS else []
        flags = COVERAGE + renamed + emulation.flags(source.name)
        objects.append(_compile(source, folder, flags))
    for name in ("target.c", "damage.c", "exact.c", "reference.c"):
        objects.append(_compile(HERE / name, folder, [f"-I{native}"]))
    binary = folder / "packed_fuzz"
    _run([CLANG, "-fsanitize=fuzzer,address,undefined", *map(str, objects), "-o", str(binary)])
    return binary


def fuzz(binary: Path, corpus: Path, seeds: Path, crashes: Path, seconds: int) -> Finished:
    """Run the regressions, then search for so long. What is new goes to `corpus`, and an input
    that makes the target fail, which ends the search, to `crashes`."""
    known = sorted(REGRESSIONS.iterdir())
    before = set(crashes.iterdir())
    # Of resident memory no limit: in one sandbox the kernel counted 2 GB of the sanitizer's own,
    # untouched. The codec allocates nothing, and one huge allocation of the target is still told.
    limits = ["-timeout=60", "-rss_limit_mb=0", "-malloc_limit_mb=256"]
    common = [*limits, f"-artifact_prefix={crashes}/"]
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


def _copy_with_gaps(folder: Path) -> Path:
    """The codec's sources, but a gap follows each member of the workspace. The target forbids to
    touch them: AddressSanitizer knows of no borders within an allocation."""
    native = folder / "native"
    shutil.copytree(emulation.NATIVE, native, dirs_exist_ok=True)
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
