"""The quality gate in the real service: a run of bad responses ends in minutes and not in days,
and nothing that was made is lost for it."""

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bare_member import BareMember
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import (
    CaptureConfig,
    SamplingConfig,
    SGLangConfig,
    TransformersConfig,
)
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import PromptsConfig
from draftfeed_producer.quality import QualityConfig
from draftfeed_producer.service import ProducerService, ProducerStatistics
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.target import TargetConfig
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId
from draftfeed_proto.sample import Sample
from standin_engine import LAYER_IDS, Standin
from waiting import eventually

BATCH = 8
ALL_TOKENS = tuple(range(512))
"""As stop tokens: every response ends at once."""


class Running:
    """A service in a thread of its own."""

    def __init__(self, config: ProducerConfig) -> None:
        self.address = config.server.bind
        self.generated: list[SampleId] = []
        self.service = ProducerService(config, self._observe)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _observe(self, sample: Sample) -> None:
        self.generated.append(sample.id)

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self._failure = error

    def closed(self) -> ProducerStatistics:
        """When the gate is, and what ran has finished."""
        eventually(lambda: self.service.statistics().phase == "delivering", "the end of generation")
        return self.service.statistics()

    def ended(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        assert self._failure is None

    def close(self) -> None:
        self.service.stop()
        self.ended()


@pytest.fixture
def run(tmp_path: Path, tiny_qwen3: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(
        lines: list[dict[str, Any]],
        quality: QualityConfig,
        mode: Any = "live",
        stop_token_ids: tuple[int, ...] = (),
        batch: int = BATCH,
    ) -> Running:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sampling = SamplingConfig(max_new_tokens=12, stop_token_ids=stop_token_ids)
        config = ProducerConfig(
            engine=TransformersConfig(
                dtype="float32", batch_size=batch, threads=1, sampling=sampling
            ),
            capture=CaptureConfig(mode=mode),
            target=TargetConfig(path=str(tiny_qwen3), layer_ids=(1,)),
            prompts=PromptsConfig(path=str(prompts)),
            spool=SpoolConfig(dir=tmp_path / "spool", min_free_bytes=0),
            server=ServerConfig(bind=f"ipc://{tmp_path}/p.sock"),
            quality=quality,
        )
        started.append(Running(config))
        return started[-1]

    yield start
    for one in started:
        one.close()


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q-{n}", "prompt": f"number {n}"} for n in range(count)]


def answered(count: int, word: str, share: float) -> list[dict[str, Any]]:
    """Lines for prefill mode; this share of them is one word."""
    numbers = random.Random(0)
    return [
        {**line, "response": word if numbers.random() < share else f" the quick brown fox {n} says"}
        for n, line in enumerate(prompts(count))
    ]


def test_a_target_that_stops_at_once_is_stopped_and_goes_on_when_told_to(
    run: Callable[..., Running], caplog: pytest.LogCaptureFixture
):
    quality = QualityConfig(window=40)
    with caplog.at_level(logging.ERROR, "draftfeed_producer"):
        first = run(prompts(120), quality, stop_token_ids=ALL_TOKENS)
        statistics = first.closed()
    made = list(first.generated)
    assert 11 <= len(made) <= 40
    assert statistics.closed_because.startswith("the quality gate is closed: ")
    (told,) = [one.message for one in caplog.records if "quality gate" in one.message]
    assert "stopped at once" in told
    assert told.count("1 tokens") == 3
    assert "[quality]" in told
    quality_figures = statistics.quality
    assert quality_figures.closed
    assert quality_figures.degenerate == quality_figures.looked_at == len(made)

    member = BareMember(first.address)
    member.open()
    assert sorted(member.receive(len(made))) == sorted(made)  # what is there is served
    member.commit(made[:5])
    account = member.inquire()
    assert len(IdSet.from_wire(account.pending)) == 120 - len(made)
    assert not any(isinstance(one, m.EndOfSamples | m.AllTerminal) for one in member.seen)
    member.close()
    assert first.generated == made, "a prompt was begun while the gate was closed"
    first.close()

    second = run(prompts(120), QualityConfig(max_share=1), stop_token_ids=ALL_TOKENS)
    eventually(lambda: len(second.generated) == 120 - len(made), "the rest")
    assert not set(second.generated) & set(made)
    member = BareMember(second.address, term=2)
    member.open(trained=made[:5])
    received = member.receive(115)
    member.commit([*made[:5], *received])
    member.until(m.AllTerminal)
    member.say(m.Bye)
    member.close()
    second.ended()
    assert second.service.statistics().phase == "done"


@pytest.mark.parametrize("batch", [BATCH, 256])
def test_87_percent_of_one_word_is_stopped_within_200_samples(
    run: Callable[..., Running], batch: int
):
    """Responses that exist pass the same gate as those that are generated. Those that were in the
    engine when it closed are among the 200."""
    producer = run(answered(600, " OK.", 0.87), QualityConfig(), mode="prefill", batch=batch)
    statistics = producer.closed()
    assert len(producer.generated) <= 200
    assert statistics.closed_because.count('" OK."') == 3
    assert statistics.samples == len(producer.generated)


@pytest.mark.parametrize("batch", [BATCH, 256])
def test_short_answers_among_others_are_not_stopped(run: Callable[..., Running], batch: int):
    producer = run(answered(600, " Yes", 0.3), QualityConfig(), mode="prefill", batch=batch)
    statistics = producer.closed()
    assert statistics.closed_because == ""
    assert len(producer.generated) == 600


def test_samples_in_the_making_when_it_closes_are_finished_and_kept(run: Callable[..., Running]):
    """It closes at the sixth of them, and until then five run at a time."""
    producer = run(answered(100, " OK.", 1.0), QualityConfig(window=22), mode="prefill")
    statistics = producer.closed()
    assert statistics.spool is not None
    assert statistics.closed_because
    assert len(producer.generated) == 10
    assert statistics.spool.samples == len(producer.generated)


@pytest.mark.parametrize(("concurrency", "window", "most"), [(16, 40, 40), (256, 200, 200)])
def test_requests_in_sglang_are_finished_when_it_closes_and_no_more_are_sent(
    tmp_path: Path, standin: Standin, concurrency: int, window: int, most: int
):
    """Its engine takes prompts while others run."""
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt_ids": [5 + n % 300] * 9}) + "\n" for n in range(400))
    )
    sampling = SamplingConfig(max_new_tokens=12, stop_token_ids=tuple(range(400)))
    config = ProducerConfig(
        engine=SGLangConfig(
            python=standin.python(),
            sampling=sampling,
            concurrency=concurrency,
            args={"standin": {}},
        ),
        target=TargetConfig(path=str(standin.target_path), layer_ids=LAYER_IDS),
        prompts=PromptsConfig(path=str(path), max_prompt_tokens=60),
        spool=SpoolConfig(dir=tmp_path / "spool", min_free_bytes=0),
        server=ServerConfig(bind=f"ipc://{tmp_path}/p.sock"),
        quality=QualityConfig(window=window),
    )
    producer = Running(config)
    try:
        statistics = producer.closed()
        assert "stopped at once" in statistics.closed_because
        assert window // 4 < len(producer.generated) <= most
        assert statistics.spool is not None
        assert statistics.spool.samples == len(producer.generated)
    finally:
        producer.close()
