"""What every engine must get right, given what it captured and a reference.

A test module of an engine imports the tests by name and has fixtures of its own: `captured`, what
the engine made live, and `prefilled`, what it made in prefill mode of `given(captured)`. An engine
that cannot tap the last block leaves the test of the last block out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftfeed_consumer.final_norm import read_final_norm
from draftfeed_producer.prompts import Prompt
from draftfeed_producer.tap.reference import to_wire
from draftfeed_proto.descriptor import Final
from draftfeed_proto.ids import SampleId
from draftfeed_proto.sample import Sample
from tiny_models import LOST_CHANNELS

LENGTHS = [5, 23, 1, 14, 9, 31]
FP16_LEAST = 2.0**-24
LOGITS_TOLERANCE, OTHER_LOGITS = 0.02, 0.05
"""Relative L2 of a row of logits that a final state makes: at most, 0.01 of it for being rounded to
bf16; and at least, when it is taken for the other kind."""
NEARLY_BEST = 0.05
"""Of the standard deviation of a row's logits: so much less than the best another token may be."""
BF16_EXACT_FROM = 2.0**-17
"""From here on fp16 has every value of bf16, whose 8 bits are then 2**-24 and more."""


@dataclass
class Reference:
    """fp16 values as float32, of one sequence of n fed tokens."""

    blocks: np.ndarray
    """[n, N, H], what each decoder block puts out."""
    final: np.ndarray
    """[n, H], the last block's output after the final norm."""
    lost: np.ndarray
    """int [n, N], values that are not zero, and in fp16 are, whatever the noise of an engine."""
    logits: np.ndarray
    """float32 [n, V]"""

    def of_final(self, final: Final) -> np.ndarray:
        """[n, H]"""
        return self.blocks[:, -1] if final == "prenorm" else self.final


@dataclass
class Captured:
    """What an engine made of these prompts, in their order."""

    layer_ids: tuple[int, ...]
    tolerance: float
    """Relative L2 of a row."""
    new_tokens: int
    """Of the longest response."""
    prompts: list[Prompt]
    samples: list[Sample]
    references: list[Reference]
    lost_channels: int
    """At least so many values of each row are lost in fp16."""
    final: Final
    forward: "FullForward"

    @property
    def layers(self) -> int:
        return len(self.layer_ids) + (self.final != "none")

    def pairs(self) -> Iterator[tuple[np.ndarray, Reference]]:
        for sample, reference in zip(self.samples, self.references, strict=True):
            yield sample.hidden_states.astype(np.float32), reference


def make_prompts(lengths: list[int], vocab: int = 400) -> list[Prompt]:
    rng = np.random.default_rng(11)
    ids = (rng.integers(3, vocab, length).astype(np.int32) for length in lengths)
    return [Prompt(SampleId("f" * 16, 0, 0, i), f"p{i}", x) for i, x in enumerate(ids)]


def given(captured: Captured) -> list[Prompt]:
    """The prompts again, this time with the responses that were captured."""
    return [
        msgspec.structs.replace(
            prompt,
            response_ids=sample.input_ids[len(prompt.input_ids) :],
            finish_reason=sample.finish_reason,
        )
        for prompt, sample in zip(captured.prompts, captured.samples, strict=True)
    ]


def lost_channels(path: Path) -> int:
    """Of this target: the tiny ones are made with some."""
    return 0 if path.name.startswith("smollm2") else LOST_CHANNELS


class FullForward:
    """Reads Hugging Face's own `hidden_states`, whose index k+1 is layer id k. Its last entry is
    post-norm, so the last block's output is read at the final norm's input."""

    def __init__(self, path: Path, dtype: str) -> None:
        load: Any = AutoModelForCausalLM.from_pretrained
        self.path = path
        self._model: Any = load(path, dtype=getattr(torch, dtype)).eval()
        self._norm = self._model.get_decoder().norm
        self._before_norm: list[torch.Tensor] = []
        self._norm.register_forward_pre_hook(lambda _, args: self._before_norm.append(args[0]))

    def __call__(self, input_ids: np.ndarray) -> Reference:
        self._before_norm.clear()
        tokens = torch.from_numpy(input_ids.astype(np.int64))[None]
        with torch.inference_mode():
            out = self._model(tokens, output_hidden_states=True, use_cache=False)
        blocks = torch.stack([*out.hidden_states[1:-1], self._before_norm[0]], dim=2)[0]
        served, final = (to_wire(x)[0].float().numpy() for x in (blocks, out.hidden_states[-1][0]))
        lost = (blocks != 0) & (blocks.abs() < FP16_LEAST / 16)
        return Reference(served, final, lost.sum(-1).numpy(), out.logits[0].float().numpy())

    def logits(self, states: np.ndarray, final: Final) -> np.ndarray:
        """float32 [n, V]: what the target makes of states float16 [n, H], when they are as `final`
        says."""
        x = torch.from_numpy(states.astype(np.float32)).to(self._norm.weight.dtype)
        with torch.inference_mode():
            x = self._norm(x) if final == "prenorm" else x
            out: np.ndarray = self._model.get_output_embeddings()(x).float().numpy()
        return out


def of_rows(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 of each row, plainly."""
    return np.asarray(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1))


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 of each row, [2, rows]: over all channels, and without the 1% largest, which
    in a model with massive activations would hide every other channel.

    Noise now and then rounds a value to its other bf16 neighbour, and one such channel of a narrow
    model can be 1e-3 of a row: one that is a single step off is forgiven in each row.
    """
    difference = got - want
    rows = np.arange(len(want))
    worst = np.abs(difference).argmax(1)
    step = np.ldexp(1.0, np.frexp(np.maximum(np.abs(got), np.abs(want)))[1] - 8)
    forgiven = np.abs(difference[rows, worst]) <= step[rows, worst]
    difference[rows[forgiven], worst[forgiven]] = 0
    small = np.argsort(np.abs(want).max(0))[: -math.ceil(0.01 * want.shape[1])]
    views = (slice(None), small)
    norms = [np.linalg.norm(difference[:, v], axis=1) for v in views]
    return np.stack(norms) / [np.linalg.norm(want[:, v], axis=1) for v in views]


def test_rows_captured_while_generating_equal_one_full_forward_pass(
    captured: Captured, record_property: Callable[[str, object], None]
):
    worst = 0.0
    for rows, reference in captured.pairs():
        for i, k in enumerate(captured.layer_ids):
            error = errors(rows[:, i], reference.blocks[:, k])
            assert error.max() <= captured.tolerance, (k, error.max())
            worst = max(worst, float(error.max()))
    record_property("worst row's relative L2", f"{worst:.2e}")


def test_layer_ids_shifted_by_one_do_not_pass_for_equal(captured: Captured):
    """Ids shifted by one between tools, same shape, no error."""
    for rows, reference in captured.pairs():
        for i, k in enumerate(captured.layer_ids):
            for other in {max(k - 1, 0), min(k + 1, reference.blocks.shape[1] - 1)} - {k}:
                error = errors(rows[:, i], reference.blocks[:, other])
                assert (error.max(1) > captured.tolerance).all(), (k, other, error.max(1))
                assert (np.median(error, 1) > captured.tolerance).all(), (k, other)


def test_rows_shifted_by_one_do_not_pass_for_equal(captured: Captured):
    """The last sampled token has no row, off by one between ids and rows."""
    for rows, reference in captured.pairs():
        for i, k in enumerate(captured.layer_ids):
            error = errors(rows[1:, i], reference.blocks[:-1, k])
            assert (np.median(error, 1) > captured.tolerance).all(), k


def test_the_last_block_is_served_before_the_final_norm(captured: Captured):
    """Asking for the last block; pre- and post-norm state mixed up."""
    for rows, reference in captured.pairs():
        assert captured.layer_ids[-1] == reference.blocks.shape[1] - 1
        last = rows[:, len(captured.layer_ids) - 1]
        assert errors(last, reference.blocks[:, -1]).max() <= captured.tolerance
        assert (np.median(errors(last, reference.final), 1) > captured.tolerance).all()


def test_the_final_state_equals_that_of_one_full_forward_pass(
    captured: Captured,
    prefilled: list[Sample],
    record_property: Callable[[str, object], None],
):
    """Of every token: of a prompt's, of those in the middle of a chunk, of those sampled."""
    if captured.final == "none":
        pytest.skip("the stream has none")
    worst = 0.0
    for samples in (captured.samples, prefilled):
        for sample, reference in zip(samples, captured.references, strict=True):
            got = sample.hidden_states[:, len(captured.layer_ids)].astype(np.float32)
            error = errors(got, reference.of_final(captured.final))
            assert error.max() <= captured.tolerance, (sample.id, error.max(), error.argmax())
            worst = max(worst, float(error.max()))
    record_property("worst row's relative L2", f"{worst:.2e}")


def test_the_final_state_makes_the_targets_logits(
    captured: Captured, record_property: Callable[[str, object], None]
):
    """Pre-norm and post-norm final state mixed up: same shape, no error, other labels. Taken for
    the other kind than the descriptor says it must be found out."""
    if captured.final == "none":
        pytest.skip("the stream has none")
    other: Final = "prenorm" if captured.final == "postnorm" else "postnorm"
    worst, least = 0.0, math.inf
    for sample, reference in zip(captured.samples, captured.references, strict=True):
        states = sample.hidden_states[:, len(captured.layer_ids)]
        right, wrong = (
            of_rows(captured.forward.logits(states, kind), reference.logits)
            for kind in (captured.final, other)
        )
        worst, least = max(worst, float(right.max())), min(least, float(wrong.min()))
    record_property("logits' worst relative L2", f"{worst:.1e}; of the other kind {least:.2g}")
    assert worst <= LOGITS_TOLERANCE
    assert least >= OTHER_LOGITS


def test_what_stands_for_the_state_before_the_norm_makes_the_targets_logits(
    captured: Captured, record_property: Callable[[str, object], None]
):
    """For trainers that apply the norm themselves, of an engine that has the state after only."""
    if captured.final != "postnorm":
        pytest.skip("the stream has none after the norm")
    norm, worst = read_final_norm(captured.forward.path), 0.0
    for sample, reference in zip(captured.samples, captured.references, strict=True):
        states = torch.from_numpy(sample.hidden_states[:, len(captured.layer_ids)])
        logits = captured.forward.logits(norm.undone(states).numpy(), "prenorm")
        worst = max(worst, float(of_rows(logits, reference.logits).max()))
    record_property("logits' worst relative L2", f"{worst:.1e}")
    assert worst <= LOGITS_TOLERANCE


def assert_sampled_from(
    samples: Sequence[Sample], forward: FullForward, layers: int, final: Final
) -> None:
    """Greedy samples: the head makes of each row's final state the token that came next."""
    for sample in samples:
        first = int((sample.loss_mask == 0).sum()) - 1  # the prompt's last row has the first
        logits = forward.logits(sample.hidden_states[first:, layers], final)
        chosen = np.take_along_axis(logits, sample.input_ids[first + 1 :, None], 1)[:, 0]
        behind = (logits.max(1) - chosen) / logits.std(1)
        assert behind.max() <= NEARLY_BEST, (sample.id, behind.max(), behind.argmax())


def test_every_sample_has_one_id_more_than_rows(captured: Captured):
    """The last sampled token was never fed, so it is a label without a row."""
    for sample, prompt in zip(captured.samples, captured.prompts, strict=True):
        p, n = len(prompt.input_ids), len(sample.hidden_states)
        response = len(sample.input_ids) - p
        assert n == p + response - 1
        np.testing.assert_array_equal(sample.input_ids[:p], prompt.input_ids)
        assert sample.loss_mask.tolist() == [0] * p + [1] * response
        assert sample.key == prompt.key
        assert sample.finish_reason == ("length" if response == captured.new_tokens else "stop")


def test_counters_are_the_sums_over_a_samples_own_rows(captured: Captured):
    """Zeros for all of them look like those of a sound target; `inexact` tells. Of small values
    noise decides whether they are exact: of the least and of all others it does not."""
    for sample, reference in zip(captured.samples, captured.references, strict=True):
        assert len(sample.counters) == sample.hidden_states.shape[1] == captured.layers
        assert (reference.lost >= captured.lost_channels).all()
        for i, k in enumerate(captured.layer_ids):
            counters = sample.counters[i]
            magnitude = np.abs(np.ascontiguousarray(sample.hidden_states[:, i]))
            assert counters.nonfinite == 0
            assert counters.zero_rows == 0
            assert counters.saturated == (magnitude == 65504).sum()
            small = (magnitude <= BF16_EXACT_FROM).sum()
            assert reference.lost[:, k].sum() <= counters.inexact <= small, (sample.id, k)
        if captured.final == "prenorm":
            assert reference.lost[:, -1].sum() <= sample.counters[-1].inexact


def test_prefill_of_a_response_makes_the_sample_that_live_capture_made(
    captured: Captured, prefilled: list[Sample], record_property: Callable[[str, object], None]
):
    worst = 0.0
    for sample, live in zip(prefilled, captured.samples, strict=True):
        assert (sample.id, sample.key) == (live.id, live.key)
        np.testing.assert_array_equal(sample.input_ids, live.input_ids)
        np.testing.assert_array_equal(sample.loss_mask, live.loss_mask)
        assert sample.hidden_states.shape == live.hidden_states.shape
        assert (sample.finish_reason, sample.sampling) == (live.finish_reason, {})
        for i, k in enumerate(captured.layer_ids):
            got, want = (x.hidden_states[:, i].astype(np.float32) for x in (sample, live))
            error = errors(got, want)
            assert error.max() <= captured.tolerance, (sample.id, k, error.max())
            worst = max(worst, float(error.max()))
    record_property("worst row's relative L2", f"{worst:.2e}")


def test_rows_captured_in_prefill_mode_equal_one_full_forward_pass(
    captured: Captured, prefilled: list[Sample], record_property: Callable[[str, object], None]
):
    worst = 0.0
    for sample, reference in zip(prefilled, captured.references, strict=True):
        for i, k in enumerate(captured.layer_ids):
            error = errors(sample.hidden_states[:, i].astype(np.float32), reference.blocks[:, k])
            assert error.max() <= captured.tolerance, (sample.id, k, error.max())
            worst = max(worst, float(error.max()))
    record_property("worst row's relative L2", f"{worst:.2e}")
