"""Which prompt the engine gets next, with a real spool and server behind it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from bare_member import BareMember
from draftfeed_producer.admission import Admission
from draftfeed_producer.delivery import Delivery
from draftfeed_producer.listener import Listener, ServerConfig
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.quality import QualityConfig
from draftfeed_producer.responses import Gatekeeper, ResponseReader
from draftfeed_producer.server import Server
from draftfeed_producer.sources import PromptSource
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto import messages as m
from draftfeed_proto.ids import IdSet, SampleId, Shards
from samples import DATASET, DESCRIPTOR, sample
from waiting import eventually

SHARDS = Shards(DATASET, 0, (0, 1))
ALL = [SampleId(DATASET, 0, 0, ordinal) for ordinal in range(6)]


def found(id: SampleId) -> Prompt | None:
    """Line 3 proves to be no prompt when it is looked at."""
    return Prompt(id, "", np.zeros(1, np.int32)) if id.ordinal != 3 else None


class Parts(NamedTuple):
    admission: Admission
    source: PromptSource
    spool: Spool
    server: Server
    address: str
    stopped: threading.Event


@pytest.fixture
def epochs() -> int:
    return 1


@pytest.fixture
def parts(tmp_path: Path, epochs: int) -> Iterator[Parts]:
    shards = replace(SHARDS, epochs=epochs)
    ids = IdSet(id.in_epoch(epoch) for epoch in shards.each_epoch for id in ALL)
    spool = Spool(SpoolConfig(dir=tmp_path / "spool", min_free_bytes=0), DESCRIPTOR, shards)
    listener = Listener(ServerConfig(bind="tcp://127.0.0.1:*"))
    server = Server(listener, spool, Delivery.of(spool, DESCRIPTOR, ids))
    server.start()
    stopped = threading.Event()
    source = PromptSource(shards, ids, IdSet(), 1, found)
    admission = Admission(source, spool, server, stopped)
    yield Parts(admission, source, spool, server, listener.address, stopped)
    server.close("test over")
    spool.close()


def ordinals(prompts: Iterator[Prompt]) -> list[int]:
    return [prompt.id.ordinal for prompt in prompts]


def test_every_prompt_is_given_out_once_and_then_it_is_over(parts: Parts) -> None:
    admission = parts.admission
    assert (admission.ready, admission.over) == (True, False)
    assert ordinals(admission.prompts_now()) == [0, 1, 2, 4, 5]
    assert (admission.ready, admission.over) == (False, True)
    assert ordinals(admission.prompts_now()) == []


def test_a_line_that_proves_to_be_no_prompt_does_not_keep_the_run_from_its_end(
    parts: Parts,
) -> None:
    for prompt in parts.admission.prompts_now():
        made = sample(prompt.id.ordinal)
        parts.server.stored(parts.spool.append(made).header)
        parts.admission.stored(prompt.id)
    parts.server.finish()
    member = BareMember(parts.address)
    try:
        member.open()
        received = list(member.receive(5))
        member.commit(received)
        member.until(m.AllTerminal)
        assert IdSet.from_wire(member.inquire().skipped) == IdSet([ALL[3]])
    finally:
        member.close()


def test_samples_to_be_generated_again_come_before_new_ones(parts: Parts) -> None:
    prompts = parts.admission.prompts_now()
    assert next(prompts).id.ordinal == 0
    parts.admission.stored(ALL[0])
    parts.server.regenerate.put([ALL[0], ALL[5]])
    assert parts.admission.ready
    assert ordinals(prompts) == [0, 5, 1, 2, 4], "and what was begun by then is not begun twice"


def test_a_prompt_that_became_finished_meanwhile_is_not_given_out(parts: Parts) -> None:
    prompts = parts.admission.prompts_now()
    assert next(prompts).id.ordinal == 0
    parts.spool.append(sample(1))
    parts.server.regenerate.put([ALL[1]])
    assert ordinals(prompts) == [2, 4, 5]


@pytest.mark.parametrize("epochs", [2])
def test_what_is_quarantined_while_the_next_epoch_runs_is_not_generated_in_it(parts: Parts) -> None:
    for id in ordinals(parts.admission.prompts_now()):
        parts.admission.stored(ALL[id])
    assert parts.admission.ready
    prompts = parts.admission.prompts_now()
    assert next(prompts).id == ALL[0].in_epoch(1)
    parts.spool.tombstone(ALL[2], "quarantined", "the trainer dies of it")
    assert ordinals(prompts) == [1, 4, 5]
    ended = ALL[2].in_epoch(1)
    eventually(lambda: ended in parts.spool.tombstones, "it ends")


def test_few_run_at_a_time_until_the_first_window_is_judged(parts: Parts, tiny_qwen3: Path) -> None:
    """Of 256 that run, as many bad ones would have to finish before the gate could say so."""
    reader = ResponseReader(load_target(TargetConfig(path=str(tiny_qwen3))).tokenizer)
    gate = Gatekeeper(reader, QualityConfig(window=8))
    admission = Admission(parts.source, parts.spool, parts.server, parts.stopped, gate)
    prompts = admission.prompts_now()
    assert ordinals(prompts) == [0, 1]
    assert ordinals(admission.prompts_now()) == []
    for ordinal, then in ((0, [2]), (1, [4, 5])):
        admission.finished(sample(ordinal))
        admission.stored(ALL[ordinal])
        assert ordinals(prompts) == then, "an engine asks again while others run"
    assert not admission.closed


def test_after_stop_nothing_is_given_out(parts: Parts) -> None:
    parts.stopped.set()
    assert ordinals(parts.admission.prompts_now()) == []


@pytest.mark.parametrize("tries", [1, 3])
def test_only_the_tries_after_the_first_are_a_stall(parts: Parts, tries: int) -> None:
    given: list[Any] = []

    def done(timeout_seconds: float) -> bool:
        given.append(timeout_seconds)
        return len(given) == tries

    parts.admission.wait(done)
    assert given[0] == 0.0
    assert len(given) == tries
    assert (parts.admission.full_seconds > 0) == (tries > 1)
