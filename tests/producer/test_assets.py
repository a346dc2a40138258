"""What of a target is served: the right tensors, bit for bit, out of the files where they lie."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

import tiny_models
from asset_targets import HIDDEN, VOCAB, make_llama, tensors
from draftfeed_producer.assets import COPIED, WEIGHTS, ServedFile, described, find_assets
from draftfeed_producer.errors import ModelError
from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.assets import TARGET_MANIFEST, identity, is_plain_name
from draftfeed_proto.limits import MAX_ASSET_FILES

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """That a test may spoil."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def served(directory: Path, out: Path) -> Path:
    """The directory that a training node gets, read in odd pieces."""
    out.mkdir()
    for file in find_assets(directory):
        size = max(1, file.bytes // 3)
        pieces = (file.read(at, min(size, file.bytes - at)) for at in range(0, file.bytes, size))
        (out / file.name).write_bytes(b"".join(pieces))
        file.close()
    return out


def identity_of(directory: Path) -> str:
    files = find_assets(directory)
    found = identity(described(file, lambda: False) for file in files)
    for file in files:
        file.close()
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda path: make_llama(path, shards=True), {EMBEDDING, NORM, HEAD}),
        (lambda path: make_llama(path), {EMBEDDING, NORM, HEAD}),
        (lambda path: make_llama(path, tied=True, shards=True), {EMBEDDING, NORM}),
        (tiny_models.make_qwen3, {EMBEDDING, NORM, HEAD}),
        (tiny_models.make_qwen35, {EMBEDDING, NORM, HEAD}),
        (
            tiny_models.make_qwen35_multimodal,
            {"model.language_model.embed_tokens.weight", "model.language_model.norm.weight", HEAD},
        ),
    ],
    ids=["in shards", "in one file", "tied", "qwen3", "qwen3.5", "multimodal"],
)
def test_exactly_the_text_models_ends_are_served_bit_for_bit(
    make: Callable[[Path], Path], names: set[str], tmp_path: Path
) -> None:
    """Symptom: the norm of a vision tower or of a layer, or a head that is the embedding."""
    target = make(tmp_path / "target")
    out = served(target, tmp_path / "out")
    got, own = load_file(out / WEIGHTS), tensors(target)
    assert set(got) == names
    assert all(same(got[name], own[name]) for name in names)


def test_what_is_served_is_a_directory_that_transformers_reads(whole: Path, tmp_path: Path) -> None:
    out = served(whole, tmp_path / "out")
    text = "the quick brown fox says hello"
    mine, theirs = (AutoTokenizer.from_pretrained(path) for path in (out, whole))
    assert mine(text)["input_ids"] == theirs(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    assert mine.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    config, own = (AutoConfig.from_pretrained(path).to_json_string() for path in (out, whole))
    assert json.loads(config) == json.loads(own)


def test_the_sharding_of_the_target_changes_nothing(whole: Path, tmp_path: Path) -> None:
    """Symptom: two producers with the same weights taken for two targets."""
    shards = make_llama(tmp_path / "shards", shards=True)
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert identity_of(shards) == identity_of(whole)


def test_without_an_index_the_headers_of_all_shards_are_read(tmp_path: Path) -> None:
    shards = make_llama(tmp_path / "shards", shards=True)
    before = identity_of(shards)
    (shards / "model.safetensors.index.json").unlink()
    assert identity_of(shards) == before


def test_norm_of_another_dtype_than_the_embedding(copy: Path, tmp_path: Path) -> None:
    """Alignment: what is read in place must lie at a multiple of its size."""
    own = tensors(copy)
    own[NORM] = own[NORM].float()
    save_file(own, copy / WEIGHTS)
    got = load_file(served(copy, tmp_path / "out") / WEIGHTS)
    assert all(same(got[name], own[name]) for name in (EMBEDDING, NORM, HEAD))


def test_digest_is_that_of_the_bytes(whole: Path, tmp_path: Path) -> None:
    out = served(whole, tmp_path / "out")
    for file in find_assets(whole):
        data = (out / file.name).read_bytes()
        listed = described(file, lambda: False)
        file.close()
        assert (listed.bytes, listed.digest) == (len(data), hashlib.sha256(data).hexdigest())
        assert is_plain_name(listed.name)


def test_what_is_listed_is_what_a_member_takes() -> None:
    assert all(map(is_plain_name, (*COPIED, WEIGHTS)))
    assert len(COPIED) < MAX_ASSET_FILES


def test_nothing_else_of_the_directory_is_served(copy: Path) -> None:
    for name in ("modeling_custom.py", "pytorch_model.bin", "README.md", ".env", "secrets.json"):
        (copy / name).write_text("x")
    names = {file.name for file in find_assets(copy)}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }


def spoil(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        own = tensors(directory)
        change(own)
        save_file(own, directory / WEIGHTS)

    return rewrite


def configure(**values: object) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text()) | values
        (directory / "config.json").write_text(json.dumps(config))

    return rewrite


def cut(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / WEIGHTS).unlink(), "has no safetensors files"),
        (lambda path: (path / WEIGHTS).write_bytes(b"x" * 100), "is not a safetensors file"),
        (lambda path: (path / WEIGHTS).write_bytes(b"\5" + b"\0" * 20), "its header is no JSON"),
        (lambda path: (path / WEIGHTS).write_bytes(b""), "is not a safetensors file"),
        (cut, "it is cut"),
        (spoil(lambda own: own.pop(EMBEDDING)), "has no embedding with a final norm"),
        (spoil(lambda own: own.pop(NORM)), "has no embedding with a final norm"),
        (spoil(lambda own: own.pop(HEAD)), "has no head"),
        (
            spoil(lambda own: own.update({HEAD: own[HEAD].to(torch.float8_e4m3fn)})),
            "it is quantized",
        ),
        (spoil(lambda own: own.update({EMBEDDING: own[EMBEDDING][:, :32].clone()})), "of shape"),
        (spoil(lambda own: own.update({EMBEDDING: own[EMBEDDING][:32].clone()})), "of shape"),
        (configure(hidden_size=128), "hidden_size 128"),
        (lambda path: (path / "config.json").write_text("{"), "is no JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "is no map"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {EMBEDDING: "../../secret.safetensors"}})
            ),
            "has no weight_map of tensors to files beside it",
        ),
    ],
)
def test_a_target_that_cannot_be_served_says_why(
    change: Callable[[Path], Any], words: str, copy: Path
) -> None:
    change(copy)
    with pytest.raises(ModelError, match=words) as caught:
        find_assets(copy)
    assert "\n" not in str(caught.value)


def test_a_padded_vocabulary_is_served_whole(tmp_path: Path) -> None:
    """Targets have more rows than tokens, so that GPUs can divide them."""
    target = make_llama(tmp_path / "target")
    configure(vocab_size=VOCAB - 12)(target)
    got = load_file(served(target, tmp_path / "out") / WEIGHTS)
    assert got[EMBEDDING].shape == (VOCAB, HIDDEN)


def test_fetched_files_do_not_pass_for_a_model(whole: Path, tmp_path: Path) -> None:
    """Symptom: transformers makes random blocks up, and says so in a warning."""
    out = served(whole, tmp_path / "out")
    (out / TARGET_MANIFEST).write_text("{}")
    with pytest.raises(ModelError, match="and no blocks"):
        load_target(TargetConfig(path=str(out)))


def test_a_tied_head_that_was_stored_all_the_same_is_left_out(copy: Path) -> None:
    """It would double what travels, and no loader would look at it."""
    before = sum(file.bytes for file in find_assets(copy))
    configure(tie_word_embeddings=True)(copy)
    assert before - sum(file.bytes for file in find_assets(copy)) > VOCAB * HIDDEN


def test_file_that_is_replaced_is_served_as_it_was(copy: Path) -> None:
    files = {file.name: file for file in find_assets(copy)}
    before = described(files[WEIGHTS], lambda: False)
    (copy / "new").write_bytes(b"\0" * 50)
    (copy / "new").replace(copy / WEIGHTS)
    assert described(files[WEIGHTS], lambda: False) == before


def test_file_that_became_shorter_is_an_error_and_no_short_piece(copy: Path) -> None:
    files = {file.name: file for file in find_assets(copy)}
    cut(copy)
    weights: ServedFile = files[WEIGHTS]
    with pytest.raises(OSError, match="shorter than it was"):
        weights.read(0, weights.bytes)
