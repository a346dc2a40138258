from pathlib import Path

import pytest
import torch

import smollm2_samples
import tiny_target
from draftfeed_consumer.errors import DrafterError, TrainerError
from draftfeed_consumer.evaluate import Decoded, accepted_length, heldout_loss
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


def test_the_mean_counts_tokens_and_calls_not_prompts() -> None:
    decoded = [Decoded([3, 1], "equal"), Decoded([], "equal"), Decoded([1, 2, 1], "rounding")]
    found = accepted_length(decoded, block_size=4)
    assert found == (8 / 5, [2 / 5, 1 / 5, 0.0], 8, 5, True)
    assert found.mean == 1 + sum(found.by_position)
    wrong = accepted_length([*decoded, Decoded([1], "different")], block_size=4)
    assert not wrong.same_as_greedy


def test_texts_of_one_token_have_nothing_to_count() -> None:
    with pytest.raises(DrafterError, match="nothing was decoded"):
        accepted_length([Decoded([], "equal")], block_size=4)


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
