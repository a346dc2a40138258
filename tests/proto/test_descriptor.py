import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftfeed_proto.descriptor import Descriptor, Expectation, dflash_layer_ids
from draftfeed_proto.errors import DescriptorMismatch, LimitExceeded, TooFewLayers
from samples import DESCRIPTOR

OTHER: dict[str, Any] = {
    "schema": 2,
    "model": "tiny2",
    "revision": "r2",
    "tokenizer_hash": "t2",
    "chat_template_hash": "c2",
    "layer_ids": (2, 5, 8),
    "num_layers": 11,
    "hidden_size": 65,
    "vocab_size": 513,
    "dtype": "bf16",
    "final": "postnorm",
}


def test_every_field_has_another_value_here() -> None:
    assert set(OTHER) == set(Descriptor.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_the_stream_id(field: str) -> None:
    changed = msgspec.structs.replace(DESCRIPTOR, **{field: OTHER[field]})
    assert changed.stream_id() != DESCRIPTOR.stream_id()
    assert msgspec.convert(msgspec.to_builtins(changed), Descriptor) == changed


@pytest.mark.parametrize("field", [field for field in OTHER if field != "schema"])
def test_mismatch_names_the_field_and_both_values(field: str) -> None:
    """Layer ids of another tool, or the formula's where the drafter used others: same shapes."""
    expect = msgspec.structs.replace(Expectation(), **{field: OTHER[field]})
    with pytest.raises(DescriptorMismatch) as caught:
        expect.check(DESCRIPTOR)
    error = caught.value
    served = getattr(DESCRIPTOR, field)
    assert (error.field, error.expected, error.served) == (field, OTHER[field], served)
    assert {field, repr(OTHER[field]), repr(served)} <= set(_words(str(error)))


def _words(text: str) -> list[str]:
    """'FIELD: the consumer expects X, the producer serves Y' -> FIELD, X, Y"""
    field, _, rest = text.partition(": the consumer expects ")
    return [field, *rest.split(", the producer serves ")]


def test_expectation_can_name_all_that_makes_a_stream() -> None:
    assert set(Expectation.__struct_fields__) == {"stream_id", *OTHER} - {"schema"}


def test_expectation_checks_only_what_it_names() -> None:
    Expectation().check(DESCRIPTOR)
    Expectation(stream_id=DESCRIPTOR.stream_id(), layer_ids=(1, 4, 7)).check(DESCRIPTOR)
    with pytest.raises(DescriptorMismatch, match="stream_id"):
        Expectation(stream_id="0" * 32).check(DESCRIPTOR)


@given(st.text(max_size=20), st.text(max_size=20))
def test_hashed_text_is_plain_json(model: str, revision: str) -> None:
    """What PROTOCOL.md promises to implementers: the JSON of any library, without spaces."""
    descriptor = msgspec.structs.replace(DESCRIPTOR, model=model, revision=revision)
    plain = json.dumps(msgspec.to_builtins(descriptor), separators=(",", ":"), ensure_ascii=False)
    assert msgspec.json.encode(descriptor) == plain.encode()


@pytest.mark.parametrize(
    "lie",
    [
        {"layer_ids": []},
        {"layer_ids": [-1]},
        {"layer_ids": list(range(65))},
        {"layer_ids": list(range(64)), "final": "prenorm"},
        {"hidden_size": 0},
        {"hidden_size": 65537},
        {"num_layers": -1},
        {"vocab_size": -1},
        {"dtype": "fp8"},
        {"final": ""},
        {"model": "m" * 1025},
    ],
    ids=str,
)
def test_values_no_stream_can_have_are_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(DESCRIPTOR) | lie, Descriptor)


@pytest.mark.parametrize(
    ("final", "layers", "names"),
    [("none", 3, ()), ("prenorm", 4, ("prenorm",)), ("postnorm", 4, ("postnorm",))],
)
def test_the_final_state_is_one_more_layer(final: str, layers: int, names: tuple[str, ...]) -> None:
    descriptor = msgspec.structs.replace(DESCRIPTOR, final=final)
    assert descriptor.layers == layers
    assert descriptor.layer_names == ("1", "4", "7", *names)
    assert descriptor.row_bytes() == 2 * layers * 64


def test_a_stream_is_not_described_with_more_layers_than_a_chunk_may_have() -> None:
    full = msgspec.structs.replace(DESCRIPTOR, layer_ids=tuple(range(64)))
    assert full.layers == 64
    with pytest.raises(LimitExceeded, match="is 65, the limit is 64"):
        msgspec.structs.replace(full, final="postnorm")


@pytest.mark.parametrize(
    ("num_layers", "n", "ids"),
    [
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 5, (1, 9, 17, 25, 33)),
        (8, 5, (1, 2, 3, 4, 5)),
        (4, 1, (1,)),
    ],
)
def test_dflash_ids(num_layers: int, n: int, ids: tuple[int, ...]) -> None:
    assert dflash_layer_ids(num_layers, n) == ids


@given(st.integers(1, 200), st.integers(1, 16))
def test_dflash_ids_are_different_blocks_of_the_target(num_layers: int, n: int) -> None:
    if num_layers < n + 3:
        with pytest.raises(TooFewLayers, match="name the layer ids"):
            dflash_layer_ids(num_layers, n)
        return
    ids = dflash_layer_ids(num_layers, n)
    assert len(ids) == n
    assert sorted(set(ids)) == list(ids)
    assert ids[0] >= 1
    assert ids[-1] <= num_layers - 3
