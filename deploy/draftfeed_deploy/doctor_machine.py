"""Of the machine, whatever runs on it: Python, the codec, limits of the kernel, the clock, GPUs."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from draftfeed_deploy.bench_target_machine import processor
from draftfeed_deploy.doctor_finding import Finding, fail, ok, warn
from draftfeed_deploy.progress import readable_bytes
from draftfeed_proto import codecs
from draftfeed_proto.codecs import packed
from draftfeed_proto.errors import UnavailableISA

PYTHON = (3, 11)
NUMPY = "numpy"
SOCKET_BYTES = 212_992
"""Linux' own default of net.core.*mem_max."""
TCP_BYTES = 4 << 20
"""What a link of 10 Gbit/s has under way in 3 ms."""
BACKLOG = 128
"""More consumers than that do not attach at the same time."""
FILES = 1024
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
_TIMEX_BYTES = 512
"""More than struct timex has."""
_PROC_SYS = Path("/proc/sys")
_SMI_SECONDS = 20.0
_TORCH_SECONDS = 60.0


def machine() -> Iterator[Finding]:
    yield python()
    yield codec()
    yield from sockets()
    yield files()
    yield locked_memory()
    yield clock()
    yield gpus(0)


def python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        return fail("python", found, "install Python 3.11 or newer, and draftfeed there")
    return ok("python", found)


def codec() -> Finding:
    """packed compiled for this processor, or many times slower."""
    try:
        name, lacking = codecs.PACKED.implementation, packed.available().lacking
    except UnavailableISA as error:
        return fail("codec", str(error), f"unset {packed.VARIABLE}")
    found = f"packed in {name}, on {processor()}"
    if name != NUMPY:
        return ok("codec", found)
    if not lacking:  # asked for by name
        return warn("codec", f"{found}: many times slower", f"unset {packed.VARIABLE}")
    fix = (
        "apt-get install gcc libc6-dev; in the checkout: pip install --force-reinstall --no-deps ."
    )
    return warn("codec", f"{found}: many times slower ({lacking})", fix)


def sockets() -> Iterator[Finding]:
    """Of this network namespace; a container may not show them all."""
    for name, least, key in (
        ("net/core/rmem_max", SOCKET_BYTES, 0),
        ("net/core/wmem_max", SOCKET_BYTES, 0),
        ("net/ipv4/tcp_rmem", TCP_BYTES, 2),
        ("net/ipv4/tcp_wmem", TCP_BYTES, 2),
        ("net/core/somaxconn", BACKLOG, 0),
    ):
        yield _kernel(name, least, key)


def _kernel(name: str, least: int, position: int) -> Finding:
    dotted = name.replace("/", ".")
    try:
        values = (_PROC_SYS / name).read_text().split()
        value = int(values[position])
    except (OSError, ValueError, IndexError):
        return ok(dotted, "not shown here; ask the machine that this container runs on")
    if value >= least:
        return ok(dotted, str(value))
    values[position] = str(least)
    return warn(dotted, f"{value}, below {least}", f"sysctl -w {dotted}='{' '.join(values)}'")


def files(segments: int = 0) -> Finding:
    """segments: of the spool when it is full; each is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES + segments
    found = f"{_limit(soft)} open files at a time (ulimit -n)"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ok("open files", found)
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    fix = f"ulimit -n {wanted}" if enough else f"LimitNOFILE={wanted} in the unit; ulimit -Hn"
    if soft < FILES:
        return fail("open files", f"{found}, {wanted} are needed", fix)
    found += f", {wanted} are needed when the spool is full, in segments of [spool] segment_bytes"
    return warn("open files", found, fix)


def locked_memory(needed_bytes: int = 0) -> Finding:
    """needed_bytes: that are pinned for a GPU. NVIDIA's driver does not count them, others do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = f"{'unlimited' if unlimited else readable_bytes(soft)} (ulimit -l)"
    if unlimited or soft >= needed_bytes:
        return ok("locked memory", found)
    needed = f"{found}, {readable_bytes(needed_bytes)} are pinned"
    return warn("locked memory", needed, "ulimit -l unlimited; in a unit LimitMEMLOCK=infinity")


def clock() -> Finding:
    """Whether something keeps it: ages in logs of two machines are compared by people."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex"):
        return ok("clock", "this system does not tell whether it is synchronised")
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # mode 0: only asks
    if state < 0:
        return ok("clock", f"cannot be asked: {os.strerror(ctypes.get_errno())}")
    if state == TIME_ERROR:
        fix = "timedatectl set-ntp true, or apt-get install chrony"
        return warn("clock", "not synchronised: logs of several machines do not agree", fix)
    return ok("clock", "synchronised")


def gpus(needed: int, first: int = 0) -> Finding:
    """needed: GPUs that the configuration takes, from number `first` on; 0: none."""
    names = _visible()
    if not needed:
        return ok("gpu", ", ".join(names) or "none, and none is needed")
    if not names:
        return _torch_gpus(first + needed)
    mine = names[first : first + needed]
    if len(mine) < needed:
        wanted = ", ".join(map(str, range(first, first + needed)))
        found = f"{len(names)} visible, and this configuration is for number {wanted}"
        return fail("gpu", found, "nvidia-smi -L; set [engine] tp_size and replica")
    return ok("gpu", ", ".join(mine))


def _visible() -> list[str]:
    """Names of those that CUDA may use; none where there is no nvidia-smi."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return names
    return list(_chosen([word.strip() for word in chosen.split(",")], names))


def _chosen(words: Iterable[str], names: list[str]) -> Iterator[str]:
    """By CUDA_VISIBLE_DEVICES. CUDA shows none from the first word on that it does not know."""
    for word in words:
        if word.isdecimal() and int(word) < len(names):
            yield names[int(word)]
        elif word.startswith(("GPU-", "MIG-")):
            yield word
        else:
            return


def _torch_gpus(needed: int) -> Finding:
    """In a process of its own, because it takes seconds and leaves a GPU in use."""
    command = "import torch; print(torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, timeout=_TORCH_SECONDS
        )
        found = int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        found = 0
    if found >= needed:
        return ok("gpu", f"{found}, by torch; there is no nvidia-smi")
    fix = "nvidia-smi; in a container: docker run --gpus all"
    return fail("gpu", f"{found} visible, {needed} are needed", fix)


def _limit(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else str(value)
