"""A fetch of the target's files in which one side is killed, told to end, or not alone."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asset_nodes import CONSUMER, DRAFTFEED, Process, Start, ended, part_bytes, processes_in
from asset_peers import through_valve
from asset_targets import make_plain
from draftfeed_proto.limits import MAX_ASSET_PIECE_BYTES
from harness import producing
from waiting import eventually

pytestmark = pytest.mark.timeout(300)
PIECE = MAX_ASSET_PIECE_BYTES


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("target"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with processes_in(tmp_path) as starting:
        yield starting


def figures(output: str) -> dict[str, str]:
    """What `draftfeed target fetch` printed, by its first word."""
    pairs = [line.split(maxsplit=1) for line in output.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_node_that_is_killed_while_it_fetches_goes_on_from_there(
    tmp_path: Path, target: Path, start: Start
) -> None:
    command = (DRAFTFEED, "target", "fetch", "-c", "consumer.toml")
    with (
        producing(tmp_path / "spool", target=target) as made,
        through_valve(made.address, 2 * PIECE + PIECE // 2) as valve,
    ):
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=valve.address))
        killed = start(*command)
        eventually(lambda: part_bytes(tmp_path) == 2 * PIECE, "two pieces are on the disk")
        killed.kill()
        ended(killed)
        assert part_bytes(tmp_path) == 2 * PIECE
        valve.open()
        code, output = ended(start(*command))
        assert code == 0, output
        told = figures(output)
        total = sum(path.stat().st_size for path in target.iterdir())
        config = (target / "config.json").stat().st_size
        size = sum(path.stat().st_size for path in Path(told["directory"]).glob("*"))
        assert size > total - 1000
        (weights,) = Path(told["directory"]).glob("*.safetensors")
        # The small file had come whole.
        assert f"{weights.stat().st_size - 2 * PIECE:,} bytes" in told["fetched"]
        assert f"2, {weights.stat().st_size + config:,} bytes" in told["files"]
        code, output = ended(start(*command))
        assert figures(output)["fetched"] == "nothing, all was there"


def test_producer_that_is_killed_and_started_again_sends_only_what_is_missing(
    tmp_path: Path, target: Path, start: Start
) -> None:
    def producer(bind: str) -> tuple[Process, str]:
        program = Path(__file__).with_name("asset_producer_child.py")
        process = start(sys.executable, program, tmp_path / "spool", target, bind)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    first, address = producer("tcp://127.0.0.1:*")
    with through_valve(address, 2 * PIECE + PIECE // 2) as valve:
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=valve.address))
        fetching = start(DRAFTFEED, "target", "fetch", "-c", "consumer.toml")
        eventually(lambda: part_bytes(tmp_path) == 2 * PIECE, "two pieces are on the disk")
        first.kill()
        ended(first)
        valve.open()
        second, _ = producer(address)
        code, output = ended(fetching)
        assert code == 0, output
        weights = next(Path(figures(output)["directory"]).glob("*.safetensors"))
        sent = int(second.communicate("", timeout=60)[0])
        # Less if the half piece on the way was whole by then.
        assert 0 < sent <= weights.stat().st_size - 2 * PIECE


def test_two_processes_at_once_fetch_once(tmp_path: Path, target: Path, start: Start) -> None:
    with producing(tmp_path / "spool", target=target) as made:
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=made.address))
        both = [start(DRAFTFEED, "target", "fetch", "-c", "consumer.toml") for _ in range(2)]
        outputs = [ended(process) for process in both]
        assert [code for code, _ in outputs] == [0, 0], outputs
        travelled = made.server.statistics().asset_bytes
    told = [figures(output) for _, output in outputs]
    assert told[0]["directory"] == told[1]["directory"]
    sizes = [path.stat().st_size for path in Path(told[0]["directory"]).glob("[cm]*")]
    assert travelled == sum(sizes)


@pytest.mark.parametrize(
    ("command", "kind", "code", "words"),
    [
        (("consumer",), signal.SIGTERM, 0, "stopped before any producer had granted the stream"),
        (("target", "fetch"), signal.SIGINT, 130, "draftfeed: interrupted"),
    ],
)
def test_a_fetch_ends_when_it_is_told_to_and_keeps_what_it_has(
    command: tuple[str, ...],
    kind: signal.Signals,
    code: int,
    words: str,
    tmp_path: Path,
    target: Path,
    start: Start,
) -> None:
    with (
        producing(tmp_path / "spool", target=target) as made,
        through_valve(made.address, PIECE + PIECE // 2) as valve,
    ):
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=valve.address))
        process = start(DRAFTFEED, *command, "-c", "consumer.toml")
        eventually(lambda: part_bytes(tmp_path) == PIECE, "one piece is on the disk")
        process.send_signal(kind)
        found, output = ended(process)
        assert (found, words in output) == (code, True), output
        assert made.server.statistics().term == 0, "the stream was taken"
    assert part_bytes(tmp_path) == PIECE
