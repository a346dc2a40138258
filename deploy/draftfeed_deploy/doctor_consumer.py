"""Of a consumer's configuration: producers, keys, memory, the trainer and its directories."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from draftfeed_consumer.trainers import TrainerConfig
from draftfeed_deploy import doctor_machine as machine
from draftfeed_deploy.consumer_file import ConsumerFile
from draftfeed_deploy.doctor_disk import disk
from draftfeed_deploy.doctor_finding import Finding, fail, ok, warn
from draftfeed_deploy.doctor_network import can_reach
from draftfeed_deploy.doctor_producer import key_fix, status_port
from draftfeed_deploy.progress import readable_bytes
from draftfeed_producer.engines.sglang.memory import available_bytes
from draftfeed_producer.errors import EngineError
from draftfeed_proto.errors import KeyFileError
from draftfeed_proto.keys import local

_RESOLVE = """\
import sys
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers import resolve
try:
    resolve(sys.argv[1])
except TrainerError as error:
    sys.exit(str(error))
"""
_RESOLVE_SECONDS = 60.0
GAPS = 1.4
"""Times its capacity that a buffer takes which is full of samples of many sizes."""
CHECKPOINT_BYTES = 4 << 30
"""A few, of a drafter of several layers with its optimizer."""


def consumer(config: ConsumerFile) -> Iterator[Finding]:
    for address in config.producer.addresses:
        yield can_reach(address)
    yield _keys(config)
    yield _buffer(config.buffer.capacity_bytes)
    yield from _trainer(config.trainer)
    yield status_port(config.status)


def _keys(config: ConsumerFile) -> Finding:
    client = config.producer
    if client.key is None:
        if all(map(local, client.addresses)):
            return ok("keys", "none, and every producer is on this machine")
        fix = "draftfeed keygen keys/train-a; docs/security.md"
        return warn("keys", "none: the stream is neither encrypted nor authenticated", fix)
    try:
        client.credentials()
    except KeyFileError as error:
        return fail("keys", str(error), key_fix(client.key))
    return ok("keys", f"{client.key} is readable by its owner alone")


def _buffer(capacity_bytes: int) -> Finding:
    try:
        available = available_bytes()
    except EngineError as error:
        return warn("memory", str(error), "mount -t proc proc /proc")
    found = f"{readable_bytes(available)} available, buffer {readable_bytes(capacity_bytes)}"
    if capacity_bytes > available:
        return fail("memory", found, "free -h; lower [buffer] capacity_bytes")
    if GAPS * capacity_bytes > available:
        found += f", which may take {GAPS} times as much when it is full"
        return warn("memory", found, "free -h; lower [buffer] capacity_bytes")
    return ok("memory", found)


def _trainer(trainer: TrainerConfig) -> Iterator[Finding]:
    yield _packages(trainer)
    device = str(trainer.options.get("device", "auto"))
    yield machine.gpus(1 if device.startswith("cuda") else 0)
    if trainer.target is not None:
        yield _target(trainer.target.expanduser())
    yield disk("checkpoints", trainer.output_dir, CHECKPOINT_BYTES, 0)


def _packages(trainer: TrainerConfig) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return fail(
            "trainer", "torch is not installed", "in the checkout: pip install '.[specforge]'"
        )
    if trainer.function is None:
        if importlib.util.find_spec("specforge") is None:
            fix = "pip install '.[specforge]' && pip install --no-deps specforge==0.2.0"
            return fail("trainer", "SpecForge is not installed", f"in the checkout: {fix}")
        return ok("trainer", trainer.kind or "specforge")
    return _function(trainer.function)


def _function(name: str) -> Finding:
    """Imported as the consumer will, in a process of its own: a module may do anything."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RESOLVE, name],
            env={**os.environ, **paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RESOLVE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        found = f"{name}: not imported within {_RESOLVE_SECONDS:.0f} s"
        return warn("trainer", found, f"python -X importtime -c 'import {name.partition(':')[0]}'")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it ended"])[-1]
        return fail("trainer", why, "PYTHONPATH=the folder that it is in; its own packages")
    return ok("trainer", name)


def _target(path: Path) -> Finding:
    config = path / "config.json"
    if not os.access(config, os.R_OK):
        return fail("target", f"{config} cannot be read", "[trainer] target: a model directory")
    return ok("target", str(path))
