"""Compiles the codec's C: into a wheel or, for an editable install, in place.

Without a library the package works too, with NumPy instead. `_build.json`, which lies where the
library would, says whether there is one and, if not, why: {"native": bool, "reason": str}.

CC and CFLAGS mean what they always mean. DRAFTFEED_PURE=1 builds no library,
DRAFTFEED_REQUIRE_NATIVE=1 builds nothing without one. `python hatch_build.py` compiles in place.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "draftfeed_proto/codecs"
IN_PLACE = Path(__file__).resolve().parent / "proto" / PACKAGE
SOURCES = IN_PLACE / "native"
LIBRARY = "_packed.so"
REPORT = "_build.json"
# No -march: a function that needs more than the least of CPUs says so itself, and the library asks
# the CPU before it calls one. So one library serves every machine.
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]


class NotCompiled(Exception):
    """Its text is the reason."""


def build(folder: Path) -> bool:
    """Put the library, or none, and the report into `folder`. Returns whether it is there."""
    library = folder / LIBRARY
    reason = ""
    try:
        compile_library(library)
    except NotCompiled as error:
        library.unlink(missing_ok=True)  # one of other sources would be loaded
        reason = str(error)
    report = {"native": not reason, "reason": reason}
    folder.joinpath(REPORT).write_text(json.dumps(report) + "\n", encoding="utf-8")
    if reason:
        complain(f"draftfeed's codec is not compiled: {reason}")
    return not reason


def compile_library(library: Path) -> None:
    """Raises NotCompiled, and then leaves `library` as it was."""
    if os.environ.get("DRAFTFEED_PURE") == "1":
        raise NotCompiled("DRAFTFEED_PURE=1 was set")
    if sys.platform != "linux":
        raise NotCompiled(f"its C is for Linux, this is {sys.platform}")
    command = [*compiler(), *FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    # Processes may have the old library mapped, and two environments may compile at once: each
    # writes a file of its own, on the same file system, and renames it.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{LIBRARY}.") as scratch:
        new = Path(scratch, LIBRARY)
        run([*command, "-o", str(new), *sorted(path.name for path in SOURCES.glob("*.c"))])
        new.replace(library)


def compiler() -> list[str]:
    """Raises NotCompiled."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NotCompiled("there is no C compiler (cc, gcc or clang)")


def run(command: list[str]) -> None:
    """Raises NotCompiled with what the compiler said."""
    try:
        # In their folder sources go by their names alone, and no path gets into the library: the
        # same sources, compiler and flags make the same bytes.
        done = subprocess.run(
            command, cwd=SOURCES, capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise NotCompiled(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        raise NotCompiled(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    sys.stderr.write(done.stderr)  # its warnings


def complain(text: str) -> None:
    if os.environ.get("DRAFTFEED_REQUIRE_NATIVE") == "1":
        sys.exit(text)
    sys.stderr.write(f"{text}\n")


def get_build_hook() -> type[Any]:
    """hatchling calls this. Only here is it imported, so that `make` needs nothing but Python."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeCodec(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if version == "editable":
                build(IN_PLACE)
                return
            self.scratch = tempfile.TemporaryDirectory(prefix="draftfeed-")
            folder = Path(self.scratch.name)
            if build(folder):
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform}"
            for path in folder.iterdir():
                build_data["force_include"][str(path)] = f"{PACKAGE}/{path.name}"

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            if version != "editable":
                self.scratch.cleanup()

    return NativeCodec


if __name__ == "__main__":
    build(IN_PLACE)
