"""The sandbox of the units with the drop-in for GPUs, on a machine without one: what the services
compute with runs in it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdbox
from sdbox import Box
from unit_hosts import BINDS, ROOT, tree, write

pytestmark = [
    pytest.mark.timeout(115),
    pytest.mark.skipif(bool(sdbox.missing()), reason=f"no systemd of our own: {sdbox.missing()}"),
]
PYTHON = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"/opt/draftfeed/lib/{Path(PYTHON).name}/site-packages"
ROOMS = ":".join(f"/opt/source/{room}" for room in ("proto", "producer", "consumer", "deploy"))
[TRITON] = re.findall(r"^TRITONS := \S+ (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
RUN = """[Service]
Type=oneshot
WatchdogSec=0
Restart=no
TimeoutStartSec=110
EnvironmentFile=
Environment=LD_LIBRARY_PATH=/opt/python/lib
Environment=PYTHONPATH={path}
ExecStart=
ExecStart={python} {words}
"""
UNITS = {
    "producer": ("draftfeed-producer@", "draftfeed-producer@0"),
    "consumer": ("draftfeed-consumer", "draftfeed-consumer"),
}


def box(directory: Path, *, gpu: bool) -> Box:
    root = tree(directory, gpu=gpu)
    for name in ("producers", "consumer"):
        write(root / f"etc/draftfeed/keys/{name}.secret", "not read here", 0o600)
    return Box("gpu" if gpu else "plain", tree=root, binds=BINDS)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(tmp_path_factory.mktemp("gpu"), gpu=True) as gpu:
        gpu.run("systemd-sysusers")
        yield gpu


def ran(box: Box, service: str, words: str, path: str = "") -> str:
    """The unit as it is, with another command in it; what that printed."""
    template, unit = UNITS[service]
    path = ":".join(filter(None, [path, ROOMS, PACKAGES]))
    text = RUN.format(path=path, python=PYTHON, words=words)
    drop_in = f"/run/systemd/system/{template}.service.d/zz-test.conf"
    box.run("install", "-D", "-m", "644", "/dev/stdin", drop_in, text=text)
    box.systemctl("daemon-reload")
    done = box.systemctl("start", unit, check=False)
    journal = box.journal(unit)
    assert done.returncode == 0, done.stderr + journal
    return journal


@pytest.mark.parametrize("service", UNITS)
def test_torch_codec_and_shared_memory_work(gpu: Box, service: str) -> None:
    said = ran(gpu, service, "/opt/source/tests/system/gpu_sandbox_child.py")
    assert "all of it works; memory may be written and executed" in said


def test_triton_compiles_for_gpus(gpu: Box) -> None:
    """With its own ptxas, and into the cache directory."""
    words = "/opt/source/tests/producer/kernel_aot.py %C/draftfeed-producer-%i"
    said = ran(gpu, "producer", words, f"/opt/source/.venv/triton/{TRITON}")
    forms = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {form["capability"] for form in forms} == {90, 100, 120}
    assert not any(form["spills"] for form in forms)
    assert gpu.run("ls", "/var/cache/draftfeed-producer-0/triton").stdout


def test_without_the_drop_in_nothing_may_be_written_and_executed(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    with box(tmp_path, gpu=False) as plain:
        plain.run("systemd-sysusers")
        said = ran(plain, "consumer", "/opt/source/tests/system/gpu_sandbox_child.py")
        assert "memory may not be written and executed" in said
