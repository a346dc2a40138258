import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from draftfeed_proto import messages as m
from draftfeed_proto.errors import IncompatibleVersion, LimitExceeded, MalformedMessage
from draftfeed_proto.ids import IdSet, Shards, WireRanges
from draftfeed_proto.limits import MAX_ARRAY_ITEMS, MAX_MESSAGE_BYTES

FROM_MEMBER, FROM_PRODUCER = get_args(m.FromMember), get_args(m.FromProducer)
VECTORS = json.loads((Path(__file__).parents[2] / "proto/vectors/messages.json").read_text())
EXAMPLES = [bytes.fromhex(vector["hex"]) for vector in VECTORS]
MESSAGES = {f"{v['message']['type']}-{v['name']}": v["message"] for v in VECTORS}
BEGIN, REJECT = MESSAGES["Begin-full"], MESSAGES["Reject-minimal"]


def pack(value: Any) -> bytes:
    """By plain msgpack."""
    data = msgpack.packb(value)
    assert data is not None
    return data


def decode(data: bytes) -> m.Message:
    """By whichever end takes this type of message."""
    try:
        return m.decode_from_member(data)
    except MalformedMessage:
        return m.decode_from_producer(data)


def read(value: Any) -> m.Message:
    return decode(pack(value))


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Builtin values that a type allows, by its own constraints."""
    match kind:
        case inspect.StructType() as struct:
            return structs(struct)
        case inspect.IntType(ge=low, le=high, lt=below):
            top = high if high is not None else (below - 1 if below is not None else 2**63 - 1)
            return st.integers(low if low is not None else -(2**63), top)
        case inspect.StrType(pattern=str()):
            return st.text("0123456789abcdef", min_size=16, max_size=16)
        case inspect.StrType():
            return st.text(max_size=20)
        case inspect.ListType(item_type=item, min_length=low):
            return st.lists(values(item), min_size=low or 0, max_size=3)
        case inspect.VarTupleType(item_type=item, min_length=low):
            return st.lists(values(item), min_size=low or 0, max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items)).map(list)
        case inspect.NamedTupleType(fields=fields):
            return st.tuples(*(values(field.type) for field in fields)).map(list)
        case inspect.DictType(value_type=value):
            return st.dictionaries(st.text(max_size=5), values(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.LiteralType(values=literals):
            return st.sampled_from(literals)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise AssertionError(f"no values for {kind}")


def structs(struct: inspect.StructType) -> st.SearchStrategy[Any]:
    if struct.array_like:
        return st.tuples(*(values(field.type) for field in struct.fields)).map(list)
    fields = {f.name: values(f.type) for f in struct.fields}
    required = {f.name: fields[f.name] for f in struct.fields if f.required}
    tag = {"type": st.just(struct.tag)} if struct.tag else {}
    optional = {name: fields[name] for name in fields.keys() - required.keys()}
    return st.fixed_dictionaries({**tag, **required}, optional=optional)


@pytest.mark.parametrize("kind", [*FROM_MEMBER, *FROM_PRODUCER], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_type_comes_back(kind: type[m.Message], data: st.DataObject) -> None:
    message = msgspec.convert(data.draw(values(inspect.type_info(kind))), kind)
    reason = getattr(message, "reason", "")
    if not reason.isprintable():  # that is changed
        return
    assert decode(m.encode(message)) == message


@pytest.mark.parametrize("name", ["Chunk-full", "ChunksAt-full"])
def test_what_is_said_of_chunks_can_be_a_key(name: str) -> None:
    """The server keeps unsent frames by it, and died of one that could not."""
    assert len({read(MESSAGES[name]), read(MESSAGES[name])}) == 1


def test_the_two_directions_share_no_type() -> None:
    assert not {kind.__name__ for kind in FROM_MEMBER} & {kind.__name__ for kind in FROM_PRODUCER}
    with pytest.raises(MalformedMessage, match="Chunk"):
        m.decode_from_member(pack(MESSAGES["Chunk-full"]))


# evolution


def grown(value: Any) -> Any:
    """With a field from the future in every map but those whose keys are free."""
    if isinstance(value, dict):
        free = ("sampling", "terminal")
        inner = {key: value[key] if key in free else grown(value[key]) for key in value}
        return {**inner, "from_the_future": {"a": [1, None]}}
    return [grown(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_fields_of_a_later_version_are_ignored_at_every_depth(message: dict[str, Any]) -> None:
    assert read(grown(message)) == read(message)


@pytest.mark.parametrize(
    ("name", "path", "default"),
    [
        ("Bye-full", ["reason"], ""),
        ("Open-full", ["held"], []),
        ("Open-full", ["ledger_term"], 0),
        ("Open-full", ["ledger_number"], 0),
        ("Open-full", ["rollback"], ""),
        ("Open-full", ["checkpoint_samples"], 0),
        ("Fence-full", ["members"], 1),
        ("Fence-full", ["leader"], True),
        ("Fence-full", ["takeover"], False),
        ("Reject-full", ["state"], "rejected"),
        ("Granted-full", ["max_sample_bytes"], 0),
        ("Granted-full", ["commit_term"], 0),
        ("Refused-full", ["term"], 0),
        ("Account-full", ["regenerated"], []),
        ("Account-full", ["members"], []),
        ("Assets-full", ["files"], []),
        ("Assets-full", ["reason"], ""),
        ("Begin-full", ["header", "sampling"], {}),
        ("Begin-full", ["header", "digest"], ""),
        ("Granted-full", ["descriptor", "schema"], 1),
        ("Granted-full", ["descriptor", "dtype"], "fp16"),
        ("Granted-full", ["descriptor", "final"], "none"),
        ("Fence-full", ["expect", "layer_ids"], None),
    ],
)
def test_a_field_that_an_older_end_does_not_send_takes_its_default(
    name: str, path: list[str], default: Any
) -> None:
    value = json.loads(json.dumps(MESSAGES[name]))
    *outer, last = path
    holder = value
    for key in outer:
        holder = holder[key]
    del holder[last]
    message: Any = read(value)
    for key in path:
        message = getattr(message, key)
    assert message == default


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith("Fence")])
@pytest.mark.parametrize("field", ["group", "member", "incarnation", "process", "term"])
def test_a_fence_without_who_it_is_is_refused(name: str, field: str) -> None:
    with pytest.raises(MalformedMessage, match=field):
        m.decode_from_member(pack({k: v for k, v in MESSAGES[name].items() if k != field}))


@pytest.mark.parametrize("kind", ["Fence-minimal", "Granted-minimal"])
def test_the_version_is_always_sent(kind: str) -> None:
    """An end that left out its default would be taken for whatever version the reader has."""
    sent = msgpack.unpackb(m.encode(read(MESSAGES[kind])))
    assert sent["version"] == list(m.VERSION)


def test_a_refusal_for_a_reason_of_a_later_version_can_be_read() -> None:
    message = read({"type": "Refused", "code": "from-the-future", "reason": "why"})
    assert message == m.Refused(code="from-the-future", reason="why")


def test_only_the_major_version_must_agree() -> None:
    major, minor = m.VERSION
    m.check_version((major, minor + 5))
    with pytest.raises(IncompatibleVersion, match=rf"{major + 1}\.0 .*{major}\.{minor}"):
        m.check_version((major + 1, 0))


# hostile bytes


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x00"


def with_field(name: bytes, value: bytes, message: dict[str, Any] = REJECT) -> bytes:
    """The message with one more entry, written by hand."""
    packed = pack(message)
    return bytes([packed[0] + 1]) + packed[1:] + pack(name.decode()) + value


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "reserved byte": b"\xc1",
    "nil": b"\xc0",
    "array": pack([1, 2]),
    "no type": pack({"term": 1}),
    "unknown type": pack({**REJECT, "type": "Rejects"}),
    "long unknown type": pack({**REJECT, "type": "x" * 60_000}),
    "type is a number": pack({**REJECT, "type": 5}),
    "type is a map": pack({**REJECT, "type": {}}),
    "two messages": pack(REJECT) * 2,
    "trailing byte": pack(REJECT) + b"\x00",
    "truncated": pack(REJECT)[:-1],
    "missing field": pack({key: REJECT[key] for key in REJECT if key != "id"}),
    "same key twice": with_field(b"reason", pack("other")),
    "same type twice": with_field(b"type", pack("Bye")),
    "keys are bytes": pack({key.encode(): value for key, value in REJECT.items()}),
    "one key is bytes": pack({**REJECT, b"x": 2}),
    "key is a number": pack({**REJECT, 1: 2}),
    "string is bytes": pack({**REJECT, "reason": b"why"}),
    "string is not UTF-8": pack(REJECT).replace(b"non-finite", b"non-\xff\xfe\xfdite"),
    "string is a surrogate": pack(REJECT).replace(b"non-finite", b"non-\xed\xa0\x80ite"),
    "extension": with_field(b"x", b"\xc7\x01\x05a"),
    "empty extension": with_field(b"x", b"\xc7\x00\x05"),
    "fixed extension": with_field(b"x", b"\xd4\x05a"),
    "timestamp": with_field(b"x", pack(msgpack.Timestamp(1, 2))),
    "4 GiB string": with_field(b"x", b"\xdb\xff\xff\xff\xff"),
    "4 GiB bytes": with_field(b"x", b"\xc6\xff\xff\xff\xff"),
    "4 G items": with_field(b"x", b"\xdd\xff\xff\xff\xff"),
    "4 G entries": with_field(b"x", b"\xdf\xff\xff\xff\xff"),
    "claims inside claims": with_field(b"x", b"\xdd\x00\x04\x00\x00" * 1000),
    "small claims inside claims": with_field(b"x", b"\xdc\x0b\x00" * 1000),
    "too deep": with_field(b"x", nested(100_000)),
    "deep where a number was due": pack({**REJECT, "term": 0})[:-1] + nested(900),
    "negative": pack({**REJECT, "term": -1}),
    "above 63 bits": pack({**REJECT, "term": 2**64 - 1}),
    "number is a float": pack({**REJECT, "term": 1.0}),
    "number is NaN": pack({**REJECT, "term": float("nan")}),
    "number is a boolean": pack({**REJECT, "term": True}),
    "long string": pack({**REJECT, "reason": "x" * (64 * 1024 + 1)}),
    "long name": pack({**REJECT, "session": "x" * 1025}),
    "large map": pack({**REJECT, "x": {str(i): i for i in range(257)}}),
    "large array": pack({**REJECT, "x": [0] * (MAX_ARRAY_ITEMS + 1)}),
    "large message": pack({**REJECT, "x": [b"x" * 65000] * 70}),
    **{
        f"id {id!r:.40}": pack({**REJECT, "id": id})
        for id in (
            [],
            ["0123456789abcdef", 0, 0],
            ["0123456789abcdef", 0, 0, 1, 2],
            ["0123456789abcdef", 0, 0, -1],
            ["0123456789abcdef", 0, 0, 2**40],
            ["0123456789abcdef\n", 0, 0, 1],
            ["0123456789ABCDEF", 0, 0, 1],
            ["../../etc/passwd", 0, 0, 1],
            ["", 0, 0, 1],
            {"dataset": "0123456789abcdef"},
        )
    },
    **{
        f"offer of {size} bytes": pack(
            {**MESSAGES["Offer-full"], "samples": [[REJECT["id"], size]]}
        )
        for size in (-1, 0, (4 << 30) + 1)
    },
    **{
        f"sampling {value!r:.20}": pack(
            {**BEGIN, "header": {**BEGIN["header"], "sampling": {"x": value}}}
        )
        for value in (b"x", {"x": 1}, [[1]])
    },
    "negative counter": pack({**BEGIN, "header": {**BEGIN["header"], "counters": [[0, 0, 0, -1]]}}),
    **{
        f"fence with {field} {value!r}": pack({**MESSAGES["Fence-full"], field: value})
        for field, value in {"members": 0, "term": 0, "leader": 1, "takeover": "yes"}.items()
    },
    **{
        f"shards {value!r:.40}": pack({**MESSAGES["Granted-full"], "shards": value})
        for value in (
            [],
            {"dataset": "0123456789abcdef", "epoch": 0},
            {"dataset": "0123456789abcdef", "epoch": 0, "ranges": [-1, 2]},
            {"dataset": "x", "epoch": 0, "ranges": [0, 2]},
        )
    },
    **{
        f"piece of {size} bytes": pack({**MESSAGES["FetchAsset-full"], "bytes": size})
        for size in (-1, 0, (4 << 20) + 1, 2**63)
    },
    "piece before the start": pack({**MESSAGES["FetchAsset-full"], "offset": -1}),
    "ranges of a negative": pack(
        {**MESSAGES["Commit-full"], "trained": [["0123456789abcdef", 0, 0, 0, [-1, 2]]]}
    ),
    "ranges as protocol 1 wrote them": pack(
        {**MESSAGES["Commit-full"], "trained": [["0123456789abcdef", 0, 0, [5, 7]]]}
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_before_memory_is_taken(data: bytes) -> None:
    """Bounded by what was sent, never by what it claims."""
    tracemalloc.start()
    with pytest.raises((MalformedMessage, LimitExceeded)) as caught:
        decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 + 20 * len(data)
    assert len(str(caught.value)) < 1000, "it is sent back to the peer that caused it"


def test_a_set_of_ids_takes_memory_by_what_was_sent_of_it() -> None:
    every_second = [["0" * 16, 0, 0, 1 << 30, [1] * 65_535]]
    data = pack({**MESSAGES["Commit-full"], "trained": every_second})
    tracemalloc.start()
    message = m.decode_from_member(data)
    assert isinstance(message, m.Commit)
    assert len(IdSet.from_wire(message.trained)) == 32_768
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 + 60 * len(data)


def test_a_message_above_the_limit_is_not_even_read() -> None:
    with pytest.raises(LimitExceeded):
        m.decode_from_member(bytes(MAX_MESSAGE_BYTES + 1))


def survives(data: bytes) -> None:
    """An error of ours, or a message that could be sent on."""
    try:
        message = decode(data)
    except (MalformedMessage, LimitExceeded):
        return
    m.encode(message)


@given(st.binary(max_size=300))
def test_noise(data: bytes) -> None:
    survives(data)


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_messages(example: bytes, data: st.DataObject) -> None:
    bad = bytearray(example)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad)))
        bad[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    survives(bytes(bad))


strange = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.just(msgpack.ExtType(3, b"x")),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(list(MESSAGES.values())), strange, st.data())
def test_strange_values_in_any_field(
    message: dict[str, Any], value: Any, data: st.DataObject
) -> None:
    survives(pack({**message, data.draw(st.sampled_from(list(message))): value}))


# what we send


@pytest.mark.parametrize(
    "message",
    [
        lambda here: m.Bye(**here, reason="x" * (64 * 1024 + 1)),
        lambda here: m.Bye(**here, reason="\ud800"),
        lambda here: m.Credit(**here, total_bytes=-1),
        lambda here: m.Credit(**here, total_bytes=2**70),
        lambda here: m.Credit(**{**here, "session": "x" * 1025}, total_bytes=1),
        lambda here: m.Commit(
            **here, number=1, trained=[("0" * 16, 0, 0, 0, list(range(MAX_ARRAY_ITEMS + 2)))]
        ),
    ],
)
def test_what_the_other_end_must_refuse_is_not_sent(
    message: Callable[[dict[str, Any]], m.Message],
) -> None:
    with pytest.raises((MalformedMessage, LimitExceeded)):
        m.encode(message({"term": 1, "session": "s"}))


def test_an_array_at_its_limit_is_taken() -> None:
    ranges = [("0" * 16, 0, 0, 0, list(range(MAX_ARRAY_ITEMS)))]
    message = m.Commit(term=1, session="s", number=1, trained=ranges)
    assert m.decode_from_member(m.encode(message)) == message


def test_half_an_epoch_in_random_order_fits_into_every_message() -> None:
    """Beyond the limit nobody was told where the samples are, and then no commit went through. No
    order can scatter 914,000 lines more than that every second one is trained."""
    shards = [
        (start // 4096, start, min(4096, 914_000 - start)) for start in range(0, 914_000, 4096)
    ]
    half: WireRanges = [("0" * 16, 0, shard, at, [1] * (size - 1)) for shard, at, size in shards]
    rest: WireRanges = [
        ("0" * 16, 0, shard, at + 1, [1] * (size - 1)) for shard, at, size in shards
    ]
    assert len(m.encode(m.Commit(term=1, session="s", number=1, trained=half))) < 1 << 20
    account = m.Account(
        shards=Shards("0" * 16, 0, (0, len(shards))),
        committed=half,
        leased=[],
        deliverable=rest,
        terminal={},
        pending=[],
    )
    assert len(m.encode(account)) < MAX_MESSAGE_BYTES // 2


@pytest.mark.parametrize("reason", ["two\nlines", "\x1b[2Jcleared", "\r\x07", "back\x08"])
def test_what_a_peer_says_moves_nobodys_cursor(reason: str) -> None:
    """Reasons are written to logs and terminals as they come."""
    from_member = m.decode_from_member(m.encode(m.Bye(term=1, session="s", reason=reason)))
    from_producer = m.decode_from_producer(m.encode(m.Refused(code="held", reason=reason)))
    for told in (from_member, from_producer):
        assert isinstance(told, m.Bye | m.Refused)
        assert told.reason.isprintable()
        assert len(told.reason) == len(reason)
