"""A training node that has an address and nothing else: fetch, train, be killed, take over."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asset_peers import through_valve
from asset_targets import HIDDEN, LAYERS, VOCAB, make_llama, make_plain
from draftfeed_consumer.errors import Fenced
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_proto.limits import MAX_ASSET_PIECE_BYTES
from harness import consuming, producing
from waiting import eventually

pytestmark = pytest.mark.timeout(300)
PIECE = MAX_ASSET_PIECE_BYTES
PROMPTS = 6
PRODUCER = """
[engine]
name = "transformers"
dtype = "float32"
threads = 1
sampling = {{ max_new_tokens = 24, temperature = 1.0 }}
[target]
path = "target"
layer_ids = [0, 1]
[prompts]
path = "prompts.jsonl"
[spool]
dir = "spool"
[server]
bind = "{address}"
"""
SPECFORGE = """
[producer]
addresses = ["{address}"]
[buffer]
capacity_bytes = 4_000_000
window_samples = 2
[trainer]
kind = "specforge"
output_dir = "out"
options = {{ mask_token_id = 1, num_anchors = 4, block_size = 4 }}
"""
STUB = """
[producer]
addresses = ["{address}"]
[buffer]
capacity_bytes = 4_000_000
window_samples = 2
[trainer]
function = "stub_trainer:train"
output_dir = "out"
"""

Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("target"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """A process in the test's directory, with an empty cache of its own."""
    with ExitStack() as stack:

        def make(*command: object) -> Process:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "XDG_CACHE_HOME": str(tmp_path / "cache"),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                stack.callback(pipe.close)
            return process

        yield make


DRAFTFEED = Path(sys.executable).with_name("draftfeed")


def ended(process: Process) -> tuple[int, str]:
    output, _ = process.communicate(timeout=150)
    return process.returncode, output


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def part_bytes(tmp_path: Path) -> int:
    parts = list(tmp_path.glob("cache/draftfeed/targets/*/model.safetensors.part"))
    return parts[0].stat().st_size if parts else 0


def figures(output: str) -> dict[str, str]:
    """What `draftfeed target fetch` printed, by its first word."""
    pairs = [line.split(maxsplit=1) for line in output.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_an_address_is_all_that_a_new_node_needs_to_train(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    make_llama(tmp_path / "target", shards=True)
    prompts = [json.dumps({"prompt_ids": [5 + k, 7, 9, 11, 30 + k]}) for k in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    address = free_address()
    (tmp_path / "producer.toml").write_text(PRODUCER.format(address=address))
    (tmp_path / "consumer.toml").write_text(SPECFORGE.format(address=address))
    producer = start(DRAFTFEED, "producer", "-c", "producer.toml")
    code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml", "--run-dir", "run"))
    assert code == 0, output
    assert ended(producer)[0] == 0
    assert latest_checkpoint(tmp_path / "out") is not None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCAB)
    assert config["num_target_layers"] == LAYERS
    (directory,) = (tmp_path / "cache" / "draftfeed" / "targets").glob("[0-9a-f]*")
    assert not list(directory.glob("*.part"))
    assert str(directory) in output


def test_init_from_the_targets_blocks_is_refused_without_a_producer(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    (tmp_path / "consumer.toml").write_text(SPECFORGE.format(address=free_address()))
    override = ("--set", "trainer.options.init=target")
    code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml", *override))
    assert code == 2
    assert 'draftfeed: [trainer] options.init = "target" copies blocks of the target' in output


def test_a_specforge_consumer_of_a_producer_without_target_ends_at_once(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    with producing(tmp_path / "spool") as made:
        (tmp_path / "consumer.toml").write_text(SPECFORGE.format(address=made.address))
        code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml"))
        assert made.server.statistics().term == 0, "the stream was taken"
    assert code == 2
    assert "set [trainer] target" in output


def test_node_that_is_killed_while_it_fetches_goes_on_from_there(
    tmp_path: Path, target: Path, start: Callable[..., Process]
) -> None:
    command = (DRAFTFEED, "target", "fetch", "-c", "consumer.toml")
    with (
        producing(tmp_path / "spool", target=target) as made,
        through_valve(made.address, 2 * PIECE + PIECE // 2) as valve,
    ):
        (tmp_path / "consumer.toml").write_text(STUB.format(address=valve.address))
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
    tmp_path: Path, target: Path, start: Callable[..., Process]
) -> None:
    def producer(bind: str) -> tuple[Process, str]:
        program = Path(__file__).with_name("asset_producer_child.py")
        process = start(sys.executable, program, tmp_path / "spool", target, bind)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    first, address = producer("tcp://127.0.0.1:*")
    with through_valve(address, 2 * PIECE + PIECE // 2) as valve:
        (tmp_path / "consumer.toml").write_text(STUB.format(address=valve.address))
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


def test_two_processes_at_once_fetch_once(
    tmp_path: Path, target: Path, start: Callable[..., Process]
) -> None:
    with producing(tmp_path / "spool", target=target) as made:
        (tmp_path / "consumer.toml").write_text(STUB.format(address=made.address))
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
    start: Callable[..., Process],
) -> None:
    with (
        producing(tmp_path / "spool", target=target) as made,
        through_valve(made.address, PIECE + PIECE // 2) as valve,
    ):
        (tmp_path / "consumer.toml").write_text(STUB.format(address=valve.address))
        process = start(DRAFTFEED, *command, "-c", "consumer.toml")
        eventually(lambda: part_bytes(tmp_path) == PIECE, "one piece is on the disk")
        process.send_signal(kind)
        found, output = ended(process)
        assert (found, words in output) == (code, True), output
        assert made.server.statistics().term == 0, "the stream was taken"
    assert part_bytes(tmp_path) == PIECE


def test_a_takeover_begins_when_everything_is_there_and_training_goes_on_meanwhile(
    tmp_path: Path, target: Path, start: Callable[..., Process]
) -> None:
    """Symptom: the stream stands still while gigabytes travel to the new node."""
    with (
        producing(tmp_path / "spool", target=target) as made,
        through_valve(made.address, PIECE + PIECE // 2) as valve,
        consuming(made.address) as old,
    ):
        made.generate(range(3))
        samples = iter(old)
        trained = [next(samples)["id"]]
        old.trained(trained, step=1)
        (tmp_path / "consumer.toml").write_text(STUB.format(address=valve.address))
        new = start(DRAFTFEED, "consumer", "-c", "consumer.toml", "--takeover")
        eventually(lambda: part_bytes(tmp_path) == PIECE, "the new node is in the middle of it")
        made.generate(range(3, 6))
        while len(trained) < 6:
            trained.append(next(samples)["id"])
            old.trained(trained[-1:], step=len(trained))
        valve.open()
        with pytest.raises(Fenced):
            next(samples)
        made.server.finish()
        code, output = ended(new)
    assert code == 0, output
    assert (tmp_path / "out").is_dir()
    checkpoints = sorted((tmp_path / "out").glob("checkpoint-*.json"))
    counts = json.loads(checkpoints[-1].read_text())["counts"]
    assert sorted(counts) == sorted(map(str, trained))


def test_node_whose_producer_serves_another_stream_by_then_takes_nothing(
    tmp_path: Path, target: Path, start: Callable[..., Process]
) -> None:
    """The files of one target must never meet the states of another."""
    with producing(tmp_path / "spool", target=target) as made:
        (tmp_path / "consumer.toml").write_text(STUB.format(address=made.address))
        override = ("--set", "expect.stream_id=00000000000000000000000000000000")
        code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml", *override))
        assert made.server.statistics().term == 0, "the stream was taken"
    assert code == 2
    assert "[expect] stream_id is 00000000000000000000000000000000, and tcp://" in output
