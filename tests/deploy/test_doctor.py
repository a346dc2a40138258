"""`draftfeed doctor`: each thing that can stand in the way is found, with the way to mend it."""

import json
import os
import resource
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from draftfeed_deploy.cli import main
from draftfeed_deploy.doctor_disk import TEST_BYTES, write_test
from draftfeed_deploy.doctor_network import holder_of
from draftfeed_deploy.doctor_producer import PLUGIN
from draftfeed_deploy.keygen import write_pair
from draftfeed_producer.engines.sglang.memory import available_bytes
from draftfeed_proto.codecs.packed import VARIABLE
from ports import held_port
from processes import Run
from tiny_models import make_qwen3
from waiting import eventually

PRODUCER = """
[engine]
name = "transformers"
dtype = "float32"
[target]
path = "{model}"
layer_ids = [1, 3]
[prompts]
path = "prompts.jsonl"
[capture]
staging_bytes = 1_000_000
[spool]
dir = "spool"
quota_bytes = 1_000_000
min_free_bytes = 0
[server]
bind = "tcp://127.0.0.1:*"
"""
CONSUMER = """
[producer]
addresses = ["tcp://127.0.0.1:{port}"]
[buffer]
capacity_bytes = 1_000_000
[trainer]
function = "stub_trainer:train"
output_dir = "out"
"""


class Said(NamedTuple):
    level: str
    found: str
    fix: str


class Doctor(NamedTuple):
    code: int
    said: dict[str, Said]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("doctor") / "qwen3")


@pytest.fixture
def ask(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    silent: int,
) -> Callable[..., Doctor]:
    """Asks about a producer, a consumer or, with nothing, the machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    (tmp_path / "producer.toml").write_text(PRODUCER.format(model=model))
    (tmp_path / "consumer.toml").write_text(CONSUMER.format(port=silent))

    def ask(service: str = "", *settings: str, options: tuple[str, ...] = ()) -> Doctor:
        chosen = ["-c", f"{service}.toml"] if service else []
        sets = [word for setting in settings for word in ("--set", setting)]
        code = main(["doctor", "--json", *chosen, *sets, *options])
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] == (code == 0)
        findings = report["findings"]
        assert all(one["fix"] for one in findings if one["level"] != "ok")
        assert len({one["check"] for one in findings}) == len(findings)
        said = {
            one["check"]: Said(one["level"], one["found"], one.get("fix", "")) for one in findings
        }
        return Doctor(code, said)

    return ask


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which nobody listens."""
    with held_port() as number:
        yield number


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_machine_alone(ask: Callable[..., Doctor]) -> None:
    doctor = ask()
    assert {"python", "codec", "open files", "locked memory", "clock", "gpu"} <= set(doctor.said)
    assert {"net.core.rmem_max", "net.core.wmem_max", "net.core.somaxconn"} <= set(doctor.said)
    assert "target" not in doctor.said
    assert doctor.said["python"].level == "ok"


def test_healthy_producer_passes_and_nothing_is_changed(
    ask: Callable[..., Doctor], tmp_path: Path
) -> None:
    (tmp_path / "spool").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    doctor = ask("producer", options=("--tokens-per-second", "1"))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert doctor.code == 0, doctor.said
    assert before == after
    checks = ("target", "prompts", "memory", "spool disk", "spool speed", "port", "keys")
    assert {check: doctor.said[check].level for check in checks} == dict.fromkeys(checks, "ok")
    assert "written and forced to disk" in doctor.said["spool speed"].found


def test_spool_that_is_not_there_yet_is_not_made(
    ask: Callable[..., Doctor], tmp_path: Path
) -> None:
    doctor = ask("producer", "spool.dir=a/b/spool")
    assert doctor.said["spool disk"].level == "ok"
    assert not (tmp_path / "a").exists()


def test_a_line_says_how_bad_it_is_and_the_next_how_to_mend_it(
    ask: Callable[..., Doctor], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "-c", "producer.toml", "--set", "target.path=nowhere"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("FAIL  target: "))
    assert "nowhere" in lines[at]
    assert lines[at + 1].startswith("      [target] path")
    assert lines[-1].endswith("1 FAIL")


ELSEWHERE = ("server.bind='tcp://203.0.113.1:5550'", "server.insecure=true")


@pytest.mark.parametrize(
    ("settings", "check", "says"),
    [
        (("prompts.path=gone.jsonl",), "prompts", "No such file"),
        (("prompts.path=producer.toml",), "prompts", "line 1 is no JSON object"),
        (("spool.min_free_bytes=1_000_000_000_000_000",), "spool disk", "must stay free"),
        (("engine.device=cuda:63",), "gpu", "visible"),
        (ELSEWHERE, "port", "203.0.113.1:5550: not an address of this machine"),
        (("server.bind='inproc://here'",), "port", "nobody can connect to inproc://here"),
        (("spool.dir=prompts.jsonl",), "spool disk", "prompts.jsonl is a file, and no directory"),
        (("spool.dir=prompts.jsonl/spool",), "spool speed", "is a file, and no directory"),
        (("prompts.path=/dev/null",), "prompts", "/dev/null is no file"),
    ],
)
def test_what_a_producer_cannot_run_with(
    ask: Callable[..., Doctor], settings: tuple[str, ...], check: str, says: str
) -> None:
    doctor = ask("producer", *settings)
    assert doctor.code == 1
    assert doctor.said[check].level == "FAIL"
    assert says in doctor.said[check].found


def test_prompt_file_that_would_never_end(ask: Callable[..., Doctor], tmp_path: Path) -> None:
    """Nested too deeply to be read, and a pipe that nobody writes to."""
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "pipe")
    said = ask("producer", "prompts.path=deep.jsonl").said["prompts"]
    assert said[:2] == ("FAIL", "deep.jsonl: line 1 is no JSON object")
    assert ask("producer", "prompts.path=pipe").said["prompts"][:2] == ("FAIL", "pipe is no file")


def test_disk_that_the_quota_outgrows_is_a_warning(ask: Callable[..., Doctor]) -> None:
    doctor = ask("producer", "spool.quota_bytes=1_000_000_000_000_000")
    assert doctor.said["spool disk"].level == "warn"


def test_archive_on_the_spools_drive_gets_what_the_spool_cannot_grow_to(
    ask: Callable[..., Doctor],
) -> None:
    """It asked for nothing, and a default quota leaves an archive nothing on a small drive."""
    archive = ("spool.retain=archive", 'archive.roots=["a"]', "archive.min_free_bytes=0")
    assert ask("producer", *archive).said["archive a"].level == "ok"
    large = ask("producer", *archive, "spool.quota_bytes=1_000_000_000_000_000")
    assert large.said["archive a"].level == "warn"
    assert "quota_bytes" in large.said["archive a"].fix


def test_disk_slower_than_the_plan_is_said_with_both_rates(ask: Callable[..., Doctor]) -> None:
    doctor = ask("producer", options=("--tokens-per-second", "1e12"))
    assert doctor.said["spool speed"].level == "FAIL"
    assert doctor.said["spool speed"].found.count("/s") == 2


def test_write_test_is_bounded_and_leaves_nothing(tmp_path: Path) -> None:
    written = write_test(tmp_path)
    assert 0 < written.bytes <= TEST_BYTES
    assert list(tmp_path.iterdir()) == []


def test_port_that_is_taken_names_who_has_it(ask: Callable[..., Doctor], listener: int) -> None:
    doctor = ask("producer", f"server.bind='tcp://127.0.0.1:{listener}'")
    assert doctor.said["port"].level == "FAIL"
    assert f"(pid {os.getpid()})" in doctor.said["port"].found
    doctor = ask("producer", f"status.bind='127.0.0.1:{listener}'")
    assert f"(pid {os.getpid()})" in doctor.said["status port"].found


def test_nobody_has_a_free_port(silent: int) -> None:
    assert str(holder_of(silent)) == "a process of somebody else"


def test_port_of_a_running_producer_is_no_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, rate=1)
    try:
        producer = run.start("producer")
        run.wait_for(producer, "serving")
        done = subprocess.run(
            [sys.executable, "-m", "draftfeed_deploy.cli", "doctor", "-c", "producer.toml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert f"(pid {producer.pid})" in done.stdout
        assert "warn  port: " in done.stdout
    finally:
        run.kill_all()


def test_secret_that_others_may_read(ask: Callable[..., Doctor], tmp_path: Path) -> None:
    secret, public = write_pair(tmp_path / "keys")
    settings = (f"server.key='{secret}'", f"server.clients=['{public}']")
    assert ask("producer", *settings).said["keys"].level == "ok"
    secret.chmod(0o644)
    doctor = ask("producer", *settings)
    assert doctor.code == 1
    assert doctor.said["keys"].level == "FAIL"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o644  # nothing is mended
    subprocess.run(shlex.split(doctor.said["keys"].fix), check=True)
    assert ask("producer", *settings).said["keys"].level == "ok"


def test_open_stream_without_keys_is_a_warning(ask: Callable[..., Doctor]) -> None:
    doctor = ask("producer", "server.bind='tcp://0.0.0.0:*'", "server.insecure=true")
    assert doctor.said["keys"].level == "warn"


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc://here"])
def test_loopback_is_not_open_whatever_is_allowed(ask: Callable[..., Doctor], bind: str) -> None:
    said = ask("producer", f"server.bind='{bind}'", "server.insecure=true").said
    assert said["keys"].level == said["port"].level == "ok"


def test_interface_is_an_address(ask: Callable[..., Doctor]) -> None:
    doctor = ask("producer", "server.bind='tcp://lo:5550'", "server.insecure=true")
    assert doctor.said["port"].level == "ok"


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory that a user without root's rights may not enter."""
    directory = tmp_path / "closed"
    directory.mkdir()
    (directory / "a.pub").write_text("")
    directory.chmod(0)
    yield directory
    directory.chmod(0o700)


def as_anybody(*settings: str) -> dict[str, Said]:
    """What is said to somebody without root's rights over files."""
    rights = "-dac_override,-dac_read_search"
    root = ("setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}")
    command = (sys.executable, "-m", "draftfeed_deploy.cli", "doctor", "--json", "-c")
    sets = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [*(() if os.getuid() else root), *command, "producer.toml", *sets],
        capture_output=True,
        text=True,
    )
    findings = json.loads(done.stdout)["findings"]
    return {one["check"]: Said(one["level"], one["found"], one.get("fix", "")) for one in findings}


def test_directories_of_somebody_else(
    ask: Callable[..., Doctor], closed: Path, tmp_path: Path
) -> None:
    """Usual on a node; it was a traceback, and a directory of keys that is closed was empty."""
    secret, _ = write_pair(tmp_path / "keys")
    keys = (f"server.key='{secret}'", f"server.clients=['{closed}']")
    said = as_anybody(f"spool.dir='{closed}/x/spool'", *keys)
    assert said["spool disk"][:2] == ("FAIL", f"{closed} cannot be written")
    assert said["spool speed"].level == "FAIL"
    assert said["clients"] == Said(
        "FAIL", f"{closed} cannot be read", f"chmod g+rx {closed}; chgrp"
    )
    gone = as_anybody(f"server.key='{tmp_path}/gone.secret'", keys[1])["keys"]
    assert (gone.level, gone.fix) == ("FAIL", f"draftfeed keygen {tmp_path}/gone")
    hidden = as_anybody(f"server.key='{closed}/a.secret'", keys[1])["keys"]
    assert (hidden.level, hidden.fix.split(";")[0]) == ("FAIL", f"namei -l {closed}/a.secret")


def test_no_client_is_known(ask: Callable[..., Doctor], tmp_path: Path) -> None:
    secret, _ = write_pair(tmp_path / "keys")
    (tmp_path / "clients").mkdir()
    doctor = ask("producer", f"server.key='{secret}'", "server.clients=['clients']")
    assert doctor.said["clients"].level == "FAIL"


def test_sglang_that_is_not_there_and_memory_that_is_not(
    ask: Callable[..., Doctor], tmp_path: Path, model: Path
) -> None:
    text = PRODUCER.format(model=model).replace('name = "transformers"', 'name = "sglang"')
    (tmp_path / "producer.toml").write_text(text)
    on_cpu = ("engine.args.device=cpu", "engine.python=/nowhere/python")
    doctor = ask("producer", *on_cpu, "engine.ring_bytes=1_000_000_000_000_000")
    assert doctor.said["sglang"].level == "FAIL"
    assert "/nowhere/python" in doctor.said["sglang"].found
    assert doctor.said["memory"].level == "FAIL"
    assert "ring_bytes" in doctor.said["memory"].fix
    odd = tmp_path / "odd"
    odd.write_text("#!/bin/sh\necho 3\n")
    odd.chmod(0o755)
    doctor = ask("producer", "engine.args.device=cpu", f"engine.python='{odd}'")
    assert "not both installed" in doctor.said["sglang"].found
    bare = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    doctor = ask("producer", "engine.args.device=cpu", f"engine.python='{bare}'")
    assert "not both installed" in doctor.said["sglang"].found


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what nvidia-smi prints."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf 'GPU A\\nGPU B\\nGPU C\\nGPU D\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("replica", "visible", "says"),
    [
        (0, None, ("ok", "GPU A, GPU B")),
        (1, None, ("ok", "GPU C, GPU D")),
        (1, "2,3", ("FAIL", "2 visible, and this configuration is for number 2, 3")),
        (2, None, ("FAIL", "4 visible, and this configuration is for number 4, 5")),
        (0, "3,GPU-1b2c", ("ok", "GPU D, GPU-1b2c")),
        (0, "1,7,0", ("FAIL", "1 visible, and this configuration is for number 0, 1")),
    ],
)
def test_replica_that_there_are_no_gpus_for(
    ask: Callable[..., Doctor],
    tmp_path: Path,
    model: Path,
    four_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    replica: int,
    visible: str | None,
    says: tuple[str, str],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = PRODUCER.format(model=model).replace('name = "transformers"', 'name = "sglang"')
    (tmp_path / "producer.toml").write_text(text)
    doctor = ask("producer", "engine.tp_size=2", f"engine.replica={replica}")
    assert doctor.said["gpu"][:2] == says


def test_sglang_with_the_plugin(ask: Callable[..., Doctor], tmp_path: Path, model: Path) -> None:
    python = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
    if not python.exists():
        pytest.skip("no SGLang here: make sglang")
    text = PRODUCER.format(model=model).replace('name = "transformers"', 'name = "sglang"')
    (tmp_path / "producer.toml").write_text(text)
    said = ask("producer", "engine.args.device=cpu", f"engine.python='{python}'").said["sglang"]
    assert said.level == "ok"
    assert said.found.startswith("SGLang 0.5.23 with draftfeed ")


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        (["9.9.9", "0.1", [PLUGIN]], "warn", "SGLang 9.9.9 with draftfeed 0.1, "),
        (["0.5.23", "0.1", [PLUGIN]], "ok", "SGLang 0.5.23 with draftfeed 0.1, "),
        (["0.5.23", "0.1", []], "FAIL", "it does not know our plugin"),
    ],
)
def test_sglang_by_what_its_interpreter_says(
    ask: Callable[..., Doctor],
    tmp_path: Path,
    model: Path,
    answer: list[object],
    level: str,
    says: str,
) -> None:
    text = PRODUCER.format(model=model).replace('name = "transformers"', 'name = "sglang"')
    (tmp_path / "producer.toml").write_text(text)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    said = ask("producer", "engine.args.device=cpu", f"engine.python='{python}'").said["sglang"]
    assert said.level == level
    assert says in said.found


def test_too_few_files_may_be_open(tmp_path: Path) -> None:
    """A spool of many segments has each of them open."""
    done = subprocess.run(
        [sys.executable, "-m", "draftfeed_deploy.cli", "doctor"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "FAIL  open files: 256 open files at a time (ulimit -n), 1024 are needed" in done.stdout


@pytest.mark.parametrize(("forced", "level"), [("numpy", "warn"), ("avx1024", "FAIL")])
def test_codec_that_is_slow_or_unknown(forced: str, level: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftfeed_deploy.cli", "doctor"],
        env={**os.environ, VARIABLE: forced},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if "codec: " in line)
    assert lines[at].startswith(level)
    assert lines[at + 1].strip() == f"unset {VARIABLE}"


def test_producer_that_answers_and_one_that_does_not(
    ask: Callable[..., Doctor], silent: int, listener: int
) -> None:
    refusing, answering = f"tcp://127.0.0.1:{silent}", f"tcp://127.0.0.1:{listener}"
    doctor = ask("consumer", f"producer.addresses=['{refusing}', '{answering}']")
    assert doctor.code == 0
    assert doctor.said[refusing].level == "warn"
    assert doctor.said[refusing].found == "connection refused"
    assert doctor.said[answering] == Said("ok", "answers", "")
    assert {"memory", "trainer", "checkpoints", "keys"} <= set(doctor.said)


def test_name_that_means_something_only_inside_of_a_container(ask: Callable[..., Doctor]) -> None:
    address = "tcp://producer-0.invalid:5550"
    doctor = ask("consumer", f"producer.addresses=['{address}']", "producer.insecure=true")
    assert doctor.code == 1
    assert doctor.said[address].level == "FAIL"
    assert "containers" in doctor.said[address].found
    assert "getent hosts producer-0.invalid" in doctor.said[address].fix
    assert doctor.said["keys"].level == "warn"


@pytest.mark.parametrize(
    ("setting", "check", "says"),
    [
        ("trainer.function=not_there:train", "trainer", "No module named 'not_there'"),
        ("trainer.function=stub_trainer:gone", "trainer", "'stub_trainer' has no function 'gone'"),
        ("trainer.output_dir=prompts.jsonl", "checkpoints", "is a file, and no directory"),
        ("buffer.capacity_bytes=1_000_000_000_000_000", "memory", "buffer 1000.00 TB"),
        ("trainer.target=nowhere", "target", "nowhere/config.json cannot be read"),
    ],
)
def test_what_a_consumer_cannot_run_with(
    ask: Callable[..., Doctor], setting: str, check: str, says: str
) -> None:
    doctor = ask("consumer", setting)
    assert doctor.code == 1
    assert doctor.said[check].level == "FAIL"
    assert says in doctor.said[check].found


def test_buffer_that_fits_without_its_gaps_is_mentioned(ask: Callable[..., Doctor]) -> None:
    """The kernel ended a consumer whose buffer was as large as what was left."""
    capacity = round(available_bytes() * 0.85)
    doctor = ask("consumer", f"buffer.capacity_bytes={capacity}")
    assert doctor.said["memory"].level == "warn"
    assert "1.4 times as much" in doctor.said["memory"].found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-c", "gone.toml"], "cannot be read"),
        (["-c", "empty.toml"], "has neither [engine]"),
        (["--set", "a.b=1"], "needs -c"),
        (["--tokens-per-second", "0"], "must be above 0"),
        (["-c", "producer.toml", "--set", "spool.dri=x"], "did you mean 'dir'?"),
        (
            ["-c", "producer.toml", "--set", "server.bind='tcp://[::1]:99999'"],
            "is no port; they are 1 to 65535",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    ask: Callable[..., Doctor],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    Path("empty.toml").write_text("")
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("visible", ["-1", "NoDevFiles", "7", ""])
def test_gpus_that_are_hidden_are_none(
    ask: Callable[..., Doctor], four_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """By what CUDA makes of the variable. A word that it does not know counted as a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ask().said["gpu"] == Said("ok", "none, and none is needed", "")


@pytest.mark.parametrize(("state", "level"), [(0, "ok"), (5, "warn")])
def test_clock_that_nobody_keeps(tmp_path: Path, state: int, level: str) -> None:
    """By what adjtimex(2) answers; a library that is loaded before the C library's does."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    (tmp_path / "clock.c").write_text(f"int adjtimex(void *t) {{ return {state}; }}")
    library = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-o", library, tmp_path / "clock.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "draftfeed_deploy.cli", "doctor", "--json"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    (clock,) = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "clock"]
    assert clock["level"] == level


@pytest.fixture
def machine() -> Iterator[Callable[[str], str]]:
    """Runs commands of a shell in namespaces for mounts and the network, which are not ours."""
    if shutil.which("unshare") is None or os.getuid() != 0:
        pytest.skip("namespaces need root and util-linux")
    with subprocess.Popen(["unshare", "-mn", "sleep", "inf"]) as sleeper:
        enter = ["nsenter", "-t", str(sleeper.pid), "-m", "-n", "--wdns=."]

        def apart() -> bool:
            return os.readlink(f"/proc/{sleeper.pid}/ns/net") != os.readlink("/proc/self/ns/net")

        def run(command: str) -> str:
            done = subprocess.run([*enter, "sh", "-c", command], capture_output=True, text=True)
            assert done.returncode in (0, 1), done.stderr
            return done.stdout

        eventually(apart, "the namespaces")
        yield run
        sleeper.kill()


def test_limits_that_are_too_low_are_told_and_the_fix_mends_them(
    ask: Callable[..., Doctor], machine: Callable[[str], str], tmp_path: Path, model: Path
) -> None:
    text = PRODUCER.format(model=model).replace('name = "transformers"', 'name = "sglang"')
    (tmp_path / "producer.toml").write_text(text)
    machine("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    machine("echo 4096 8192 16384 > /proc/sys/net/ipv4/tcp_rmem")
    machine("echo 16 > /proc/sys/net/core/somaxconn")
    command = f"{sys.executable} -m draftfeed_deploy.cli doctor --json -c {tmp_path}/producer.toml"
    command += " --set engine.tp_size=2"

    def levels() -> dict[str, Said]:
        said = json.loads(machine(command))["findings"]
        return {one["check"]: Said(one["level"], one["found"], one.get("fix", "")) for one in said}

    before, checks = levels(), ("/dev/shm", "net.ipv4.tcp_rmem", "net.core.somaxconn")
    assert {check: before[check].level for check in checks} == dict.fromkeys(checks, "warn")
    assert before["net.ipv4.tcp_rmem"].found == "16384, below 4194304"
    for check in checks:
        machine(before[check].fix.rpartition("; ")[2])
    after = levels()
    assert {check: after[check].level for check in checks} == dict.fromkeys(checks, "ok")
