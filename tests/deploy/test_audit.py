"""`draftfeed audit` on producers that run, on one that does not, and on a group of them."""

import argparse
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from rich.console import Console

from bare_member import BareMember
from draftfeed_deploy import audit
from draftfeed_deploy.accounts import Source, ask
from draftfeed_deploy.config import load
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.reckoning import judge, prompt_list
from draftfeed_producer import server
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SyntheticConfig
from draftfeed_producer.errors import SpoolError
from draftfeed_producer.service import ProducerService
from draftfeed_proto import messages as m
from draftfeed_proto.errors import ProtoError
from draftfeed_proto.ids import IdSet, SampleId
from waiting import eventually

TOML = """
[engine]
name = "synthetic"
samples = 12
shard_size = 4
num_layers = 8
hidden_size = 64
vocab_size = 512
prompt_tokens = 8
response_tokens = 24
[spool]
dir = "{directory}/spool{name}"
shards = "{shards}"
min_free_bytes = 0
[server]
bind = "ipc://{directory}/{name}.sock"
"""


def configured(directory: Path, name: str = "", shards: str = "") -> Path:
    path = directory / f"producer{name}.toml"
    path.write_text(TOML.format(directory=directory, name=name, shards=shards))
    return path


class Running:
    def __init__(self, path: Path, until: str = "delivering") -> None:
        self.config = load(path, ProducerConfig)
        self.service = ProducerService(self.config)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()
        eventually(lambda: self.service.statistics().phase == until, until)

    def ended(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.service.stop()
        self.ended()


@pytest.fixture
def start() -> Iterator[Any]:
    running: list[Running] = []

    def make(path: Path, **options: str) -> Running:
        running.append(Running(path, **options))
        return running[-1]

    yield make
    for one in running:
        one.close()


@pytest.fixture
def attach() -> Iterator[Any]:
    members: list[BareMember] = []

    def make(producer: Running) -> BareMember:
        members.append(BareMember(producer.config.server.bind))
        return members[-1]

    yield make
    for one in members:
        one.close()


def run(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    audit.add_command(parser.add_subparsers())
    arguments = parser.parse_args(["audit", *map(str, options)])
    return arguments.command(arguments, Console(stderr=True)), capsys.readouterr().out


def test_a_running_producer_says_where_every_prompt_is(
    tmp_path: Path, start: Any, attach: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configured(tmp_path)
    member = attach(start(path))
    member.open()
    received = list(member.receive(12))
    member.commit(received[:5])
    member.say(m.Reject, id=received[5], reason="test", state="tail")
    member.say(m.Reject, id=received[6], reason="test")
    member.say(m.Release, ids=[])
    eventually(lambda: len(member.inquire().terminal) == 2, "both rejections")
    code, out = run(capsys, "-c", path)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    for line in ("trained (committed) 5", "held by members 5", "rejected 1", "tail 1", "sum 12"):
        assert line in lines, out
    assert lines[-1] == "the sums agree with the prompt list"


def test_json_has_the_same_numbers(
    tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configured(tmp_path)
    start(path)
    code, out = run(capsys, "-c", path, "--json")
    (one,) = json.loads(out)["producers"]
    assert code == 0
    assert (one["running"], one["prompts"], one["deliverable"], one["sum"]) == (True, 12, 12, 12)


def test_a_producer_that_does_not_run_is_audited_from_its_spool(
    tmp_path: Path, start: Any, attach: Any, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    path = configured(tmp_path)
    producer = start(path)
    member = attach(producer)
    member.open()
    received = list(member.receive(12))
    member.commit(received[:5])
    producer.close()
    code, out = run(capsys, "-c", path, "--json", "--timeout", "0.2")
    (one,) = json.loads(out)["producers"]
    assert code == 0
    assert (one["running"], one["trained"], one["held"], one["deliverable"]) == (False, 5, None, 7)
    assert "nobody answers at ipc://" in caplog.text
    assert "unknown" in caplog.text


def test_without_producer_and_spool_there_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpoolError, match="is not a spool"):
        run(capsys, "-c", configured(tmp_path), "--timeout", "0.1")


def test_producer_that_refuses_to_say_is_quoted_and_does_not_pass_for_one_that_is_gone(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/producer.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask, address, 20)
            sender, _ = socket.recv_multipart()
            refused = m.Refused(code="malformed", reason="too long to be told")
            socket.send_multipart([sender, m.encode(refused)])
            with pytest.raises(ProtoError, match="refuses to say: too long to be told"):
                asking.result()


def test_what_is_no_address_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = configured(tmp_path)
    with pytest.raises(ConfigError, match="no address"):
        run(capsys, "-c", path, "--address", "tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="2 times for 1"):
        run(capsys, "-c", path, "--address", "tcp://a:1", "--address", "tcp://b:1")


def test_a_group_that_owns_every_shard_once_agrees(
    tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [configured(tmp_path, "a", "0"), configured(tmp_path, "b", "1-2")]
    for path in paths:
        start(path)
    code, out = run(capsys, "-c", paths[0], "-c", paths[1], "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["prompts"] for one in found["producers"]] == [4, 8]
    assert (found["overlapping"], found["unowned"]) == ([], [])


def test_shards_that_two_own_and_shards_that_nobody_owns_are_named(
    tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [configured(tmp_path, "a", "0"), configured(tmp_path, "b", "0-1")]
    for path in paths:
        start(path)
    code, out = run(capsys, "-c", paths[0], "-c", paths[1])
    assert code == 1
    assert "both own shards 0\n" in out
    assert "nobody owns shards 2 of" in out
    assert out.endswith("the sums DIFFER from the prompt list\n")


ARCHIVE = """
[archive]
roots = ["{directory}/archive"]
min_free_bytes = 0
"""
REPLAY = """
[engine]
name = "archive"
epochs = 3
[spool]
dir = "{directory}/replayed"
[server]
bind = "ipc://{directory}/replay.sock"
"""


@pytest.fixture
def archived(tmp_path: Path, start: Any, attach: Any) -> Path:
    """The directory of 12 samples that were made, trained and archived in the first epoch."""
    path = configured(tmp_path)
    path.write_text(
        path.read_text().replace(
            "[spool]", '[spool]\nretain = "archive"\nquota_bytes = 100_000_000'
        )
        + ARCHIVE.format(directory=tmp_path)
    )
    producer = start(path)
    member = attach(producer)
    member.open()
    member.commit(member.receive(12))
    member.until(m.AllTerminal)
    member.say(m.Bye)
    producer.ended()
    return tmp_path


def later_epochs(directory: Path) -> Path:
    """Of the same prompts, with the archive and without the spool."""
    path = configured(directory, "later")
    text = path.read_text().replace("samples = 12", "samples = 12\nepochs = 3")
    path.write_text(text + ARCHIVE.format(directory=directory))
    return path


def replay(directory: Path) -> Path:
    path = directory / "replay.toml"
    path.write_text((REPLAY + ARCHIVE).format(directory=directory))
    return path


@pytest.mark.parametrize("configure", [later_epochs, replay])
def test_what_an_archive_has_is_not_to_be_generated_whether_the_producer_runs_or_not(
    archived: Path,
    start: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    configure: Any,
) -> None:
    """It counted as such until it was offered, and in a stopped one all of it did."""
    monkeypatch.setattr(server, "RESTOCK_SAMPLES", 4)
    path = configure(archived)
    producer = start(path, until="generating")
    for running in (True, False):
        if not running:
            producer.close()
        code, out = run(capsys, "-c", path, "--json", "--timeout", "0.2" if not running else "20")
        (one,) = json.loads(out)["producers"]
        assert code == 0
        assert (one["running"], one["prompts"], one["deliverable"]) == (running, 36, 36)
        assert one["to_be_generated"] == 0


def test_lost_segments_and_roots_that_are_not_mounted_are_to_be_generated(
    archived: Path, start: Any, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    path = later_epochs(archived)
    start(path, until="generating").close()

    def audited() -> tuple[int, int]:
        code, out = run(capsys, "-c", path, "--json", "--timeout", "0.2")
        (one,) = json.loads(out)["producers"]
        assert code == 0
        return one["deliverable"], one["to_be_generated"]

    assert audited() == (36, 0)
    (archived / "archive").rename(archived / "elsewhere")
    assert audited() == (0, 36)
    assert "archive is no archive: not mounted, or not begun; nothing there counts" in caplog.text
    (archived / "elsewhere").rename(archived / "archive")
    for segment in (archived / "archive").glob("*.seg"):
        segment.unlink()
    assert audited() == (0, 36)


def test_archive_of_another_stream_is_refused_by_an_audit(
    archived: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = later_epochs(archived)
    start(path, until="generating").close()
    contents = archived / "archive" / "archive.json"
    contents.write_text(contents.read_text().replace('"hidden_size": 64', '"hidden_size": 32'))
    with pytest.raises(SpoolError, match="is of another stream"):
        run(capsys, "-c", path, "--timeout", "0.2")


ENGINE = msgspec.structs.replace(SyntheticConfig(), samples=12, shard_size=4)
CONFIG = msgspec.convert(
    {"engine": {"name": "synthetic", "samples": 12, "shard_size": 4}, "spool": {"dir": "x"}},
    ProducerConfig,
    dec_hook=lambda kind, value: kind(value),
)
ALL = list(prompt_list(CONFIG).ids)


def account(**places: list[SampleId]) -> Source:
    wire = {"committed": [], "leased": [], "deliverable": [], "pending": []}
    wire |= {place: IdSet(ids).to_wire() for place, ids in places.items()}
    return Source(m.Account(shards=ENGINE.shards, terminal={}, **wire), "test", True)  # type: ignore[arg-type]


def test_a_prompt_that_is_nowhere_is_named() -> None:
    found = judge("p", prompt_list(CONFIG), account(committed=ALL[:7], pending=ALL[8:]))
    assert not found.agrees
    assert (found.missing.count, found.missing.first) == (1, [str(ALL[7])])
    assert (found.sum, found.extra.count, found.twice.count) == (11, 0, 0)


def test_a_prompt_in_two_places_is_named() -> None:
    found = judge("p", prompt_list(CONFIG), account(committed=ALL[:8], pending=ALL[7:]))
    assert not found.agrees
    assert (found.twice.count, found.twice.first) == (1, [str(ALL[7])])


def test_samples_of_another_prompt_file_are_named() -> None:
    other = SampleId("f" * 16, 0, 0, 3)
    found = judge("p", prompt_list(CONFIG), account(committed=ALL, leased=[other]))
    assert not found.agrees
    assert found.extra.first == [str(other)]
    many = judge("p", prompt_list(CONFIG), account())
    assert (many.missing.count, len(many.missing.first)) == (12, 5)
    assert str(many.missing).endswith(", ...)")


def test_the_prompt_list_is_read_from_the_file_itself(tmp_path: Path) -> None:
    """The last line has no newline and counts; a line that is no prompt has an id as well."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\nbroken\n{"prompt": "c"}')
    table: dict[str, Any] = {
        "engine": {"name": "transformers"},
        "target": {"path": "unused"},
        "prompts": {"path": str(path), "shard_size": 2, "epoch": 3},
        "spool": {"dir": "x"},
    }
    config = msgspec.convert(table, ProducerConfig, dec_hook=lambda kind, value: kind(value))
    prompts = prompt_list(config)
    assert [str(id)[16:] for id in prompts.ids] == ["/3/0/0", "/3/0/1", "/3/1/2"]
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        prompt_list(config)
