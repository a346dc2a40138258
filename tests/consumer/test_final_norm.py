"""A final norm, undone: norm and head make the same of the result as of the true state before it.

That is proved here for every architecture that it is allowed for, on targets whose final norm has
weights that no norm has when it is new.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tiny_models
from draftfeed_consumer.errors import FinalNormError
from draftfeed_consumer.final_norm import ADDED, FinalNorm, read_final_norm

# The first test on a machine makes the SmolLM2 directory, which takes half a minute or more.
pytestmark = pytest.mark.timeout(300)

TINY: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_models.make_llama,
    "qwen3": tiny_models.make_qwen3,
    "qwen3_5_text": tiny_models.make_qwen35,
    "qwen3_5": tiny_models.make_qwen35_multimodal,
}
"""By the model_type of their config.json."""


class Proof(NamedTuple):
    path: Path
    norm: Any
    head: Any
    before: torch.Tensor
    """[n, H], the true state before the norm."""
    after: torch.Tensor
    """[n, H]"""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Of states before the norm, as a trainer computes them."""
        with torch.no_grad():
            return self.head(self.norm(states.to(self.before.dtype))).float()


def prove(path: Path, dtype: torch.dtype) -> Proof:
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(path, dtype=dtype).eval()
    norm, seen = model.get_decoder().norm, []
    norm.register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    tokens = torch.randint(3, 400, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, use_cache=False)
    norm._forward_hooks.clear()
    return Proof(path, norm, model.get_output_embeddings(), seen[0][0], seen[1][0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = TINY[kind](tmp_path_factory.mktemp("final_norm") / kind)
        return made[kind]

    return get


@pytest.fixture(scope="module", params=[*TINY, "smollm2"])
def path(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Path:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2_dir")
    return models(request.param)


def of_rows(got: torch.Tensor, want: torch.Tensor) -> float:
    """The worst row's relative L2."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def on_the_wire(states: torch.Tensor, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return states.to(torch.bfloat16).to(dtype)


def test_each_architecture_that_is_allowed_is_proved_here() -> None:
    assert set(TINY) == set(ADDED)


@pytest.mark.parametrize("kind", TINY)
def test_the_tiny_targets_are_of_the_architectures_they_are_named_after(
    kind: str, models: Callable[[str], Path]
) -> None:
    assert json.loads((models(kind) / "config.json").read_text())["model_type"] == kind


def test_norm_and_head_make_the_same_logits_of_the_equivalent(
    path: Path, record_property: Any
) -> None:
    """In float32, where nothing is rounded. What is left is the norm's eps, 1e-6, against the mean
    square of the true state, which is 0.02 in the tiny Qwen3.5."""
    proof = prove(path, torch.float32)
    equivalent = read_final_norm(path).undone(proof.after)
    off = of_rows(proof.logits(equivalent), proof.logits(proof.before))
    record_property("logits' worst relative L2", f"{off:.1e}")
    assert off < 1e-4
    # It is the true state but for its length.
    cosine = torch.cosine_similarity(equivalent, proof.before, dim=-1)
    assert cosine.min() > 0.99999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_as_it_comes_over_the_wire_and_is_stored_for_a_trainer(
    path: Path, dtype: torch.dtype, stored: torch.dtype, record_property: Any
) -> None:
    """Rounded to bf16 before the wire, and once more when the result is stored in 16 bits."""
    proof = prove(path, dtype)
    with torch.no_grad():
        true = proof.head(proof.after).float()
    equivalent = read_final_norm(path).undone(on_the_wire(proof.after, stored))
    assert equivalent.dtype == stored
    off = of_rows(proof.logits(equivalent.float()), true)
    plain = of_rows(proof.logits(on_the_wire(proof.before).float()), true)
    record_property("logits' worst relative L2", f"{off:.1e}, of the true state {plain:.1e}")
    assert off < 0.025


def test_a_result_fits_into_fp16(path: Path) -> None:
    """However small the weights are: its mean square is 1."""
    equivalent = read_final_norm(path).undone(prove(path, torch.float32).after)
    assert equivalent.abs().max() <= 1.01 * math.sqrt(equivalent.shape[1])
    assert equivalent.square().mean(-1).sub(1).abs().max() < 0.01


@pytest.mark.parametrize("kind", TINY)
def test_one_plus_the_weight_is_not_taken_for_the_weight(
    kind: str, models: Callable[[str], Path]
) -> None:
    """Qwen3.5 multiplies by 1 + w: plain RMSNorm there trains happily on wrong targets."""
    proof = prove(models(kind), torch.float32)
    right = read_final_norm(proof.path)
    for added in (-1.0, 1.0):
        with pytest.raises(FinalNormError, match=r"has a mean square of .*, not 1|channels by 0"):
            FinalNorm(proof.path, right.scale + added).undone(proof.after)


def test_a_state_before_the_norm_is_not_taken_for_one_after_it(path: Path) -> None:
    """Same shape, no error: pre-norm and post-norm mixed up."""
    proof, norm = prove(path, torch.float32), read_final_norm(path)
    with pytest.raises(FinalNormError, match="or the state before the norm"):
        norm.undone(on_the_wire(proof.before))
    assert norm.puts_out(on_the_wire(proof.after))
    assert not norm.puts_out(on_the_wire(proof.before))


def test_a_state_of_another_target_is_refused(models: Callable[[str], Path]) -> None:
    other = read_final_norm(models("llama"))
    shuffled = FinalNorm(other_path := Path("other"), other.scale.roll(1))
    after = prove(models("llama"), torch.float32).after
    other.undone(after)
    with pytest.raises(FinalNormError, match=f"the norm of {other_path} puts out"):
        shuffled.undone(after)


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return scale * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def random(rows: int, hidden: int) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tiny", [1e-3, 1e-5, 1e-7, -1e-6])
def test_weights_that_are_almost_zero(tiny: float) -> None:
    """Rounding of y is then large in the result, and not in what the norm makes of that."""
    scale = torch.linspace(0.5, 2.0, 512)
    scale[::64] = tiny
    after = rms_norm(random(20, 512) * 30, scale)
    equivalent = FinalNorm(Path("target"), scale).undone(on_the_wire(after))
    assert of_rows(rms_norm(equivalent.half().float(), scale), after) < 0.01


def test_so_many_weights_are_almost_zero_that_nothing_is_left() -> None:
    scale = torch.full((512,), 1e-9)
    scale[:256] = 1.0
    after = rms_norm(random(4, 512), scale)
    with pytest.raises(FinalNormError, match=r"a mean square of 0\.\d+, not 1"):
        FinalNorm(Path("target"), scale).undone(on_the_wire(after))


def test_many_rows_are_divided_as_one_is() -> None:
    """They go through in blocks, and a row that is wrong is named by its place among all."""
    scale = torch.linspace(0.5, 2.0, 64)
    norm, after = FinalNorm(Path("target"), scale), rms_norm(random(2500, 64), scale)
    assert torch.equal(norm.undone(after), after / scale)
    after[2300] *= 2
    with pytest.raises(FinalNormError, match="row 2300 of the final state"):
        norm.undone(after)


def test_states_so_small_that_eps_counts_are_refused() -> None:
    scale = torch.linspace(0.5, 2.0, 512)
    norm = FinalNorm(Path("target"), scale)
    states = random(4, 512)
    norm.undone(rms_norm(states * 1e-2, scale))
    with pytest.raises(FinalNormError, match=r"a mean square of 0\.\d+, not 1"):
        norm.undone(rms_norm(states * 1e-3, scale))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    scale = torch.ones(16)
    after = rms_norm(random(3, 16), scale)
    after[1, 5] = value
    norm = FinalNorm(Path("target"), scale)
    with pytest.raises(FinalNormError, match="row 1 of the final state"):
        norm.undone(after)
    assert not norm.puts_out(after)


@pytest.mark.parametrize(
    ("weight", "says"),
    [(0.0, "multiplies 2 of 16 channels by 0"), (math.nan, "is not finite")],
)
def test_weights_that_lose_a_channel_are_refused(weight: float, says: str) -> None:
    scale = torch.ones(16)
    scale[[3, 7]] = weight
    with pytest.raises(FinalNormError, match=says):
        FinalNorm(Path("target"), scale)


def test_a_target_of_another_width_is_refused(models: Callable[[str], Path]) -> None:
    with pytest.raises(FinalNormError, match="hidden size of 512, and the states have 64"):
        read_final_norm(models("qwen3")).undone(torch.ones(3, 64))


def without_config(path: Path) -> None:
    (path / "config.json").unlink()


def broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def config_of_another_kind(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))


def cut_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def without_norm(path: Path) -> None:
    save_file({"model.layers.0.norm.weight": torch.ones(512)}, path / "model.safetensors")


def norm_of_two_dimensions(path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2, 256)}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_config, "config.json cannot be read: No such file"),
        (broken_config, "config.json is no model's config"),
        (config_of_another_kind, "is a gemma3_text: .* was proved for llama, qwen3, qwen3_5"),
        (cut_weights, r"model\.safetensors cannot be read"),
        (without_norm, "no weight of a final norm"),
        (norm_of_two_dimensions, r"the weight of the final norm is \[2, 256\]"),
    ],
)
def test_a_directory_whose_norm_cannot_be_read_is_one_line(
    spoil: Callable[[Path], None], says: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(models("qwen3"), tmp_path / "target")
    spoil(copy)
    with pytest.raises(FinalNormError, match=says) as caught:
        read_final_norm(copy)
    assert "\n" not in str(caught.value)
