from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import smollm2_samples
import tiny_target
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.evaluate import _watched, accepted_length, heldout_loss, is_greedy
from draftfeed_consumer.trainers import dflash
from draftfeed_consumer.trainers.specforge import draft_config, train
from memory_stream import Item, MemoryStream

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkpoint(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_target.run(tiny_target_dir, tmp_path_factory.mktemp("drafter"))
    result = train(MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(8)), run)
    assert result.checkpoint is not None
    return result.checkpoint


def config(target: Path, **options: object) -> dflash.DraftConfig:
    run = tiny_target.run(target, target / "unused", **options)
    return draft_config(run, tiny_target.LAYER_IDS)


@pytest.fixture
def tiny_model(tiny_target_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()


def test_heldout_loss_is_the_same_each_time(tiny_target_dir: Path, checkpoint: Path) -> None:
    drafter = config(tiny_target_dir)
    samples = tiny_target.items(4)
    once = heldout_loss(samples, tiny_target_dir, drafter, checkpoint)
    state = torch.get_rng_state()
    torch.rand(3)
    assert heldout_loss(samples, tiny_target_dir, drafter, checkpoint) == once
    torch.set_rng_state(state)
    assert heldout_loss(samples, tiny_target_dir, drafter, None) != once


def test_the_untrained_drafter_is_the_one_that_training_starts_from(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    run = tiny_target.run(tiny_target_dir, tmp_path, learning_rate=0.0)
    result = train(MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(2)), run)
    saved = dflash.load_config(tmp_path)
    assert saved == draft_config(run, tiny_target.LAYER_IDS)
    samples = tiny_target.items(3)
    losses = [heldout_loss(samples, tiny_target_dir, saved, at) for at in (None, result.checkpoint)]
    assert losses[0] == losses[1]


def test_samples_without_labels_are_left_out(tiny_target_dir: Path) -> None:
    drafter = config(tiny_target_dir)
    short = tiny_target.item(9, rows=5, prompt_tokens=4)
    some = heldout_loss([tiny_target.item(0)], tiny_target_dir, drafter, None)
    assert heldout_loss([tiny_target.item(0), short], tiny_target_dir, drafter, None) == some
    with pytest.raises(ValueError, match="no sample has a label"):
        heldout_loss([short], tiny_target_dir, drafter, None)


def test_another_drafters_checkpoint_is_refused(tiny_target_dir: Path, checkpoint: Path) -> None:
    deeper = config(tiny_target_dir, num_layers=2)
    with pytest.raises(TrainerError, match="holds another drafter"):
        heldout_loss(tiny_target.items(1), tiny_target_dir, deeper, checkpoint)
    with pytest.raises(TrainerError, match="is not a checkpoint"):
        heldout_loss(tiny_target.items(1), tiny_target_dir, deeper, tiny_target_dir)


@pytest.mark.parametrize("init", ["random", "target"])
def test_speculative_decoding_prints_what_greedy_decoding_prints(
    tiny_target_dir: Path, tiny_model: Any, init: str
) -> None:
    prompts = [[5, 6, 7, 8], [90, 9, 11]]
    found = accepted_length(prompts, tiny_target_dir, config(tiny_target_dir, init=init), None, 12)
    assert found.same_as_greedy
    assert found.new_tokens <= 2 * 11
    assert found.mean == found.new_tokens / found.target_calls >= 1.0


def test_without_accepted_drafts_every_call_yields_one_token(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """A drafter whose output is zero always proposes token 0, which this target never prefers."""
    drafter = config(tiny_target_dir)
    weights = dflash.build_drafter(drafter, tiny_target_dir).state_dict()
    weights["norm.weight"].zero_()
    torch.save({"draft_state_dict": weights}, tmp_path / dflash.STATE_FILE)
    found = accepted_length([[5, 6, 7], [8, 9]], tiny_target_dir, drafter, tmp_path, 16)
    assert found == (1.0, 30, 30, True)


def test_output_that_is_not_greedy_is_found_out(tiny_model: Any) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])
    greedy = tiny_model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert is_greedy(tiny_model, greedy, 4)
    wrong = greedy.clone()
    wrong[0, 6] = (wrong[0, 6] + 1) % tiny_target.VOCAB
    assert not is_greedy(tiny_model, wrong, 4)


def test_specforge_reads_the_layers_that_the_stream_carries(tiny_model: Any) -> None:
    """Layer ids shifted by one have the same shape and give no error anywhere."""
    from specforge.modeling.draft.dflash import extract_context_feature

    ids = torch.arange(5, 25)
    ours = smollm2_samples.forward_states(tiny_model, ids, tiny_target.LAYER_IDS)
    outputs = tiny_model(ids[None], output_hidden_states=True).hidden_states
    theirs = extract_context_feature(outputs, list(tiny_target.LAYER_IDS))
    torch.testing.assert_close(theirs[0], ours.flatten(1))
    shifted = extract_context_feature(outputs, [layer + 1 for layer in tiny_target.LAYER_IDS])
    assert (shifted[0] - ours.flatten(1)).norm() > 0.1 * ours.norm()


def test_the_last_blocks_state_is_taken_before_the_final_norm(tiny_model: Any) -> None:
    """transformers' own last hidden state is behind the norm, the stream's is not."""
    last = tiny_target.LAYERS - 1
    ids = torch.arange(5, 25)
    ours = smollm2_samples.forward_states(tiny_model, ids, (last,))[:, 0]
    plain = tiny_model(ids[None], output_hidden_states=True).hidden_states[-1][0]
    with _watched(tiny_model, (1, last)):
        seen = tiny_model(ids[None], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(seen, ours)
    assert (plain - ours).norm() > 0.1 * ours.norm()


def test_the_drafters_config_is_the_targets_where_it_must_be(smollm2_dir: Path) -> None:
    run = tiny_target.run(smollm2_dir, smollm2_dir / "unused", mask_token_id=None)
    drafter = draft_config(run, smollm2_samples.LAYER_IDS)
    assert drafter.mask_token_id == 16
    assert drafter.architecture["rope_theta"] == 100000.0
    model = dflash.build_drafter(drafter, smollm2_dir)
    assert model.target_layer_ids == [1, 8, 14, 20, 27]
    assert model.config.rope_parameters["rope_theta"] == 100000.0


def test_training_lowers_the_loss_on_samples_it_has_not_seen(
    smollm2_dir: Path, smollm2_items: list[Item], tmp_path: Path
) -> None:
    run = tiny_target.run(smollm2_dir, tmp_path, mask_token_id=None, init="target", num_anchors=8)
    stream = MemoryStream(smollm2_samples.DESCRIPTOR, smollm2_items[:24])
    result = train(stream, run)
    drafter = draft_config(run, smollm2_samples.LAYER_IDS)
    heldout = smollm2_items[24:]
    untrained = heldout_loss(heldout, smollm2_dir, drafter, None)
    assert heldout_loss(heldout, smollm2_dir, drafter, result.checkpoint) < 0.75 * untrained
