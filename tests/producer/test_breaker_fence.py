"""What no sane member says as it attaches: the next sane one still gets the stream."""

import msgspec
import pytest

from delivery_members import BOB, Member, names, producer, said
from draftfeed_proto import messages as m
from draftfeed_proto.errors import MalformedMessage
from draftfeed_proto.limits import MAX_TERM_STEP
from samples import DATASET


@pytest.mark.parametrize("field", ["term", "members"])
def test_number_that_no_answer_can_repeat_is_not_read(field: str) -> None:
    fence = m.Fence(group="g", member="0", incarnation="i", process="p", term=1)
    data = msgspec.msgpack.encode(msgspec.structs.replace(fence, **{field: 2**63}))
    with pytest.raises(MalformedMessage, match=field):
        m.decode_from_member(data)


def test_fence_of_the_last_term_there_is_leaves_terms_for_others() -> None:
    delivery = producer(1)
    refused = said(Member(delivery, BOB, incarnation="hostile", term=2**63 - 1).ask(), m.Refused)
    assert refused[0].code == "malformed"
    assert names(Member(delivery).ask()) == ["StoreTerm", "Granted"]


def test_producer_with_an_empty_disk_joins_a_group_of_many_terms() -> None:
    assert names(Member(producer(1), term=MAX_TERM_STEP).ask()) == ["StoreTerm", "Granted"]


def test_checkpoint_that_names_a_trillion_samples_is_refused_at_once() -> None:
    delivery = producer(1)
    member = Member(delivery)
    member.ask()
    refused = said(member.say(m.Open, trained=[(DATASET, 0, 0, 0, [2**40])]), m.Refused)
    assert refused[0].code == "mismatch"
    assert not delivery.committed


def test_second_open_in_one_session_gives_nothing_back_that_is_on_its_way() -> None:
    delivery = producer(2)
    member = Member(delivery)
    member.attach()
    member.take(0)
    with pytest.raises(MalformedMessage, match="open already"):
        member.say(m.Open, trained=[])
    assert len(delivery.fencing.leased) == 1
