"""`[output] conversations`: what was generated as JSON lines, each prompt once whatever happens."""

import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import samples
import tiny_models
from draftfeed_producer.archive import Archive, ArchiveConfig, ArchivedSpool
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.conversations import Conversations, OutputConfig, Writer
from draftfeed_producer.engines import (
    CaptureConfig,
    SamplingConfig,
    SyntheticConfig,
    TransformersConfig,
)
from draftfeed_producer.errors import OutputFileError
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import Prompt, PromptFile, PromptsConfig
from draftfeed_producer.service import ProducerService
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.files import free_bytes
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.target import TargetConfig
from draftfeed_proto.ids import IdSet
from draftfeed_proto.sample import Sample
from waiting import eventually

COUNT = 20
Table = dict[str, Any]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Running:
    """A service in a thread of its own, from a new start to its end."""

    def __init__(self, config: ProducerConfig) -> None:
        self.generated: list[str] = []
        self.service = ProducerService(config, self._observe)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _observe(self, sample: Sample) -> None:
        self.generated.append(sample.key)

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def made_all(self) -> None:
        """A run in which every prompt is trained is "delivering" for a moment only."""
        over = ("delivering", "done")
        eventually(lambda: self.service.statistics().phase in over, "all samples")
        self.close()

    def failed(self) -> BaseException | None:
        self._thread.join(timeout=60)
        return self.failure

    def close(self) -> None:
        self.service.stop()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


class Run:
    """Prompts, a spool and a file, with one producer after the other."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory, self._target = directory, target
        self.file, self.spool = directory / "done.jsonl", directory / "spool"
        self.prompts = directory / "prompts.jsonl"
        lines = [{"id": f"q-{n}", "prompt": f"number {n}"} for n in range(COUNT - 2)]
        chat = [{"role": "user", "content": "hello fox"}]
        more: list[Table] = [{"messages": chat, "tools": [{"name": "t"}]}, {"prompt_ids": [5, 6]}]
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
        self.keys = [f"q-{n}" for n in range(COUNT - 2)] + [str(COUNT - 2), str(COUNT - 1)]
        self.epoch, self.epochs = 0, 1
        self._producers = 0
        self._started: list[Running] = []

    def start(self, form: Any = "ids", seed: int = 0, file: Path | None = None) -> Running:
        self._producers += 1
        sampling = SamplingConfig(max_new_tokens=12, temperature=1.0, seed=seed)
        engine = TransformersConfig(dtype="float32", batch_size=4, threads=1, sampling=sampling)
        archive = ArchiveConfig(roots=(self.directory / "archive",), min_free_bytes=0)
        config = ProducerConfig(
            engine=engine,
            target=TargetConfig(path=str(self._target), layer_ids=(1,)),
            prompts=PromptsConfig(path=str(self.prompts), epoch=self.epoch, epochs=self.epochs),
            spool=SpoolConfig(dir=self.spool, min_free_bytes=0),
            archive=archive if self.epochs > 1 else None,
            server=ServerConfig(bind=f"ipc://{self.directory}/{self._producers}.sock"),
            output=OutputConfig(conversations=str(file or self.file), form=form),
        )
        self._started.append(Running(config))
        return self._started[-1]

    def lines(self) -> dict[str, Table]:
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        assert len({line["id"] for line in lines}) == len(lines), "a prompt is there twice"
        return {line["id"]: line for line in lines}

    def stored(self) -> dict[str, tuple[list[int], list[int], str]]:
        """(prompt, response, finish reason) of each sample, by key."""
        reader = Reader(self.spool)
        found = {}
        for record in reader.records():
            sample = reader.sample(record)
            assert sample is not None
            mask = sample.loss_mask.astype(bool)
            ids = sample.input_ids
            found[sample.key] = (ids[~mask].tolist(), ids[mask].tolist(), sample.finish_reason)
        return found

    def assert_same(self) -> None:
        """File and spool say the same of every prompt."""
        lines = self.lines()
        assert sorted(lines) == sorted(self.keys)
        said = {
            key: (line["prompt_ids"], line["response_ids"], line["finish_reason"])
            for key, line in lines.items()
        }
        assert said == self.stored()

    def close(self) -> None:
        for one in self._started:
            one.close()


@pytest.fixture
def run(tmp_path: Path, tiny_qwen3: Path) -> Iterator[Run]:
    one = Run(tmp_path, tiny_qwen3)
    yield one
    one.close()


def test_every_finished_prompt_has_a_line_with_its_tokens(run: Run):
    run.start().made_all()
    run.assert_same()


def test_a_later_epoch_out_of_the_archive_adds_no_lines(run: Run):
    """Each restart added one for every sample that an epoch had trained by then."""
    run.epochs = 2
    run.start().made_all()
    reader = Reader(run.spool)
    first = IdSet(record.header.id for record in reader.records())
    config, descriptor = SpoolConfig(dir=run.spool), reader.owner.descriptor
    with closing(Spool(config, descriptor, reader.shards)) as spool:
        spool.commit(1, IdSet.union([first, first.in_epoch(1)]), 1)
    run.start().made_all()
    run.assert_same()


def test_what_only_the_archive_has_keeps_its_lines(run: Run):
    """A rollback made it unfinished: it is served out of the archive and never generated."""
    run.epochs = 2
    run.start().made_all()
    lines = run.file.read_bytes().splitlines(keepends=True)
    archive_and_forget(run)
    run.file.write_bytes(b"".join(lines[1:]))
    second = run.start()
    second.made_all()
    assert second.generated == []
    assert sorted(run.file.read_bytes().splitlines(keepends=True)) == sorted(lines)


def archive_and_forget(run: Run) -> None:
    """All is trained and archived, and then the trainer goes back to its beginning."""
    reader = Reader(run.spool)
    first = IdSet(record.header.id for record in reader.records())
    both = IdSet.union([first, first.in_epoch(1)])
    shards, descriptor = replace(reader.shards, epochs=2), reader.owner.descriptor
    roots = ArchiveConfig(roots=(run.directory / "archive",), min_free_bytes=0)
    config = SpoolConfig(
        dir=run.spool, retain="archive", segment_bytes=1, min_free_bytes=0, quota_bytes=1 << 30
    )
    with (
        closing(Archive(roots, descriptor, shards)) as archive,
        closing(ArchivedSpool(config, descriptor, shards, archive)) as spool,
    ):
        for number in (1, 2):
            spool.commit(number, both, 1)
        eventually(lambda: not list(run.spool.glob("*.seg")), "all is archived")
        spool.commit(3, IdSet(), 1, rollback=True)


def test_prefill_mode_reads_the_same_tokens_from_it(run: Run):
    run.start().made_all()
    tokenizer = tiny_models.make_tokenizer(run.directory / "t")
    config = PromptsConfig(path=str(run.file))
    file = PromptFile(config, tokenizer, 400, "prefill", tiny_models.VOCAB)
    prompts = list(file.prompts())
    file.close()
    assert len(prompts) == COUNT
    stored = run.stored()
    for prompt in prompts:
        assert prompt.response_ids is not None
        ids = (prompt.input_ids.tolist(), prompt.response_ids.tolist(), prompt.finish_reason)
        assert ids == stored[prompt.key]


def test_what_a_kill_left_out_or_torn_is_written_at_the_next_start(run: Run):
    run.start().made_all()
    lines = run.file.read_bytes().splitlines(keepends=True)
    run.file.write_bytes(b"".join(lines[2:-1]) + lines[-1][:17])
    second = run.start()
    second.made_all()
    assert second.generated == []
    run.assert_same()


def test_what_the_spool_has_lost_is_taken_out_and_generated_again(run: Run):
    """A power failure took the last samples of the spool, and not their lines."""
    run.start().made_all()
    (segment,) = run.spool.glob("*.seg")
    record = list(Reader(run.spool).records())[-3]
    os.truncate(segment, record.place[1])
    second = run.start(seed=1)
    second.made_all()
    assert len(second.generated) == 3
    run.assert_same()


def test_it_can_be_asked_for_later(run: Run):
    first = run.start(file=run.directory / "elsewhere.jsonl")
    first.made_all()
    run.start().made_all()
    run.assert_same()


def test_messages_keep_the_prompt_as_it_was(run: Run):
    run.start(form="messages").made_all()
    lines = run.lines()
    assert sorted(lines) == sorted(run.keys)
    assert lines["q-3"]["prompt"] == "number 3"
    chat = lines[str(COUNT - 2)]
    assert chat["messages"][0] == {"role": "user", "content": "hello fox"}
    assert chat["messages"][1]["role"] == "assistant"
    assert chat["tools"] == [{"name": "t"}]
    assert lines[str(COUNT - 1)]["prompt_ids"] == [5, 6]


ENDED, CUT = "quick brown fox<|im_end|>", "the quick brown"


@pytest.mark.parametrize("form", ["messages", "ids"])
@pytest.mark.parametrize(("answer", "finish"), [(ENDED, "stop"), (CUT, "length")])
@pytest.mark.parametrize(
    "prompt", [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "the"}]
)
def test_prefill_mode_makes_the_same_tokens_of_a_line(
    tmp_path: Path, form: Any, answer: str, finish: str, prompt: Table
):
    """Responses that were cut got an end token, and those behind a plain prompt lost theirs."""
    tokenizer = tiny_models.make_tokenizer(tmp_path / "t")
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(prompt) + "\n")
    file = PromptFile(PromptsConfig(path=str(path)), tokenizer, 400)
    (asked,) = file.prompts()
    writer = Writer(OutputConfig(form=form), file, tokenizer, {tokenizer.eos_token_id})
    space = " " if "prompt" in prompt else ""
    response = tokenizer(space + answer, add_special_tokens=False)["input_ids"]
    ids = np.array([*asked.input_ids, *response], np.int32)
    mask = np.arange(len(ids)) >= len(asked.input_ids)
    path.write_bytes(writer.line(asked.id, ids, mask.astype(np.uint8), finish))
    file.close()
    done = PromptFile(PromptsConfig(path=str(path)), tokenizer, 400, "prefill")
    (made,) = done.prompts()
    done.close()
    assert made.response_ids is not None
    assert made.input_ids.tolist() == asked.input_ids.tolist()
    assert (made.response_ids.tolist(), made.finish_reason) == (response, finish)
    assert ("prompt_ids" in json.loads(path.read_bytes())) == (form == "ids")


def test_a_line_that_prefill_mode_would_refuse_has_ids(tmp_path: Path):
    """One of them ended the producer. The template here drops what was thought."""
    tokenizer = tiny_models.make_tokenizer(tmp_path / "t")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    file = PromptFile(PromptsConfig(path=str(path)), tokenizer, 400)
    writer = Writer(OutputConfig(), file, tokenizer, {tokenizer.eos_token_id})
    response = tokenizer("<think>fox</think>brown<|im_end|>")["input_ids"]
    ids = np.array([5, *response], np.int32)
    (asked,) = file.prompts()
    line = json.loads(writer.line(asked.id, ids, np.array([0] + [1] * len(response)), "stop"))
    file.close()
    assert (line["prompt_ids"], line["response_ids"]) == ([5], response)


def test_a_sample_that_is_made_again_keeps_its_first_line(tmp_path: Path):
    """Its record had rotted; with sampling the second text may be another."""
    tokenizer = tiny_models.make_tokenizer(tmp_path / "t")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [5, 6]}\n')
    prompts = PromptFile(PromptsConfig(path=str(path)), tokenizer, 400)
    writer = Writer(OutputConfig(), prompts, tokenizer, {tokenizer.eos_token_id})
    done = Conversations(tmp_path / "done.jsonl", writer)
    for seed in range(2):
        made = samples.sample(seed)
        done.write(msgspec.structs.replace(made, id=prompts.id(0), key="0"))
    done.close()
    prompts.close()
    first = samples.sample(0)
    (line,) = (tmp_path / "done.jsonl").read_text().splitlines()
    assert json.loads(line)["response_ids"] == first.input_ids[first.loss_mask == 1].tolist()


def test_a_link_to_a_file_stays_one_and_the_file_keeps_its_mode(run: Run):
    """After a kill the lines went into a new file, beside the link, that everybody could read."""
    real = run.directory / "disk" / "done.jsonl"
    real.parent.mkdir()
    real.touch(mode=0o600)
    run.file.symlink_to(real)
    run.start().made_all()
    lines = real.read_bytes().splitlines(keepends=True)
    real.write_bytes(b"".join(lines[:-1]) + lines[-1][:17])
    run.start().made_all()
    assert run.file.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert sorted(real.read_bytes().splitlines(keepends=True)) == sorted(lines)
    run.assert_same()


def refused(run: Run, text: bytes, said: str) -> None:
    run.file.write_bytes(text)
    failure = run.start().failed()
    assert isinstance(failure, OutputFileError)
    assert said in str(failure)
    assert run.file.read_bytes() == text
    assert not list(run.directory.glob("*.part"))


@pytest.mark.parametrize("text", [b'{"id": "q-1", "prompt": "x", "response": "y"}\n', b"a poem"])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(run: Run, text: bytes):
    said = "line 1 is damaged" if text == b"a poem" else "line 1 does not say of which sample"
    refused(run, text, said)


def test_another_epochs_lines_are_never_taken_for_ones_to_generate_again(run: Run):
    """The prompts are called the same, and the new epoch's spool has none of them."""
    run.start().made_all()
    run.spool, run.epoch = run.directory / "epoch-1", 1
    refused(run, run.file.read_bytes(), "no prompt of this file and epoch")


def test_another_prompt_files_lines_are_never_taken_for_ones_to_generate_again(run: Run):
    run.start().made_all()
    run.spool = run.directory / "other-spool"
    run.prompts.write_text(run.prompts.read_text().replace("number", "figure"))
    refused(run, run.file.read_bytes(), "no prompt of this file and epoch")


def test_a_damaged_line_is_called_damaged_and_is_written_again_when_taken_out(run: Run):
    run.start().made_all()
    first, second, *rest = run.file.read_bytes().splitlines(keepends=True)
    refused(run, first + b"\0" * len(second) + b"\n" + b"".join(rest), "line 2 is damaged")
    run.file.write_bytes(first + b"".join(rest))
    run.start().made_all()
    run.assert_same()


def test_a_last_line_without_its_end_is_whole(run: Run):
    """The next line must not go on in it."""
    run.start().made_all()
    run.file.write_bytes(run.file.read_bytes()[:-1])
    run.start().made_all()
    run.assert_same()
    assert run.file.read_bytes().endswith(b"}\n")


def test_two_producers_do_not_share_a_file(run: Run, tmp_path: Path):
    first = run.start()
    eventually(lambda: run.file.exists() and run.file.stat().st_size > 0, "the first line")
    run.spool = tmp_path / "another"
    failure = run.start().failed()
    assert isinstance(failure, OutputFileError)
    assert "another producer writes it" in str(failure)
    run.spool = tmp_path / "spool"
    first.made_all()
    run.assert_same()


def test_a_directory_that_is_not_there_is_one_line(run: Run):
    failure = run.start(file=run.directory / "nowhere" / "done.jsonl").failed()
    assert isinstance(failure, OutputFileError)
    assert "cannot be written: No such file" in str(failure)


def test_a_file_that_cannot_be_opened_costs_no_loading(run: Run):
    """It was told after the target had been loaded, which takes minutes."""
    failed = run.start(file=run.directory)
    assert isinstance(failed.failed(), OutputFileError)
    assert failed.service.descriptor is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_waited_out(run: Run, small_disk: Path):
    run.file = small_disk / "done.jsonl"
    other = small_disk / "somebody-else"
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(small_disk))
    producer = run.start()
    eventually(lambda: producer.service.statistics().output_full_seconds > 0, "a stall")
    stalled = producer.service.statistics()
    assert (
        stalled.output_alarm == "[output] conversations cannot be written: No space left on device"
    )
    assert stalled.spool_full_seconds == 0, "it sends operators to the trainer"
    assert len(producer.generated) < COUNT
    other.unlink()
    producer.made_all()
    assert producer.service.statistics().output_alarm == ""
    run.assert_same()


def test_a_line_that_a_full_disk_cut_is_taken_back(tmp_path: Path, small_disk: Path):
    """The next try was glued to it."""
    tokenizer = tiny_models.make_tokenizer(tmp_path / "t")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [5, 6]}\n')
    prompts = PromptFile(PromptsConfig(path=str(path)), tokenizer, 400)
    writer = Writer(OutputConfig(), prompts, tokenizer, {tokenizer.eos_token_id})
    done = Conversations(small_disk / "done.jsonl", writer)
    long = msgspec.structs.replace(samples.sample(0, rows=9000), id=prompts.id(0), key="0")
    other = small_disk / "somebody-else"
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(small_disk) - 8192)
    with pytest.raises(OSError, match="No space left"):
        done.write(long)
    assert (small_disk / "done.jsonl").stat().st_size == 0
    other.unlink()
    done.write(long)
    done.close()
    prompts.close()
    (line,) = (small_disk / "done.jsonl").read_text().splitlines()
    assert json.loads(line)["sample"] == str(long.id)


def tokens_of(tokenizer: Any, prompt: str, response: str) -> tuple[np.ndarray, np.ndarray]:
    first = tokenizer(prompt)["input_ids"]
    second = [*tokenizer(response)["input_ids"], tiny_models.EOS]
    ids = np.array([*first, *second], np.int32)
    return ids, np.array([0] * len(first) + [1] * len(second), np.uint8)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("hello", {"content": "hello"}),
        (
            "<think>\nthe fox\n</think>\n\nhello",
            {"content": "hello", "reasoning_content": "the fox"},
        ),
        ("<think>\nthe fox", {"content": "<think>\nthe fox"}),
    ],
)
def test_a_chat_reads_back_as_the_tokens_that_were_generated(
    tmp_path: Path, response: str, message: Table
):
    tokenizer = tiny_models.make_tokenizer(tmp_path / "t")
    tokenizer.chat_template = THINKING
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "messages": [{"role": "user", "content": "fox?"}]}\n')
    file = PromptFile(PromptsConfig(path=str(prompts)), tokenizer, 200)
    (prompt,) = file.prompts()
    text = "<|im_start|>user\nfox?<|im_end|>\n<|im_start|>assistant\n"
    ids, mask = tokens_of(tokenizer, text, response)
    assert ids[: len(prompt.input_ids)].tolist() == prompt.input_ids.tolist()
    writer = Writer(OutputConfig(), file, tokenizer, {tiny_models.EOS})
    line = msgspec.json.decode(writer.line(prompt.id, ids, mask, "stop"))
    file.close()
    assert line["messages"][1] == {"role": "assistant", **message}
    back = read_back(tmp_path / "done.jsonl", line, tokenizer)
    assert back.response_ids is not None
    assert [*back.input_ids, *back.response_ids] == ids.tolist()
    assert len(back.response_ids) == mask.sum()


def read_back(path: Path, line: Table, tokenizer: Any) -> Prompt:
    path.write_text(json.dumps(line) + "\n")
    file = PromptFile(PromptsConfig(path=str(path)), tokenizer, 200, "prefill")
    (prompt,) = file.prompts()
    file.close()
    return prompt


@pytest.mark.parametrize(
    "change",
    [{"capture": CaptureConfig(mode="prefill")}, {"engine": SyntheticConfig()}],
)
def test_where_nothing_is_generated_it_is_refused(tmp_path: Path, change: Table):
    make: Callable[..., Any] = ProducerConfig
    with pytest.raises(ValueError, match=r"\[output\]"):
        make(
            **{"engine": TransformersConfig(), **change},
            spool=SpoolConfig(dir=tmp_path),
            output=OutputConfig(conversations="x"),
        )
