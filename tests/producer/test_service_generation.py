"""Which samples a producer generates, and when: the real service, its spool and its socket."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bare_member import BareMember
from draftfeed_deploy.accounts import read_spool
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import (
    CaptureConfig,
    SamplingConfig,
    SGLangConfig,
    SyntheticConfig,
    TransformersConfig,
)
from draftfeed_producer.engines.synthetic import synthetic_ids
from draftfeed_producer.errors import ProducerError
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import PromptsConfig
from draftfeed_producer.service import ProducerService
from draftfeed_producer.spool import Spool, SpoolConfig, SpoolStatistics
from draftfeed_producer.spool.control import Owned
from draftfeed_producer.spool.control_log import ControlLog
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.target import TargetConfig
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId, Shards
from draftfeed_proto.sample import Sample, decoded_bytes
from standin_engine import LAYER_IDS, Standin
from waiting import eventually

ENGINE = SyntheticConfig(
    samples=12,
    shard_size=4,
    num_layers=8,
    hidden_size=64,
    vocab_size=512,
    prompt_tokens=8,
    response_tokens=24,
    max_tokens=200,
)
ALL = list(synthetic_ids(ENGINE))


class Running:
    """A service in a thread of its own."""

    def __init__(self, directory: Path, config: dict[str, Any], **spool: Any) -> None:
        self.directory = directory
        options = {"min_free_bytes": 0, **spool}
        self.config = ProducerConfig(
            **{"engine": ENGINE, **config},
            spool=SpoolConfig(dir=directory, **options),
            server=ServerConfig(bind=f"ipc://{directory}.sock"),
        )
        self.address = self.config.server.bind
        self.generated: list[SampleId] = []
        self.service = ProducerService(self.config, self._observe)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _observe(self, sample: Sample) -> None:
        self.generated.append(sample.id)

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    @property
    def spool(self) -> SpoolStatistics:
        eventually(lambda: self.service.statistics().spool is not None, "the spool")
        spool = self.service.statistics().spool
        assert spool is not None
        return spool

    def ended(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        assert self.failure is None

    def close(self) -> None:
        self.service.stop()
        self.ended()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    started: list[Running] = []

    def start(config: dict[str, Any] | None = None, **spool: Any) -> Running:
        started.append(Running(tmp_path / "spool", config or {}, **spool))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def attach() -> Iterator[Any]:
    members: list[BareMember] = []

    def make(producer: Running, term: int = 1) -> BareMember:
        members.append(BareMember(producer.address, term))
        return members[-1]

    yield make
    for one in members:
        one.close()


def finish(member: BareMember, producer: Running, trained: list[SampleId]) -> None:
    member.commit(trained)
    member.until(m.AllTerminal)
    member.say(m.Bye)
    producer.ended()


def test_a_producer_generates_the_shards_it_owns_and_no_others(run: Any, attach: Any) -> None:
    producer = run(shards="0,2")
    member = attach(producer)
    member.open()
    received = member.receive(8)
    assert sorted(received) == [id for id in ALL if id.shard != 1]
    assert member.granted.shards.ranges == (0, 1, 2, 3)
    finish(member, producer, received)
    statistics = producer.service.statistics()
    assert (statistics.phase, statistics.prompts, statistics.samples) == ("done", 8, 8)


def test_the_largest_sample_is_announced(run: Any, attach: Any) -> None:
    largest = attach(run()).granted.max_sample_bytes
    assert largest == decoded_bytes(ENGINE.max_tokens - 1, 5, ENGINE.hidden_size)


def test_a_sample_damaged_on_disk_is_generated_again_after_the_end_of_the_list(
    run: Any, attach: Any
) -> None:
    producer = run()
    member = attach(producer)
    member.open()
    received = list(member.receive(12))
    bad = received[5]
    damage(producer.directory, received.index(bad))
    member.say(m.Nack, id=bad, reason="checksum")
    assert member.receive(13)[-1] == bad
    assert producer.generated.count(bad) == 2
    assert producer.spool.regenerated == 1
    finish(member, producer, received)


def damage(directory: Path, place: int) -> None:
    """Flip a byte in the middle of the sample at this place of the only segment."""
    path = directory / "00000001.seg"
    data = bytearray(path.read_bytes())
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"DFC1"]
    data[starts[2 * place + 1] + 60] ^= 1
    with path.open("r+b") as file:  # the producer has it open
        file.write(data)


def test_samples_that_a_rollback_finds_deleted_are_generated_again(run: Any, attach: Any) -> None:
    producer = run(segment_bytes=1, keep_checkpoints=1)
    first = attach(producer)
    first.open()
    received = list(first.receive(12))
    first.commit(received[:11])
    first.say(m.Bye)
    second = attach(producer, term=2)
    second.open(rollback="regenerate")
    assert sorted(second.receive(12)) == ALL
    assert len(producer.generated) > 12
    assert producer.spool.regenerated == len(producer.generated) - 12
    finish(second, producer, ALL)


def test_what_a_lost_spool_had_is_generated_when_the_trainer_has_said_what_it_trained(
    run: Any, attach: Any, tmp_path: Path
) -> None:
    lose(tmp_path / "spool", shard=1)
    producer = run()
    eventually(lambda: len(producer.generated) == 8, "the shards that are not lost")
    member = attach(producer)
    assert len(producer.generated) == 8, "nobody has said yet what of the lost shard is trained"
    trained = [ALL[4], ALL[6]]
    member.open(trained)
    assert sorted(member.receive(10)) == [id for id in ALL if id not in trained]
    assert sorted(producer.generated[8:]) == [ALL[5], ALL[7]]
    assert producer.spool.regenerated == 2
    assert IdSet.from_wire(member.inquire().regenerated) == IdSet([ALL[5], ALL[7]])
    finish(member, producer, ALL)
    owned = Reader(tmp_path / "spool").control.owned
    assert owned is not None
    assert owned.lost.ranges == (), "nobody has to be asked again"


def lose(directory: Path, shard: int) -> None:
    """A spool that took over a shard of one that is gone."""
    Spool(SpoolConfig(dir=directory), ENGINE.descriptor(), ENGINE.shards).close()
    log = ControlLog(directory / "control.log", 2)
    lost = Shards(ENGINE.dataset, 0, (shard, shard + 1))
    log.append(Owned(ENGINE.shards, lost))
    log.close()


def test_a_full_spool_pauses_generation_and_says_so_once(
    run: Any, attach: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    producer = run(quota_bytes=40_000, segment_bytes=1, keep_checkpoints=1)
    eventually(lambda: producer.spool.alarm != "", "an alarm")
    member = attach(producer)
    member.open()
    received: list[SampleId] = []
    while len(received) < 11:
        received = list(member.receive(len(received) + 1))
        member.commit(received)
    received = list(member.receive(12))
    finish(member, producer, received)
    said = [record.getMessage() for record in caplog.records if "admission" in record.name]
    paused = [line for line in said if line.startswith("generation is paused: ")]
    resumed = [line for line in said if line.startswith("generation goes on: ")]
    assert paused
    assert "quota_bytes is 40000" in paused[0]
    assert "of 40000 bytes" in resumed[0]
    # The last sample may fill it, and nothing is to go on then.
    assert len(paused) - len(resumed) in (0, 1), said
    assert producer.service.statistics().spool_full_seconds > 0
    assert sorted(producer.generated) == ALL
    assert producer.spool.alarm == ""


def test_a_restarted_producer_generates_only_what_is_not_finished(run: Any, attach: Any) -> None:
    first = run()
    eventually(lambda: len(first.generated) == 12, "all samples")
    member = attach(first)
    member.open()
    received = list(member.receive(12))
    member.commit(received[:3])
    first.close()
    second = run()
    member = attach(second, term=2)
    member.open(received[:3])
    assert sorted(member.receive(9)) == sorted(received[3:])
    assert second.generated == []
    finish(member, second, received)


def test_statistics_are_there_before_anything_is_loaded(tmp_path: Path) -> None:
    config = ProducerConfig(engine=ENGINE, spool=SpoolConfig(dir=tmp_path))
    statistics = ProducerService(config).statistics()
    assert (statistics.phase, statistics.prompts, statistics.spool) == ("loading", 0, None)


def test_ids_of_all_prompts_are_accounted_for(run: Any, attach: Any) -> None:
    producer = run(shards="1-2")
    member = attach(producer)
    member.open()
    member.receive(8)
    account = member.inquire()
    places = [account.committed, account.leased, account.deliverable, account.pending]
    ids = IdSet()
    for place in places:
        ids.update(IdSet.from_wire(place))
    assert ids == IdSet(ALL[4:])


def test_a_model_generates_again_too_and_lines_that_are_no_prompts_are_named(
    run: Any, attach: Any, tmp_path: Path, tiny_qwen3: Path
) -> None:
    lines = [json.dumps({"prompt": f"number {ordinal}"}) for ordinal in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join([*lines[:2], "broken", *lines[2:]]))
    sampling = SamplingConfig(max_new_tokens=5)
    producer = run(
        {
            "engine": TransformersConfig(batch_size=3, dtype="float32", sampling=sampling),
            "target": TargetConfig(path=str(tiny_qwen3), layer_ids=(0, 1)),
            "prompts": PromptsConfig(
                path=str(tmp_path / "p.jsonl"), skip_bad=True, shard_size=2, max_prompt_tokens=20
            ),
        },
        shards="1-2",
    )
    member = attach(producer)
    descriptor = member.granted.descriptor
    assert member.granted.max_sample_bytes == decoded_bytes(24, 2, descriptor.hidden_size)
    member.open()
    received = list(member.receive(2))
    assert sorted(id.ordinal for id in received) == [3, 4]
    damage(producer.directory, 0)
    member.say(m.Nack, id=received[0], reason="checksum")
    assert member.receive(3)[-1] == received[0]
    (skipped,) = IdSet.from_wire(member.inquire().skipped)
    assert skipped.ordinal == 2
    finish(member, producer, received)


def model_config(directory: Path, model: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    (directory / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sampling = SamplingConfig(max_new_tokens=500)
    return {
        "engine": TransformersConfig(batch_size=3, dtype="float32", sampling=sampling),
        "target": TargetConfig(path=str(model), layer_ids=(0, 1)),
        "prompts": PromptsConfig(path=str(directory / "p.jsonl"), max_prompt_tokens=20),
    }


def test_responses_that_are_there_are_served_as_samples(
    run: Any, attach: Any, tmp_path: Path, tiny_qwen3: Path
) -> None:
    """What is still to be generated has no room in a prefill run, and needs none."""
    lines = [
        {"prompt_ids": [5] * p, "response_ids": [7] * (20 - p), "finish_reason": "length"}
        for p in (1, 12, 19)
    ]
    config = model_config(tmp_path, tiny_qwen3, lines)
    producer = run({**config, "capture": CaptureConfig(mode="prefill")})
    member = attach(producer)
    hidden = member.granted.descriptor.hidden_size
    assert member.granted.max_sample_bytes == decoded_bytes(19, 2, hidden)
    member.open()
    received = list(member.receive(3))
    finish(member, producer, received)
    statistics = producer.service.statistics()
    assert (statistics.tokens, statistics.captured) == (57, 57)
    assert statistics.response_tokens == 19 + 8 + 1


def test_prompts_that_sglang_cannot_make_end_and_hold_nobody_up(
    run: Any, attach: Any, tmp_path: Path, standin: Standin
) -> None:
    """One prompt ends the run, and every restart meets it again."""
    lengths = [5, 20, 7, 50, 9]
    lines = [json.dumps({"prompt_ids": [5] * n}) + "\n" for n in lengths]
    (tmp_path / "p.jsonl").write_text("".join(lines))
    config = {
        "engine": SGLangConfig(
            python=standin.python(),
            sampling=SamplingConfig(max_new_tokens=12),
            args={"standin": {"refuses_tokens": 20, "most_input_tokens": 30}},
        ),
        "target": TargetConfig(path=str(standin.target_path), layer_ids=LAYER_IDS),
        "prompts": PromptsConfig(path=str(tmp_path / "p.jsonl"), max_prompt_tokens=60),
    }
    producer = run(config)
    member = attach(producer)
    member.open()
    received = list(member.receive(3))
    member.commit(received)
    member.until(m.AllTerminal)
    assert sorted(id.ordinal for id in received) == [0, 2, 4]
    quarantined = IdSet.from_wire(member.inquire().terminal["quarantined"])
    assert [id.ordinal for id in quarantined] == [1, 3]
    member.say(m.Bye)
    producer.ended()
    reasons = {one.id.ordinal: one.reason for one in producer.service.tombstones()}
    assert reasons[1] == "SGLang aborted it: 20 tokens are too many"
    assert reasons[3].startswith("50 tokens are to be fed, the engine takes 30: ")
    sums = read_spool(producer.directory, IdSet([*received, *quarantined])).account
    assert (IdSet.from_wire(sums.terminal["quarantined"]), sums.pending) == (quarantined, [])
    again = run(config)
    again.ended()
    assert again.service.statistics().captured == 0, "nothing is left to be made"


def test_a_prompt_whose_sample_could_never_be_held_is_refused(
    tmp_path: Path, tiny_qwen3: Path
) -> None:
    """It would wait for memory for ever."""
    lines = [{"prompt_ids": [5] * 10, "response_ids": [7] * 5}]
    config = model_config(tmp_path, tiny_qwen3, lines)
    row = 2 * 2 * 512
    for mode, rows, says in (
        ("prefill", 13, "line 1: prompt and response of 15 tokens, the limit is 14"),
        ("live", 499, r"staging_bytes = \d+ holds 499 rows of 2048 bytes"),
    ):
        capture = CaptureConfig(mode=mode, staging_bytes=rows * row)  # type: ignore[arg-type]
        whole = ProducerConfig(**config, capture=capture, spool=SpoolConfig(dir=tmp_path / "spool"))
        with pytest.raises(ProducerError, match=says):
            ProducerService(whole).run()
