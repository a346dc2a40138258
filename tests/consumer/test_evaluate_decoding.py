"""Speculative decoding prints what the target alone prints, whatever the drafter says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import smollm2_samples
import tiny_target
from draftfeed_consumer.decoding import greedy, is_greedy, speculate, tapped
from draftfeed_consumer.evaluate import decode
from draftfeed_consumer.trainers import dflash
from draftfeed_consumer.trainers.specforge import draft_config
from tiny_models import make_qwen3, make_qwen35

PROMPTS = [[5, 6, 7, 8], [90, 9, 11]]
TARGETS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_target.make,
    "qwen3": make_qwen3,
    "qwen3.5": make_qwen35,  # its recurrent layers cannot take tokens back
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGETS[request.param](tmp_path_factory.mktemp("target") / request.param)


@pytest.fixture
def model(target: Path) -> Any:
    return load(target)


def load(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def drafter_of(target: Path, layer_ids: tuple[int, ...] = tiny_target.LAYER_IDS) -> Any:
    run = tiny_target.run(target, target / "unused")
    return dflash.build_drafter(draft_config(run, layer_ids), target).eval()


def let_it_draft(drafter: Any, model: Any, text: list[int], wrong: set[int]) -> None:
    """The drafter's forward pass now drafts `text`, but for another token at some positions."""
    head = model.get_output_embeddings().weight
    drafts = [(id + 1) % len(head) if place in wrong else id for place, id in enumerate(text)]
    # Along an output vector of the head, its own token has the largest logit.
    rows = torch.nn.functional.normalize(head, dim=1)
    assert ((rows @ rows.T - torch.eye(len(rows))).amax() < 0.99).all()

    def forward(position_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        places = position_ids[0, -drafter.block_size :].clamp(max=len(drafts) - 1)
        tokens = [drafts[place] for place in places.tolist()]
        unit = head / head.norm(dim=1, keepdim=True) ** 2
        return unit[tokens][None]

    drafter.forward = forward


def test_a_random_drafter_changes_no_token(target: Path, model: Any) -> None:
    drafter = drafter_of(target)
    for prompt in PROMPTS:
        found = speculate(drafter, model, prompt, 12, ())
        assert found.tokens == greedy(model, prompt, 12, ())
        assert len(found.tokens) == 12 == 1 + sum(found.yields)


def test_accepted_drafts_are_counted_and_rejected_ones_leave_no_trace(
    target: Path, model: Any
) -> None:
    """Drafts are right but at some positions; a cache that keeps a rejected token, or a recurrent
    state that has seen one, makes other text from there on."""
    prompt = PROMPTS[0]
    own = greedy(model, prompt, 20, ())
    drafter = drafter_of(target)
    assert drafter.block_size == 4
    # The text's tokens are at positions 4 to 23; the first one, at 4, begins the first block.
    let_it_draft(drafter, model, [*prompt, *own], wrong={6, 10, 11, 16})
    found = speculate(drafter, model, prompt, 20, ())
    assert found.tokens == own
    # Blocks begin at 4 (6 is wrong), 6, 10 (11 is), 11, 15 (16 is), 16, 20, which the limit cuts.
    assert found.yields == [2, 4, 1, 4, 1, 4, 3]


def test_the_text_ends_where_it_ends_without_a_drafter(target: Path, model: Any) -> None:
    prompt = PROMPTS[1]
    own = greedy(model, prompt, 20, ())
    stop = own[5]
    drafter = drafter_of(target)
    let_it_draft(drafter, model, [*prompt, *own], wrong=set())
    found = speculate(drafter, model, prompt, 20, (stop,))
    assert found.tokens == own[: own.index(stop) + 1] == greedy(model, prompt, 20, (stop,))
    assert sum(found.yields) == len(found.tokens) - 1


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_specforges_own_loop_gives_the_same(name: str, tmp_path: Path) -> None:
    """Its own: `spec_generate`, which no target with recurrent layers can run."""
    target = TARGETS[name](tmp_path / name)
    model, prompt = load(target), PROMPTS[0]
    own = greedy(model, prompt, 20, ())
    drafter = drafter_of(target)
    let_it_draft(drafter, model, [*prompt, *own], wrong={6, 10, 11, 16})
    theirs = drafter.spec_generate(model, torch.tensor([prompt]), 20, None, temperature=0.0)
    assert theirs[0, 4:].tolist() == speculate(drafter, model, prompt, 20, ()).tokens


def test_specforge_feeds_the_drafter_the_same_states(tmp_path: Path) -> None:
    """Layer ids shifted by one have the same shape and give no error anywhere."""
    target = make_qwen3(tmp_path / "qwen3")
    model, drafter = load(target), drafter_of(target)
    seen: list[torch.Tensor] = []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["target_hidden"]), with_kwargs=True
    )
    prompt = PROMPTS[0]
    speculate(drafter, model, prompt, 4, ())
    ours = seen.copy()
    seen.clear()
    drafter.spec_generate(model, torch.tensor([prompt]), 4, None, temperature=0.0)
    for mine, theirs in zip(ours, seen, strict=False):
        torch.testing.assert_close(mine, theirs)
    states = smollm2_samples.forward_states(model, torch.tensor(prompt), tiny_target.LAYER_IDS)
    torch.testing.assert_close(ours[0][0], states.flatten(1))


def test_the_last_blocks_state_is_taken_before_the_final_norm(tmp_path: Path) -> None:
    """transformers' own last hidden state is behind the norm, the stream's is not."""
    model = load(tiny_target.make(tmp_path / "llama"))
    last, ids = tiny_target.LAYERS - 1, torch.arange(5, 25)
    with tapped(model, (1, last)) as states:
        plain = model(ids[None], output_hidden_states=True).hidden_states[-1]
    ours = smollm2_samples.forward_states(model, ids, (last,))[:, 0]
    torch.testing.assert_close(states[last][0], ours)
    assert (plain[0] - ours).norm() > 0.1 * ours.norm()


def test_output_that_is_not_greedy_is_found_out(model: Any) -> None:
    prompt = PROMPTS[0]
    own = greedy(model, prompt, 6, ())
    assert is_greedy(model, prompt, own)
    second = model(torch.tensor([[*prompt, *own[:2]]])).logits[0, -1].topk(2).indices[1]
    assert not is_greedy(model, prompt, [*own[:2], int(second), *own[3:]])


def test_a_target_that_answers_blocks_otherwise_is_found_out(target: Path, model: Any) -> None:
    """As a wrong mask or a cache out of step would make it: passes over one token are right."""

    def shift(module: Any, inputs: Any, kwargs: Any, output: Any) -> None:
        if kwargs["logits_to_keep"] > 1:
            output.logits = output.logits.roll(1, dims=-1)

    drafter = drafter_of(target)
    hook = model.register_forward_hook(shift, with_kwargs=True)
    tokens = speculate(drafter, model, PROMPTS[0], 8, ()).tokens
    hook.remove()
    assert tokens != greedy(model, PROMPTS[0], 8, ())
    assert not is_greedy(model, PROMPTS[0], tokens)
    assert [one.greedy for one in decode(drafter, model, PROMPTS, 8, ())] == ["equal", "equal"]
