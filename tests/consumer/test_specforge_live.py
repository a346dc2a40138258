"""SpecForge fed from a stream. The tiny target is random; what is learned from it is nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from specforge.runtime.data_plane import streaming_ref_channel

import smollm2_samples
import tiny_target
from draftfeed_consumer import drafter_files
from draftfeed_consumer.errors import StreamClosed, StreamLost, TrainerError
from draftfeed_consumer.evaluate import accepted_length, decode, load_target
from draftfeed_consumer.policy import Policy
from draftfeed_consumer.trainers import TrainerRun, TrainResult, dflash
from draftfeed_consumer.trainers.exports import has_label
from draftfeed_consumer.trainers.specforge import check, train
from draftfeed_consumer.trainers.specforge_algorithms import dflash_tensors
from draftfeed_consumer.trainers.specforge_checkpoints import STATE_FILE, latest_checkpoint
from draftfeed_consumer.trainers.target_weights import FrozenParts, frozen_parts
from memory_stream import Item, MemoryStream, checkpoints, sample_id
from waiting import eventually

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent


def trained_on(
    items: list[Item], target: Path, out: Path, **options: object
) -> tuple[MemoryStream, TrainResult]:
    stream = MemoryStream(tiny_target.DESCRIPTOR, items)
    return stream, train(stream, tiny_target.run(target, out, **options))


def test_every_sample_is_acknowledged_once_in_whole_steps(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    items = tiny_target.items(12)
    stream, result = trained_on(
        items, tiny_target_dir, tmp_path, batch_size=2, accumulation_steps=2, save_interval_steps=2
    )
    assert [len(step) for step in stream.steps] == [4, 4, 4]
    assert stream.checkpoint_samples == 8
    assert sorted(stream.trained_ids) == [item["id"] for item in items]
    assert result == (3, 12, 0, (), tmp_path / "drafter-1.2-step3")
    assert all({"loss", "acc"} <= metrics.keys() for metrics in stream.metrics)
    assert not stream.held


def test_the_commit_comes_when_the_checkpoint_is_on_the_disk(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, bool, list[str]]] = []

    def on_commit(state: dict[str, Any]) -> None:
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        saved = dflash.read_state(newest)
        files = sorted(path.name for path in newest.iterdir())
        seen.append((saved["global_step"], saved["draftfeed"] == state, files))

    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(5), on_commit=on_commit)
    train(stream, tiny_target.run(tiny_target_dir, tmp_path, save_interval_steps=2))
    files = ["training_state.pt", "training_state_rank0.pt"]
    assert seen == [(2, True, files), (4, True, files), (5, True, files)]
    assert checkpoints(tmp_path) == ["drafter-1.2-step4", "drafter-1.3-step5"]


def test_a_checkpoint_that_is_wanted_is_made_after_the_next_step(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    states: list[int] = []
    stream = MemoryStream(
        tiny_target.DESCRIPTOR,
        tiny_target.items(6),
        on_commit=lambda state: states.append(len(state["trained"])),
    )
    stream.checkpoint_wanted = True
    train(stream, tiny_target.run(tiny_target_dir, tmp_path, save_interval_steps=1000))
    assert states == [1, 6]


def test_a_tail_that_fills_no_step_is_reported_and_not_trained(
    tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream, result = trained_on(tiny_target.items(7), tiny_target_dir, tmp_path, batch_size=4)
    assert result.tail == (sample_id(4), sample_id(5), sample_id(6))
    assert stream.tails == list(result.tail), "or the producer waits for them for ever"
    assert stream.trained_ids == [sample_id(n) for n in range(4)]
    assert "3 samples did not fill a last step" in caplog.text


def test_samples_are_released_before_a_step_is_complete(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Otherwise a buffer smaller than one optimizer step would be a deadlock."""
    stream, _ = trained_on(tiny_target.items(32), tiny_target_dir, tmp_path, batch_size=8)
    assert stream.released == [sample_id(n) for n in range(32)]
    assert stream.most_held <= 17


def test_nan_rows_do_not_abort_the_run(tiny_target_dir: Path, tmp_path: Path) -> None:
    items = tiny_target.items(6)
    items[2]["hidden_states"][3, 1, 5] = float("nan")
    items[4]["hidden_states"][0, 0, 0] = float("inf")
    stream, result = trained_on(items, tiny_target_dir, tmp_path)
    assert stream.rejected == {
        sample_id(2): "values that are not finite (layers 1)",
        sample_id(4): "values that are not finite (layers 0)",
    }
    assert result.rejected == 2
    assert stream.trained_ids == [sample_id(n) for n in (0, 1, 3, 5)]
    weights = dflash.read_state(tmp_path / "drafter-1.1-step4")["draft_state_dict"]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_all_zero_rows_are_rejected(tiny_target_dir: Path, tmp_path: Path) -> None:
    items = tiny_target.items(3)
    items[1]["hidden_states"][7, 2] = 0
    stream, _ = trained_on(items, tiny_target_dir, tmp_path)
    assert list(stream.rejected) == [sample_id(1)]


def test_fp16_overflow_is_a_warning_or_a_rejection(
    tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = tiny_target.items(2)
    clamped = items[0]["counters"][0]._replace(saturated=3)
    items[0]["counters"] = (clamped, *items[0]["counters"][1:])
    stream, _ = trained_on(items, tiny_target_dir, tmp_path / "warn")
    assert not stream.rejected
    assert "clamped to fp16's range (layers 0)" in caplog.text
    strict = TrainerRun(
        target=tiny_target_dir,
        output_dir=tmp_path / "reject",
        options={"mask_token_id": 3, "num_anchors": 4},
        policy=Policy(saturated="reject"),
    )
    stream = MemoryStream(tiny_target.DESCRIPTOR, items)
    train(stream, strict)
    assert list(stream.rejected) == [sample_id(0)]


def test_a_response_too_short_for_dflash_is_rejected(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Its two response tokens are adjacent, but the second one has no row."""
    items = [tiny_target.item(0), tiny_target.item(1, rows=5, prompt_tokens=4), tiny_target.item(2)]
    stream, _ = trained_on(items, tiny_target_dir, tmp_path)
    assert list(stream.rejected) == [sample_id(1)]
    assert stream.trained_ids == [sample_id(0), sample_id(2)]


def test_the_last_id_which_has_no_row_is_cut_off() -> None:
    item = tiny_target.item(0, rows=20)
    tensors = dflash_tensors(item)
    assert len(item["input_ids"]) == 21
    assert tensors["input_ids"].tolist() == [item["input_ids"][:20].tolist()]
    assert tensors["loss_mask"].tolist() == [[0] * 4 + [1] * 16]
    assert tensors["hidden_states"].shape == (1, 20, 3 * tiny_target.HIDDEN)
    assert torch.equal(tensors["hidden_states"][0, 7], item["hidden_states"][7].flatten())
    item["hidden_states"].zero_()
    assert tensors["hidden_states"].any(), "the stream's memory may be used again after release"


def test_a_mask_needs_two_adjacent_tokens_with_rows() -> None:
    item = tiny_target.item(0, rows=6, prompt_tokens=4)
    assert has_label(item)
    item["loss_mask"][4] = 0
    assert not has_label(item)


def test_a_lost_stream_is_an_error_and_not_an_end(tiny_target_dir: Path, tmp_path: Path) -> None:
    lost = StreamLost("tcp://127.0.0.1:1", 600)
    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(6), fail=lost)
    with pytest.raises(StreamLost) as caught:
        train(stream, tiny_target.run(tiny_target_dir, tmp_path, save_interval_steps=2))
    assert caught.value is lost
    assert not torch.distributed.is_initialized()
    assert not [t for t in threading.enumerate() if "draftfeed" in t.name]


def test_an_acknowledgement_that_fails_is_raised_as_it_is(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    class Fenced(MemoryStream):
        def trained(self, ids: Any, step: int, metrics: Any = None) -> None:
            raise ValueError("another run has taken over")

    with pytest.raises(ValueError, match=r"^another run has taken over$"):
        train(
            Fenced(tiny_target.DESCRIPTOR, tiny_target.items(6)),
            tiny_target.run(tiny_target_dir, tmp_path),
        )


def test_an_interrupt_stays_an_interrupt(tiny_target_dir: Path, tmp_path: Path) -> None:
    class Interrupting(MemoryStream):
        def trained(self, ids: Any, step: int, metrics: Any = None) -> None:
            raise KeyboardInterrupt

    stream = Interrupting(tiny_target.DESCRIPTOR, tiny_target.items(6))
    with pytest.raises(KeyboardInterrupt):
        train(stream, tiny_target.run(tiny_target_dir, tmp_path))


def main_thread_waits() -> bool:
    """In SpecForge's queue. What is imported or set up before may swallow an interrupt."""
    ident = threading.main_thread().ident
    assert ident is not None
    frame: FrameType | None = sys._current_frames()[ident]
    while frame is not None and frame.f_code.co_filename != streaming_ref_channel.__file__:
        frame = frame.f_back
    return frame is not None


def test_a_signal_ends_training_on_a_stream_that_gives_nothing(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    closed = threading.Event()

    class Silent(MemoryStream):
        def __iter__(self) -> Iterator[Item]:
            eventually(main_thread_waits, "the main thread waits for samples")
            while main_thread_waits():  # one that falls into a destructor is swallowed there
                os.kill(os.getpid(), signal.SIGINT)
                closed.wait(10)
            assert closed.wait(60)
            raise StreamClosed

    stream = Silent(tiny_target.DESCRIPTOR, [])
    with pytest.raises(KeyboardInterrupt):
        train(stream, tiny_target.run(tiny_target_dir, tmp_path))
    assert not torch.distributed.is_initialized()
    closed.set()
    for thread in threading.enumerate():
        if thread.name == "draftfeed-feeder":
            thread.join(10)
            assert not thread.is_alive()


def test_a_checkpoint_that_cannot_be_written_is_named(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "drafter-1.1-step1").write_text("a file is in the way")
    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(1))
    with pytest.raises(RuntimeError, match="checkpoint save failed"):
        train(stream, tiny_target.run(tiny_target_dir, tmp_path))


def test_a_stream_without_samples_ends_normally(tiny_target_dir: Path, tmp_path: Path) -> None:
    _, result = trained_on([], tiny_target_dir, tmp_path)
    assert result == (0, 0, 0, (), None)


def test_a_stream_of_another_target_is_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    stream = MemoryStream(smollm2_samples.DESCRIPTOR, [])
    with pytest.raises(TrainerError, match="hidden_size is 32, the stream's is 576"):
        train(stream, tiny_target.run(tiny_target_dir, tmp_path))


def frozen(target: Path) -> FrozenParts:
    return frozen_parts(target, tiny_target.HIDDEN, tiny_target.VOCAB, torch.float32)


@pytest.mark.parametrize(
    ("said", "there", "tied"),
    [
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, True, False),
        ({"tie_word_embeddings": None}, True, False),
        ({"tie_word_embeddings": None}, False, True),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, False, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True, False),
    ],
)
def test_head_is_the_embedding_where_the_target_says_so(
    tiny_target_dir: Path, tmp_path: Path, said: dict[str, Any], there: bool, tied: bool
) -> None:
    """A multimodal config says it in the text model's part only; then a loader that looks at the
    top trains on a head that is none."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    config = {**json.loads((target / "config.json").read_text()), **said}
    config = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    if not there:
        weights.pop("lm_head.weight", None)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    parts = frozen(target)
    assert torch.equal(parts.lm_head.weight, parts.embed_tokens.weight) == tied


def test_head_that_is_missing_is_named(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    weights = load_file(target / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainerError, match=r"there is no lm_head\.weight or"):
        frozen(target)


def test_the_embedding_of_a_multimodal_target_is_found(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Qwen3.5 and 3.6 name it so. SpecForge's loader ends at it, after the stream was taken. What
    belongs to the drafter that comes with such a target is not its embedding."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    weights = load_file(target / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): weights[name] for name in weights}
    renamed["model.visual.patch_embed.weight"] = torch.zeros(4, 4)
    renamed["mtp.embed_tokens.weight"] = torch.zeros(4, 4)
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    found, plain = frozen(target), frozen(tiny_target_dir)
    assert torch.equal(found.embed_tokens.weight, plain.embed_tokens.weight)
    assert torch.equal(found.lm_head.weight, plain.lm_head.weight)
    del renamed["model.language_model.embed_tokens.weight"]
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerError, match=r"there is no model\.embed_tokens\.weight or") as caught:
        frozen(target)
    assert "\n" not in str(caught.value)


def test_the_checkpoints_of_another_run_are_not_overwritten(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    trained_on(tiny_target.items(1), tiny_target_dir, tmp_path)
    with pytest.raises(TrainerError, match=r'options\.resume_from = "latest"'):
        check(tiny_target.run(tiny_target_dir, tmp_path))


def test_damaged_checkpoint_is_named_in_one_line(tiny_target_dir: Path, tmp_path: Path) -> None:
    _, result = trained_on(tiny_target.items(1), tiny_target_dir, tmp_path)
    assert result.checkpoint is not None
    whole = (result.checkpoint / STATE_FILE).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        (result.checkpoint / STATE_FILE).write_bytes(damaged)
        with pytest.raises(TrainerError, match="cannot be read as a checkpoint") as caught:
            trained_on(tiny_target.items(2), tiny_target_dir, tmp_path, resume_from="latest")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", ["{}", "[]", "{", '{"num_attention_heads": 2}'])
def test_target_whose_config_is_not_one_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    stream = MemoryStream(tiny_target.DESCRIPTOR, [])
    with pytest.raises(TrainerError, match=r"its config\.json "):
        train(stream, tiny_target.run(tmp_path, tmp_path / "out"))


def test_resume_latest_starts_afresh_and_then_goes_on(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    def go(count: int) -> tuple[MemoryStream, TrainResult]:
        return trained_on(tiny_target.items(count), tiny_target_dir, tmp_path, resume_from="latest")

    first, _ = go(3)
    second, result = go(5)
    assert first.trained_ids == [sample_id(n) for n in range(3)]
    assert second.trained_ids == [sample_id(3), sample_id(4)]
    assert result.steps == 5


def test_nothing_of_ours_stays_in_the_process(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_SHARDING", "SHARD_GRAD_OP")
    monkeypatch.chdir(tmp_path)
    before, threads = dict(os.environ), torch.get_num_threads()
    trained_on(tiny_target.items(2), tiny_target_dir, tmp_path / "out")
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_killed_in_a_step_and_resumed_from_an_older_checkpoint(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Killed after step 7 of 10, resumed from step 4 although step 6 was saved as well."""
    out = tmp_path / "out"
    killed = _child(tiny_target_dir, out, kill_at=7, count=20)
    assert killed.returncode == -9, killed.stderr
    acks = [json.loads(line) for line in (out / "acks.jsonl").read_text().splitlines()]
    assert [ack["step"] for ack in acks] == list(range(1, 8))
    assert checkpoints(out) == ["drafter-1.1-step2", "drafter-1.2-step4", "drafter-1.3-step6"]
    before = [id for ack in acks if ack["step"] <= 4 for id in ack["ids"]]

    stream, result = trained_on(
        tiny_target.items(20),
        tiny_target_dir,
        out,
        batch_size=2,
        save_interval_steps=2,
        max_checkpoints=9,
        resume_from=str(out / "drafter-1.2-step4"),
    )
    after = [str(id) for id in stream.trained_ids]
    assert sorted(before + after) == sorted(str(sample_id(n)) for n in range(20))
    assert result.steps == 10
    assert result.checkpoint is not None
    last = dflash.read_state(result.checkpoint)["draftfeed"]
    assert last["trained"] == stream.state_dict()["trained"]


def _child(target: Path, out: Path, kill_at: int, count: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "train_child.py"), str(target), str(out)]
    return subprocess.run(
        [*command, str(kill_at), str(count)], capture_output=True, text=True, timeout=120
    )


def test_a_resumed_run_continues_as_if_it_had_not_stopped(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    whole, _ = trained_on(tiny_target.items(6), tiny_target_dir, tmp_path / "whole")
    trained_on(tiny_target.items(3), tiny_target_dir, tmp_path / "cut")
    rest, _ = trained_on(
        tiny_target.items(6), tiny_target_dir, tmp_path / "cut", resume_from="latest"
    )
    expected = [metrics["loss"] for metrics in whole.metrics[3:]]
    assert [metrics["loss"] for metrics in rest.metrics] == pytest.approx(expected, abs=1e-5)


@pytest.mark.timeout(1800)
def test_many_passes_over_32_samples_teach_them_by_heart(
    smollm2_dir: Path,
    smollm2_items: list[Item],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Then it proposes what the target would have said: 2.2 tokens a call. Trained on rows that
    are shifted by one it stays at 1.2."""
    passes = 9
    items = [
        {**item, "id": sample_id(item["id"].ordinal, epoch)}
        for epoch in range(passes)
        for item in smollm2_items
    ]
    run = TrainerRun(
        target=smollm2_dir,
        output_dir=tmp_path,
        options={
            "init": "target",
            "block_size": 4,
            "num_anchors": 16,
            "gamma": 2.0,
            "batch_size": 2,
            "learning_rate": 2e-3,
            "save_interval_steps": 1000,
        },
    )
    stream = MemoryStream(smollm2_samples.DESCRIPTOR, items)
    result = train(stream, run)
    assert sorted(stream.trained_ids) == sorted(item["id"] for item in items)
    assert result.checkpoint is not None
    drafter = drafter_files.load(drafter_files.read(result.checkpoint))
    model = load_target(smollm2_dir)
    prompts = [_prompt(item) for item in smollm2_items[::4]]
    stops = [model.generation_config.eos_token_id]
    found = accepted_length([*decode(drafter, model, prompts, 16, stops)], drafter.block_size)
    record_property("accepted length, tokens a target call", f"{found.mean:.2f}")
    assert found.same_as_greedy
    assert found.mean >= 1.5, found


def _prompt(item: Item) -> list[int]:
    return item["input_ids"][item["loss_mask"] == 0].tolist()
