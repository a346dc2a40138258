"""A training node that has an address and nothing else: it fetches, trains, takes over."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from asset_nodes import CONSUMER, DRAFTFEED, Start, ended, part_bytes, processes_in
from asset_peers import through_valve
from asset_targets import HIDDEN, LAYERS, VOCAB, make_llama, make_plain
from draftfeed_consumer.errors import Fenced
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_proto.assets import TARGET_MANIFEST
from draftfeed_proto.limits import MAX_ASSET_PIECE_BYTES
from harness import consuming, producing
from ports import held_port
from samples import DESCRIPTOR
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
same_host = false
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("target"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with processes_in(tmp_path) as starting:
        yield starting


@pytest.fixture
def address() -> Iterator[str]:
    with held_port() as number:
        yield f"tcp://127.0.0.1:{number}"


def test_an_address_is_all_that_a_new_node_needs_to_train(
    tmp_path: Path, start: Start, address: str
) -> None:
    make_llama(tmp_path / "target", shards=True)
    prompts = [json.dumps({"prompt_ids": [5 + k, 7, 9, 11, 30 + k]}) for k in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
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
    tmp_path: Path, start: Start, address: str
) -> None:
    (tmp_path / "consumer.toml").write_text(SPECFORGE.format(address=address))
    override = ("--set", "trainer.options.init=target")
    code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml", *override))
    assert code == 2
    assert 'draftfeed: [trainer] options.init = "target" copies blocks of the target' in output


def test_a_specforge_consumer_of_a_producer_without_target_ends_at_once(
    tmp_path: Path, start: Start
) -> None:
    with producing(tmp_path / "spool") as made:
        (tmp_path / "consumer.toml").write_text(SPECFORGE.format(address=made.address))
        code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml"))
        assert made.server.statistics().term == 0, "the stream was taken"
    assert code == 2
    assert "set [trainer] target" in output


def test_a_takeover_begins_when_everything_is_there_and_training_goes_on_meanwhile(
    tmp_path: Path, target: Path, start: Start
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
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=valve.address))
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


def test_ranks_of_one_machine_fetch_once_and_get_the_same(
    tmp_path: Path, target: Path, start: Start
) -> None:
    torchrun = (DRAFTFEED.with_name("torchrun"), "--standalone", "--nproc-per-node", 2)
    with producing(tmp_path / "spool", target=target) as made:
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=made.address))
        function = ("--set", "trainer.function=target_trainer:train")
        consumer = (DRAFTFEED, "consumer", "-c", "consumer.toml", *function)
        code, output = ended(start(*torchrun, "--no-python", *consumer))
        assert code == 0, output
        sent = made.server.statistics().asset_bytes
    told = [json.loads((tmp_path / "out" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1]
    assert told[0]["partial"]
    assert told[0]["files"] == ["config.json", TARGET_MANIFEST, "model.safetensors"]
    directory = Path(told[0]["target"])
    fetched = [path for path in directory.iterdir() if path.name != TARGET_MANIFEST]
    assert sent == sum(path.stat().st_size for path in fetched)


def test_a_stream_that_is_not_that_of_the_files_is_never_taken(
    tmp_path: Path, target: Path, start: Start
) -> None:
    """Symptom: a producer that was restarted with another target while its files travelled."""
    own, other = DESCRIPTOR.stream_id().encode(), b"f" * 32
    with (
        producing(tmp_path / "spool", target=target) as made,
        through_valve(made.address, corrupt=lambda data, _: data.replace(own, other)) as valve,
    ):
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=valve.address))
        code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml"))
        assert made.server.statistics().term == 0, "the stream was taken"
    assert code == 2, output
    assert f"stream_id: the consumer expects {other.decode()!r}" in output


def test_node_that_expects_another_stream_fetches_and_takes_nothing(
    tmp_path: Path, target: Path, start: Start
) -> None:
    """The files of one target must never meet the states of another."""
    with producing(tmp_path / "spool", target=target) as made:
        (tmp_path / "consumer.toml").write_text(CONSUMER.format(address=made.address))
        override = ("--set", "expect.stream_id=00000000000000000000000000000000")
        code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml", *override))
        assert made.server.statistics().term == 0, "the stream was taken"
    assert code == 2
    assert "[expect] stream_id is 00000000000000000000000000000000, and tcp://" in output
