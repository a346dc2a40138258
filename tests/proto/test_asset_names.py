"""Names that may become files, and what files are told apart by."""

import hashlib

import pytest

from draftfeed_proto.assets import identity, is_digest, is_plain_name
from draftfeed_proto.messages import AssetFile

FILES = [
    AssetFile(name="model.safetensors", bytes=3, digest="b" * 64),
    AssetFile(name="config.json", bytes=2, digest="a" * 64),
]


def test_identity_by_hand() -> None:
    """If this fails, every training node fetches its target again."""
    lines = f"{'a' * 64} 2 config.json\n{'b' * 64} 3 model.safetensors\n"
    assert identity(FILES) == hashlib.sha256(lines.encode()).hexdigest()[:32]
    assert identity(reversed(FILES)) == identity(FILES)


@pytest.mark.parametrize("change", [{"name": "other.json"}, {"bytes": 4}, {"digest": "c" * 64}])
def test_files_that_differ_in_anything_have_another_identity(change: dict[str, object]) -> None:
    first = {"name": "config.json", "bytes": 2, "digest": "a" * 64, **change}
    assert identity([FILES[0], AssetFile(**first)]) != identity(FILES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "merges.txt", "tokenizer.model", "a-b_c.1.jinja"]
)
def test_names_of_data_are_taken(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".json", ".config.json", "-rf.json", "config.json\n", "config.json\0"),
        *("../config.json", "a/config.json", "/etc/config.json", "a\\config.json", "C:config.json"),
        *(
            "model.bin",
            "model.pt",
            "modeling.py",
            "config.json.part",
            "config",
            "x" * 140 + ".json",
        ),
        *("cönfig.json", "config .json", "config.JSON"),
    ],
)
def test_names_that_lead_elsewhere_or_are_no_data_are_not(name: str) -> None:
    assert not is_plain_name(name)


def test_digests_are_lower_case_hex() -> None:
    assert is_digest("0a" * 32)
    assert not any(map(is_digest, ["", "0A" * 32, "0a" * 31, "0a" * 32 + "\n", "zz" * 32]))
