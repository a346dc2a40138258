"""The target's files on their way to a training node: resumed, cut, spoiled, lied about."""

import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

import tiny_models
from asset_peers import listed, lists, lying, serves, through_valve
from asset_targets import make_llama, make_plain, tensors
from draftfeed_consumer.assets import AssetsConfig, TargetDirectory
from draftfeed_consumer.assets_fetch import Fetched, fetch_target
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.errors import AssetError, AssetsLost, NoAssets, StreamClosed
from draftfeed_consumer.trainers.dflash import read_architecture
from draftfeed_consumer.trainers.target_weights import FrozenParts, frozen_parts
from draftfeed_deploy.keygen import write_pair
from draftfeed_proto import messages as m
from draftfeed_proto.assets import TARGET_MANIFEST
from draftfeed_proto.descriptor import Expectation
from draftfeed_proto.limits import MAX_ASSET_PIECE_BYTES
from harness import Producer, producing
from samples import DESCRIPTOR
from waiting import eventually

pytestmark = pytest.mark.timeout(120)
PIECE = MAX_ASSET_PIECE_BYTES
NOBODY = "tcp://127.0.0.1:1"
SMALL = {"config.json": b"{}", "model.safetensors": b"weights" * 100}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("target"))


@pytest.fixture
def producer(tmp_path: Path, target: Path) -> Iterator[Producer]:
    with producing(tmp_path / "spool", target=target) as made:
        yield made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fetch(
    cache: Path, *addresses: str, lost_after_seconds: float = 30.0, **options: Any
) -> Fetched:
    settings = {
        name: options.pop(name) for name in ("max_bytes", "stall_seconds") if name in options
    }
    return fetch_target(
        ClientConfig(addresses=addresses, lost_after_seconds=lost_after_seconds),
        AssetsConfig(cache_dir=cache, **settings),
        **options,
    )


def same_files(fetched: Fetched, target: Path) -> bool:
    got, own = tensors(fetched.directory.path), tensors(target)
    return all(torch.equal(got[name], own[name]) for name in own)


def frozen_of(directory: Path) -> FrozenParts:
    shape, _ = read_architecture(directory)
    return frozen_parts(directory, shape["hidden_size"], shape["vocab_size"], torch.bfloat16)


def part_of(cache: Path) -> Path | None:
    return next(cache.glob("*/model.safetensors.part"), None)


def part_bytes(cache: Path) -> int:
    part = part_of(cache)
    return part.stat().st_size if part else 0


@pytest.mark.parametrize(
    ("make", "model_type"),
    [
        (lambda path: make_llama(path, shards=True), "llama"),
        (lambda path: make_llama(path, tied=True), "llama"),
        (tiny_models.make_qwen35_multimodal, "qwen3_5"),
    ],
    ids=["in shards", "tied", "multimodal"],
)
def test_fetched_directory_is_one_that_trainers_load(
    make: Callable[[Path], Path], model_type: str, tmp_path: Path, cache: Path
) -> None:
    """As our trainers do, and by transformers."""
    target = make(tmp_path / "target")
    with producing(tmp_path / "spool", target=target) as made:
        fetched = fetch(cache, made.address)
    directory = fetched.directory.path
    assert fetched.stream_id == DESCRIPTOR.stream_id()
    frozen, own = frozen_of(directory), frozen_of(target)
    assert torch.equal(frozen.embed_tokens.weight, own.embed_tokens.weight)
    assert torch.equal(frozen.lm_head.weight, own.lm_head.weight)
    assert frozen.embed_tokens.weight.any()
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (directory, target)]
    one, other = (tokenizer("hello small fox")["input_ids"] for tokenizer in tokenizers)
    assert one == other
    assert AutoConfig.from_pretrained(directory).model_type == model_type


def test_what_is_there_does_not_travel_again(producer: Producer, target: Path, cache: Path) -> None:
    first, second = fetch(cache, producer.address), fetch(cache, producer.address)
    total = sum(file.bytes for file in first.directory.files)
    assert (first.fetched_bytes, second.fetched_bytes) == (total, 0)
    assert producer.server.statistics().asset_bytes == total
    assert same_files(second, target)
    assert not list(cache.glob("*/*.part"))


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - handed to the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_another_producer_goes_on_where_one_was_cut_off(
    producer: Producer, tmp_path: Path, target: Path, cache: Path
) -> None:
    with (
        producing(tmp_path / "spool2", target=target) as other,
        through_valve(producer.address, 2 * PIECE + PIECE // 2) as valve,
    ):
        thread, results = in_thread(lambda: fetch(cache, valve.address, other.address))
        eventually(lambda: part_bytes(cache) == 2 * PIECE, "two pieces are on the disk")
        valve.close()
        thread.join()
        (fetched,) = results
        assert isinstance(fetched, Fetched)
        assert same_files(fetched, target)
        total = sum(file.bytes for file in fetched.directory.files)
        assert fetched.fetched_bytes == total
        assert other.server.statistics().asset_bytes == total - 2 * PIECE - len_of_config(fetched)


def test_producer_that_is_named_first_is_asked_first_even_if_it_answers_last(cache: Path) -> None:
    """Where gigabytes come from is for the operator to say."""
    answers = [[m.encode(m.Refused(code="preparing", reason="the files are still being read"))]]
    files = lists(listed(SMALL))
    with (
        lying(lambda: answers.pop() if answers else files(), serves(SMALL)) as first,
        lying(files, serves(SMALL)) as second,
    ):
        fetch(cache, first.address, second.address)
    assert (first.asked, second.asked) == (len(SMALL), 0)


def len_of_config(fetched: Fetched) -> int:
    return next(file.bytes for file in fetched.directory.files if file.name == "config.json")


def test_producer_that_is_stopped_and_started_again_sends_what_was_missing(
    producer: Producer, target: Path, cache: Path
) -> None:
    with through_valve(producer.address, PIECE + PIECE // 2) as valve:
        thread, results = in_thread(lambda: fetch(cache, valve.address))
        eventually(lambda: part_bytes(cache) == PIECE, "one piece is on the disk")
        producer.restart()
        valve.open()
        thread.join()
    (fetched,) = results
    assert isinstance(fetched, Fetched)
    assert same_files(fetched, target)
    assert fetched.fetched_bytes == sum(file.bytes for file in fetched.directory.files)


def cut_off(producer: Producer, cache: Path) -> int:
    """A fetch that ends in the middle; how many bytes of the large file are there then."""
    stop = threading.Event()
    with through_valve(producer.address, 2 * PIECE + PIECE // 2) as valve:
        thread, results = in_thread(lambda: fetch(cache, valve.address, stopped=stop.is_set))
        eventually(lambda: part_bytes(cache) >= 2 * PIECE, "two pieces are on the disk")
        stop.set()
        thread.join()
    assert isinstance(results[0], StreamClosed)
    return part_bytes(cache)


def test_half_a_file_that_rotted_meanwhile_is_fetched_anew(
    producer: Producer, target: Path, cache: Path
) -> None:
    kept = cut_off(producer, cache)
    part = part_of(cache)
    assert part is not None
    with part.open("r+b") as file:
        file.seek(kept // 2)
        (byte,) = file.read(1)
        file.seek(kept // 2)
        file.write(bytes([byte ^ 1]))
    fetched = fetch(cache, producer.address)
    assert same_files(fetched, target)
    (size,) = (file.bytes for file in fetched.directory.files if "model" in file.name)
    assert fetched.fetched_bytes == size - kept + size


def test_half_a_file_that_is_longer_than_it_may_be_is_fetched_anew(
    producer: Producer, target: Path, cache: Path
) -> None:
    cut_off(producer, cache)
    part = part_of(cache)
    assert part is not None
    with part.open("ab") as file:
        file.truncate(1 << 30)
    assert same_files(fetch(cache, producer.address), target)


def flip_once(at: int) -> Callable[[bytes, int], bytes]:
    """One bit, of the byte that comes down as number `at`."""

    def corrupt(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        changed = bytearray(data)
        changed[at - before] ^= 1
        return bytes(changed)

    return corrupt


def test_byte_that_is_spoiled_on_the_way_is_noticed_and_fetched_again(
    producer: Producer, target: Path, cache: Path
) -> None:
    with through_valve(producer.address, corrupt=flip_once(2 * PIECE)) as valve:
        fetched = fetch(cache, valve.address)
    assert same_files(fetched, target)
    (size,) = (file.bytes for file in fetched.directory.files if "model" in file.name)
    assert fetched.fetched_bytes == 2 * size + len_of_config(fetched)


def test_fetch_through_a_damaged_cable_ends_with_one_line(producer: Producer, cache: Path) -> None:
    def spoil(data: bytes, before: int) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if len(data) == 1 << 16 else data

    with (
        through_valve(producer.address, corrupt=spoil) as valve,
        pytest.raises((AssetError, AssetsLost)) as caught,
    ):
        fetch(cache, valve.address, lost_after_seconds=5.0)
    assert "\n" not in str(caught.value)
    assert not list(cache.glob(f"*/{TARGET_MANIFEST}"))


def test_two_at_once_on_one_machine_fetch_once(producer: Producer, cache: Path) -> None:
    with through_valve(producer.address, PIECE + PIECE // 2) as valve:
        both = [in_thread(lambda: fetch(cache, valve.address)) for _ in range(2)]
        eventually(lambda: part_bytes(cache) == PIECE, "one of them has begun")
        valve.open()
        for thread, _ in both:
            thread.join()
    fetched = [results[0] for _, results in both]
    assert all(isinstance(one, Fetched) for one in fetched), fetched
    total = producer.server.statistics().asset_bytes
    assert sorted(one.fetched_bytes for one in fetched if isinstance(one, Fetched)) == [0, total]


def test_complete_directory_that_lost_a_file_is_mended(
    producer: Producer, target: Path, cache: Path
) -> None:
    first = fetch(cache, producer.address)
    (first.directory.path / "config.json").unlink()
    again = fetch(cache, producer.address)
    assert again.fetched_bytes == len_of_config(again)
    assert same_files(again, target)


# who serves what


def test_producers_of_different_targets_are_named(
    producer: Producer, tmp_path: Path, cache: Path
) -> None:
    other = make_plain(tmp_path / "other", seed=1)
    with producing(tmp_path / "spool2", target=other) as second:
        with pytest.raises(AssetError, match=r"different targets: model.safetensors differs"):
            fetch(cache, producer.address, second.address)
        assert not cache.exists()


def test_one_producer_that_serves_is_enough(
    producer: Producer, tmp_path: Path, target: Path, cache: Path
) -> None:
    with producing(tmp_path / "spool2") as without:
        fetched = fetch(cache, without.address, NOBODY, producer.address)
    assert same_files(fetched, target)


def test_producers_without_a_target_are_quoted(tmp_path: Path, cache: Path) -> None:
    with producing(tmp_path / "spool") as made, pytest.raises(NoAssets) as caught:
        fetch(cache, made.address)
    assert f"{made.address}: this producer has no target" in str(caught.value)
    assert "set [trainer] target" in str(caught.value)


def test_a_producer_of_an_older_version_is_told_from_one_that_is_down(cache: Path) -> None:
    refusal = m.encode(m.Refused(code="malformed", reason="Invalid value 'ListAssets'"))
    with (
        lying(lambda: [refusal]) as old,
        pytest.raises(NoAssets, match="it is of an older version"),
    ):
        fetch(cache, old.address)


def test_a_stream_that_is_not_the_expected_one_is_not_fetched_for(
    producer: Producer, cache: Path
) -> None:
    with pytest.raises(AssetError, match=r"\[expect\] stream_id is other"):
        fetch(cache, producer.address, expect=Expectation(stream_id="other"))


def test_producer_that_is_still_hashing_is_asked_again(cache: Path) -> None:
    answers = [m.encode(m.Refused(code="preparing", reason="the files are still being read"))]
    answers += lists(listed(SMALL))() or []

    def one_after_the_other() -> list[bytes]:
        return [answers.pop(0) if len(answers) > 1 else answers[0]]

    with lying(one_after_the_other, serves(SMALL)) as liar:
        fetched = fetch(cache, liar.address)
    assert (fetched.directory.path / "config.json").read_bytes() == SMALL["config.json"]


def test_files_go_to_those_whose_keys_are_known_and_to_nobody_else(
    tmp_path: Path, target: Path, cache: Path
) -> None:
    for name in ("producers", "known", "stranger"):
        write_pair(tmp_path / name)
    keys = {"key": tmp_path / "producers.secret", "clients": [tmp_path / "known.pub"]}
    with producing(tmp_path / "spool", target=target, **keys) as made:

        def fetch_as(name: str) -> Fetched:
            producer = ClientConfig(
                addresses=(made.address,),
                key=tmp_path / f"{name}.secret",
                server_key=tmp_path / "producers.pub",
            )
            return fetch_target(producer, AssetsConfig(cache_dir=cache), patience_seconds=1.0)

        with pytest.raises(AssetsLost, match="it does not know our key"):
            fetch_as("stranger")
        assert not cache.exists()
        assert same_files(fetch_as("known"), target)


# lies


def renamed(name: str) -> list[m.AssetFile]:
    return [*listed(SMALL), m.AssetFile(name=name, bytes=2, digest="0" * 64)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (renamed("../../.bashrc"), "is not the plain name"),
        (renamed("/etc/cron.d/x.json"), "is not the plain name"),
        (renamed("a/../../x.json"), "is not the plain name"),
        (renamed(".ssh.json"), "is not the plain name"),
        (renamed("model.py"), "is not the plain name"),
        (renamed("pytorch_model.bin"), "is not the plain name"),
        (renamed("\x1b[2J.json"), "is not the plain name"),
        (renamed("Config.json"), "twice, or a name of ours"),
        (renamed(TARGET_MANIFEST), "twice, or a name of ours"),
        (
            [*listed(SMALL), m.AssetFile(name="x.json", bytes=1, digest="../x")],
            "is not 64 hex digits",
        ),
        (
            [*listed(SMALL), m.AssetFile(name="x.json", bytes=2**62, digest="0" * 64)],
            r"max_bytes is 17179869184",
        ),
        (
            [m.AssetFile(name=f"{n}.json", bytes=1, digest="0" * 64) for n in range(65)],
            "65 of them",
        ),
        (listed({"model.safetensors": b"x"}), "there is no config.json"),
    ],
)
def test_a_listing_that_would_do_harm_is_refused_before_anything_is_written(
    files: list[m.AssetFile], words: str, cache: Path
) -> None:
    with lying(lists(files)) as liar, pytest.raises(AssetError, match=words) as caught:
        fetch(cache, liar.address)
    assert not cache.exists()
    assert liar.asked == 0
    assert str(caught.value).isprintable()


def piece(name: str, offset: int, data: bytes) -> list[bytes]:
    return [m.encode(m.AssetPiece(name=name, offset=offset)), data]


@pytest.mark.parametrize(
    "answer",
    [
        lambda asked: piece(asked.name, asked.offset, bytes(asked.bytes + 1)),
        lambda asked: piece(asked.name, asked.offset, bytes(asked.bytes - 1)),
        lambda asked: piece(asked.name, asked.offset, b""),
        lambda asked: piece(asked.name, asked.offset + 1, bytes(asked.bytes)),
        lambda asked: piece("model.safetensors", 0, bytes(5 << 20)),
        lambda asked: piece(asked.name, asked.offset, bytes(asked.bytes))[:1],
        lambda asked: [b"\xc1"],
        lambda asked: [m.encode(m.Refused(code="asset", reason="there is none"))],
    ],
    ids=["longer", "shorter", "empty", "elsewhere", "another", "no frame", "noise", "refused"],
)
def test_a_producer_that_sends_what_was_not_asked_is_given_up(
    answer: Callable[[m.FetchAsset], list[bytes]], cache: Path
) -> None:
    with (
        lying(lists(listed(SMALL)), answer) as liar,
        pytest.raises(AssetError, match=r"does not send the target's files") as caught,
    ):
        fetch(cache, liar.address)
    assert liar.address in str(caught.value)
    assert not list(cache.glob(f"*/{TARGET_MANIFEST}"))


def test_a_producer_that_sends_other_bytes_than_it_says_is_named(cache: Path) -> None:
    other = {name: data[::-1] for name, data in SMALL.items()}
    with (
        lying(lists(listed(SMALL)), serves(other)) as liar,
        pytest.raises(AssetError, match=r"config.json came twice with another SHA-256"),
    ):
        fetch(cache, liar.address)
    assert not list(cache.glob(f"*/{TARGET_MANIFEST}"))


def test_an_empty_file_needs_no_piece(cache: Path) -> None:
    contents = {**SMALL, "merges.txt": b""}
    with lying(lists(listed(contents)), serves(contents)) as liar:
        fetched = fetch(cache, liar.address)
    assert (fetched.directory.path / "merges.txt").read_bytes() == b""


# patience


def test_a_producer_that_falls_silent_is_named_with_what_is_missing(cache: Path) -> None:
    with lying(lists(listed(SMALL))) as liar, pytest.raises(AssetsLost) as caught:
        fetch(cache, liar.address, stall_seconds=0.2, lost_after_seconds=1.0)
    words = str(caught.value)
    assert liar.address in words
    assert "missing is config.json from byte 0 of 2 on" in words
    assert "nothing came for 0.2 s" in words


def test_a_producer_that_only_pings_is_silent(cache: Path) -> None:
    ping = m.encode(m.Ping(term=1, session="s"))
    with (
        lying(lists(listed(SMALL)), lambda _: [ping]) as liar,
        pytest.raises(AssetsLost),
    ):
        fetch(cache, liar.address, stall_seconds=0.2, lost_after_seconds=1.0)


def test_patience_with_producers_that_are_not_there_has_a_bound(cache: Path) -> None:
    with pytest.raises(AssetsLost, match="the list of them"):
        fetch(cache, NOBODY, patience_seconds=0.5)


def test_waiting_ends_when_it_is_told_to(cache: Path) -> None:
    stop = threading.Event()
    thread, results = in_thread(lambda: fetch(cache, NOBODY, stopped=stop.is_set))
    stop.set()
    thread.join()
    assert isinstance(results[0], StreamClosed)


# the disk


def test_a_full_disk_is_one_line_and_keeps_what_came(
    producer: Producer, target: Path, cache: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PIECE, hard))
    try:
        with pytest.raises(AssetError, match=r"cannot be written: .*still to come") as caught:
            fetch(cache, producer.address)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cache_dir" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert part_bytes(cache) == 2 * PIECE
    fetched = fetch(cache, producer.address)
    assert same_files(fetched, target)
    assert fetched.fetched_bytes < sum(file.bytes for file in fetched.directory.files)


def test_more_than_the_disk_has_is_refused_before_it_travels(cache: Path) -> None:
    files = [*listed(SMALL), m.AssetFile(name="x.json", bytes=1 << 55, digest="0" * 64)]
    with lying(lists(files)) as liar, pytest.raises(AssetError, match=r"bytes free"):
        fetch(cache, liar.address, max_bytes=1 << 60)
    assert liar.asked == 0


def test_a_cache_that_is_no_directory_is_one_line(producer: Producer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="cannot be written: Not a directory"):
        fetch(tmp_path / "file" / "cache", producer.address)


def test_a_manifest_that_is_damaged_does_not_pass_for_one(
    producer: Producer, target: Path, cache: Path
) -> None:
    first = fetch(cache, producer.address)
    (first.directory.path / TARGET_MANIFEST).write_text("{")
    assert not TargetDirectory(cache, first.directory.files).complete
    again = fetch(cache, producer.address)
    assert again.fetched_bytes == 0
    assert again.directory.complete
