"""Which thread is which, for those who look at a process from outside."""

import json
import os
import threading
from pathlib import Path


def write_thread_names(path: Path) -> None:
    """{native id: name} of the Python threads of this process; ZeroMQ's name themselves."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(names))
    os.replace(part, path)


def thread_cpu_seconds(pid: int, path: Path) -> dict[str, float]:
    """{name: seconds in user mode and in the kernel} of the threads of a process, all of a name
    together: those in the file, ZeroMQ's, and the rest as "other"."""
    names: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    used: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            head, _, tail = (task / "stat").read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        fields = tail.split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        comm = head.partition("(")[2]
        name = names.get(task.name, "zmq" if comm.startswith("ZMQ") else "other")
        used[name] = used.get(name, 0.0) + seconds
    return used
