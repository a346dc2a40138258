"""Of a producer's configuration: target, prompts, engine, memory, spool, ports, keys."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq

from draftfeed_deploy import doctor_archive
from draftfeed_deploy import doctor_machine as machine
from draftfeed_deploy.doctor_disk import RATIO, bytes_in, capacity_of, disk, write_speed
from draftfeed_deploy.doctor_finding import Finding, fail, ok, warn
from draftfeed_deploy.doctor_network import Address, can_listen, parsed
from draftfeed_deploy.producer_file import ProducerFile
from draftfeed_deploy.progress import readable_bytes
from draftfeed_deploy.status import FIRST_PORT, StatusConfig
from draftfeed_producer.access import PUBLIC_SUFFIX
from draftfeed_producer.engines import (
    ReplayConfig,
    SGLangConfig,
    SyntheticConfig,
    TransformersConfig,
)
from draftfeed_producer.engines.sglang.engine import KNOWN_VERSIONS
from draftfeed_producer.engines.sglang.memory import available_bytes
from draftfeed_producer.errors import EngineError, ProducerError
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.target import load_target
from draftfeed_proto.errors import KeyFileError, ProtoError
from draftfeed_proto.keys import local, read_public, read_secret

PLUGIN = "draftfeed_producer.engines.sglang.plugin:load"
SHM_BYTES = 1 << 30
"""NCCL's, between GPUs of one replica; 64 MiB in a container without --shm-size."""
LAYERS = 5
"""Without layer_ids, of targets that have so many."""
MAX_LINE_BYTES = 64 << 20
_ASK = """\
import importlib.metadata as m, json
eps = [e.value for e in m.entry_points(group="sglang.srt.plugins")]
print(json.dumps([m.version("sglang"), m.version("draftfeed"), eps]))
"""
_ASK_SECONDS = 60.0


def producer(config: ProducerFile, tokens_per_second: float) -> Iterator[Finding]:
    """tokens_per_second: rows that this producer is planned to capture."""
    yield machine.files(-(-config.spool.quota_bytes // config.spool.segment_bytes))
    row_bytes = None
    if isinstance(config.engine, SyntheticConfig):
        row_bytes = _synthetic_row_bytes(config.engine)
    elif isinstance(config.engine, ReplayConfig):
        assert config.archive is not None  # the configuration has seen to it
        yield doctor_archive.served(config.archive.roots)
    else:
        found, row_bytes = _target(config)
        yield found
        yield _prompts(config)
    yield from _engine(config)
    if isinstance(config.engine, ReplayConfig):
        yield disk("spool disk", config.spool.dir, 0, config.spool.min_free_bytes)
    else:
        yield from _spool(config, row_bytes, tokens_per_second)
    if config.spool.retain == "archive" and config.archive is not None:
        yield from doctor_archive.written_to(config.archive, config.spool)
    yield from _ports(config.server, config.status)
    yield from _keys(config.server)


def _synthetic_row_bytes(engine: SyntheticConfig) -> int:
    layers = LAYERS if engine.layer_ids is None else len(engine.layer_ids)
    return 2 * engine.hidden_size * (layers + (engine.final != "none"))


def _target(config: ProducerFile) -> tuple[Finding, int | None]:
    """(what it is, bytes of one row)"""
    try:
        target = load_target(config.needed()[0])
        settings = config.needed()[0]
        row_bytes = target.descriptor(settings.layer_ids, settings.final).row_bytes()
    except (ProducerError, ProtoError) as error:
        return fail("target", str(error), "[target] path: a complete model directory"), None
    except ImportError as error:
        fix = "in the checkout: pip install '.[transformers]'"
        return fail("target", f"{error.name} is not installed", fix), None
    found = f"{settings.path}, {readable_bytes(row_bytes)} of states for each token"
    return ok("target", found), row_bytes


def _prompts(config: ProducerFile) -> Finding:
    try:
        path = Path(config.needed()[1].path).expanduser()
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            return fail("prompts", f"{path} is no file", "ls -l; [prompts] path")
        with path.open("rb") as file:
            line = file.readline(MAX_LINE_BYTES)
    except ProducerError as error:
        return fail("prompts", str(error), "add [prompts]")
    except OSError as error:
        return fail("prompts", f"{error.filename}: {error.strerror}", "ls -l; [prompts] path")
    try:
        whole = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        return fail("prompts", f"{path}: line 1 is no JSON object", "draftfeed prepare --help")
    return ok("prompts", f"{path}, {readable_bytes(path.stat().st_size)}")


def _engine(config: ProducerFile) -> Iterator[Finding]:
    engine = config.engine
    if isinstance(engine, SGLangConfig):
        cpu = engine.args.get("device") == "cpu"
        yield _sglang(engine.python or sys.executable)
        yield machine.gpus(0 if cpu else engine.tp_size, engine.replica * engine.tp_size)
        yield machine.locked_memory(0 if cpu else engine.ring_bytes)
        yield _memory(config, engine.ring_bytes)
        if engine.tp_size > 1:
            yield shared_memory()
    elif isinstance(engine, TransformersConfig):
        number = engine.device.partition(":")[2]
        yield machine.gpus(engine.device.startswith("cuda"), int(number) if number else 0)
        yield _memory(config, 0)


def _sglang(python: str) -> Finding:
    fix = f"in the checkout: {python} -m pip install '.[sglang]'; docs/deploy-pro6000.md"
    try:
        done = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS
        )
        sglang, draftfeed, plugins = json.loads(done.stdout)
    except OSError as error:
        return fail("sglang", f"{python}: {(error.strerror or '').lower()}", "set [engine] python")
    except (subprocess.SubprocessError, ValueError, TypeError):
        return fail("sglang", f"SGLang and draftfeed are not both installed for {python}", fix)
    found = f"SGLang {sglang} with draftfeed {draftfeed}, {python}"
    if PLUGIN not in plugins:
        return fail("sglang", f"{found}: it does not know our plugin", fix)
    if sglang not in KNOWN_VERSIONS:
        known = ", ".join(KNOWN_VERSIONS)
        check = "draftfeed producer -c producer.toml --check"
        return warn("sglang", f"{found}; tested with {known}", check)
    return ok("sglang", found)


def _memory(config: ProducerFile, ring_bytes: int) -> Finding:
    """The ring is taken at the start, the staging memory as samples are in the making."""
    try:
        available = available_bytes()
    except EngineError as error:
        return warn("memory", str(error), "mount -t proc proc /proc")
    staging = config.capture.staging_bytes
    found = (
        f"{readable_bytes(available)} available; ring {readable_bytes(ring_bytes)}, "
        f"staging up to {readable_bytes(staging)}"
    )
    if ring_bytes > available:
        return fail("memory", found, "free -h; lower [engine] ring_bytes")
    if ring_bytes + staging > available:
        return warn("memory", found, "free -h; lower [capture] staging_bytes")
    return ok("memory", found)


def shared_memory() -> Finding:
    size = capacity_of(Path("/dev/shm"))
    if size is None:
        return fail("/dev/shm", "is not there", "mount -t tmpfs tmpfs /dev/shm")
    found = readable_bytes(size)
    if size < SHM_BYTES:
        fix = "docker run --shm-size=8g; mount -o remount,size=8g /dev/shm"
        return warn("/dev/shm", f"{found}: too little for several GPUs in some versions", fix)
    return ok("/dev/shm", found)


def _spool(
    config: ProducerFile, row_bytes: int | None, tokens_per_second: float
) -> Iterator[Finding]:
    spool = config.spool
    directory = spool.dir.expanduser()
    have = bytes_in(directory)
    yield disk("spool disk", directory, spool.quota_bytes, spool.min_free_bytes, have_bytes=have)
    if row_bytes is not None:
        planned = row_bytes * tokens_per_second / RATIO
        yield write_speed("spool speed", directory, planned)


def _ports(server: ServerConfig, status: StatusConfig) -> Iterator[Finding]:
    yield _port(server.bind)
    yield status_port(status)


def _port(bind: str) -> Finding:
    address = parsed(bind)
    if address is not None:
        return can_listen("port", address, "[server] bind")
    if bind.startswith("ipc://"):
        return ok("port", f"{bind}: not TCP, not tried")
    return fail("port", f"nobody can connect to {bind}", "[server] bind: tcp://HOST:PORT")


def status_port(status: StatusConfig) -> Finding:
    if not status.enabled:
        return ok("status port", "[status] is off")
    if status.bind is None:
        return ok("status port", f"the first free one of 127.0.0.1 from {FIRST_PORT} on")
    host, _, port = status.bind.rpartition(":")
    return can_listen("status port", Address(host.strip("[]"), int(port)), "[status] bind")


def _keys(server: ServerConfig) -> Iterator[Finding]:
    if server.key is None:
        if server.insecure and not local(server.bind):
            yield warn(
                "keys",
                f"{server.bind} is open to other machines, without keys",
                "draftfeed keygen keys/producers; docs/security.md",
            )
        else:
            yield ok("keys", "none, and only this machine can connect")
        return
    try:
        read_secret(server.key.expanduser(), zmq.curve_public)
        yield ok("keys", f"{server.key} is readable by its owner alone")
    except KeyFileError as error:
        yield fail("keys", str(error), key_fix(server.key))
    yield _clients(server)


def key_fix(key: Path) -> str:
    """Of a secret that cannot be used."""
    path = key.expanduser()
    if os.access(path, os.R_OK) and path.stat().st_mode & 0o077:
        return f"chmod 600 {key}"
    if os.access(path.parent, os.R_OK | os.X_OK) and not os.path.lexists(path):
        return f"draftfeed keygen {key.with_suffix('')}"
    return f"namei -l {key}; draftfeed keygen makes a new one"


def _clients(server: ServerConfig) -> Finding:
    count = 0
    try:
        for path in map(Path.expanduser, server.clients):
            if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
                return fail("clients", f"{path} cannot be read", f"chmod g+rx {path}; chgrp")
            files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
            for file in files:
                read_public(file)
                count += 1
    except OSError as error:
        found, fix = f"{error.filename}: {error.strerror}", f"namei -l {error.filename}"
        return fail("clients", found, fix)
    except KeyFileError as error:
        return fail("clients", str(error), "copy the consumer's public file there")
    if not count:
        return fail("clients", "no public key: nobody could attach", "cp train-a.pub there")
    return ok("clients", f"{count} consumers are known")
