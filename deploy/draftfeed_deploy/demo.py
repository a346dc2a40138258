"""The demo: a producer and a consumer as processes of their own, watched, then judged."""

import json
import shutil
import socket
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console

from draftfeed_consumer.ledger import parse
from draftfeed_consumer.trainers.dflash import read_state
from draftfeed_consumer.trainers.specforge_checkpoints import latest_checkpoint
from draftfeed_deploy import packages, smollm2
from draftfeed_deploy.accounts import read_spool
from draftfeed_deploy.config import load
from draftfeed_deploy.consumer_file import ConsumerFile
from draftfeed_deploy.errors import DemoError, OutputError
from draftfeed_deploy.evaluation import evaluate
from draftfeed_deploy.foreground import phase
from draftfeed_deploy.producer_file import ProducerFile
from draftfeed_deploy.reckoning import judge, prompt_list
from draftfeed_deploy.records import Archived, Checkpoint
from draftfeed_deploy.report import Report, write_report
from draftfeed_deploy.services import run_services
from draftfeed_producer.archive import Archive, ArchiveConfig
from draftfeed_producer.archive.roots import same_contents
from draftfeed_producer.config import ProducerConfig
from draftfeed_proto.ids import IdSet

MARKER = ".draftfeed-demo"
SHARD_SIZE = 64
SWAP_SHARE = 0.4
"""Of the samples, trained when the second consumer is started."""

TRANSFORMERS_TOML = """\
[engine]
name = "transformers"
batch_size = {batch_size}
threads = 1
"""

SGLANG_TOML = """\
[engine]
name = "sglang"
python = {python}
concurrency = {batch_size}
dtype = "float32"
ring_bytes = 16_777_216

[engine.args]            # SGLang's own, by their Python names: what it needs to run on a CPU
device = "cpu"
attention_backend = "torch_native"
sampling_backend = "pytorch"
grammar_backend = "none"
disable_cuda_graph = true
max_total_tokens = 16384 # of KV cache
"""

PRODUCER_TOML = """\
# One producer: prompts -> SmolLM2 on the CPU -> spool -> this address.

{engine}
[engine.sampling]
max_new_tokens = {max_new_tokens}
temperature = 0.7
top_p = 0.95
seed = 1

[target]
path = {target}

[prompts]
path = {prompts}
shard_size = {shard_size}
{epochs}
[spool]
dir = {spool}
{retain}quota_bytes = 1_000_000_000
segment_bytes = {segment_bytes}
audit = true             # a digest of every sample's tensors, compared at the other end
{archive}
[server]
bind = {address}
same_host = false  # as from another machine: packed, over TCP
"""

EPOCHS_TOML = """\
epochs = {epochs}               # the first is generated, the others come out of the archive
"""

RETAIN_TOML = """\
retain = "archive"       # what no checkpoint needs any more is sealed, not deleted
"""

ARCHIVE_TOML = """
[archive]
roots = [{archive}]
min_free_bytes = 100_000_000
"""

CONSUMER_TOML = """\
# One consumer: this address -> bounded buffer -> SpecForge's DFlash trainer.

[producer]
addresses = [{address}]
group = "demo"

[buffer]
capacity_bytes = 200_000_000
window_samples = 16

[trainer]
kind = "specforge"
target = {target}
output_dir = {checkpoints}
threads = 1

[trainer.options]
init = "target"          # the drafter starts from the target's last block
batch_size = 1           # SpecForge drops what does not fill a step; with 1 nothing is left over
num_anchors = 16
save_interval_steps = {save_interval_steps}
resume_from = "latest"   # go on where an earlier run stopped
"""


class DemoEngine(NamedTuple):
    toml: str
    """Its tables, with fields still to be filled in."""
    python: str
    """What runs it, as TOML; empty: the producer itself."""
    environment: dict[str, str]
    """Of the producer. Generation has one core, the trainer the other."""


def _transformers() -> DemoEngine:
    return DemoEngine(TRANSFORMERS_TOML, "", {})


def _sglang() -> DemoEngine:
    """Raises MissingPackage. On a CPU, SGLang leaves the number of threads to torch's default,
    which is every core, or this variable."""
    python = _quoted(packages.sglang_python())
    return DemoEngine(SGLANG_TOML, python, {"OMP_NUM_THREADS": "1"})


ENGINES = {"transformers": _transformers, "sglang": _sglang}


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    prompts: int | None = None
    """Only the first so many of the shipped prompts."""
    max_new_tokens: int = 64
    engine: Literal["transformers", "sglang"] = "transformers"
    """What runs the target; SGLang has an environment of its own, which `make sglang` builds."""
    swap: bool = False
    """A second consumer takes over in the middle of the run."""
    epochs: int = 1
    """The first is generated, the others come out of an archive of it."""


def run_demo(options: DemoOptions, console: Console) -> Report:
    """Run both services to their end, evaluate the drafter, write the report.

    Raises DemoError or OutputError for a directory it cannot use, MissingPackage, ServiceFailed
    when a service fails or stands still; Ctrl-C stops both and goes on as KeyboardInterrupt.
    """
    engine = ENGINES[options.engine]()
    directory = _fresh(options.directory)
    prompts = _shipped(directory, "prompts.jsonl", options.prompts)
    with phase(console, "making a plain bf16 copy of SmolLM2-135M, once, unless there is one"):
        target = smollm2.prepare()
    count = _write_configs(directory, prompts, target, engine, options)
    swap_after = int(SWAP_SHARE * count) if options.swap else 0
    run_services(directory, console, swap_after, engine.environment)
    producer = load(directory / "producer.toml", ProducerFile)
    trainer = load(directory / "consumer.toml", ConsumerFile).trainer
    _note_checkpoint(directory, trainer.output_dir)
    _note_audit(directory, producer)
    if producer.archive is not None:
        _note_archive(directory, producer.archive)
    with phase(console, "evaluating the drafter on held-out prompts"):
        evaluation = evaluate(producer, trainer, _shipped(directory, "heldout.jsonl"))
    (directory / "evaluation.json").write_bytes(msgspec.json.encode(evaluation))
    return write_report(directory, prompts, SHARD_SIZE, options.epochs)


def _note_checkpoint(directory: Path, output_dir: Path) -> None:
    """What the drafter is made of, as the file says that its weights are in."""
    newest = latest_checkpoint(output_dir)
    if newest is None:
        return
    state = read_state(newest)
    trained = IdSet.from_wire(parse(state["draftfeed"]).trained)
    checkpoint = Checkpoint(step=state["global_step"], trained=[str(id) for id in trained])
    (directory / "checkpoint.json").write_bytes(msgspec.json.encode(checkpoint))


def _note_audit(directory: Path, producer: ProducerConfig) -> None:
    """What the spool says about every line of the prompt file."""
    prompts = prompt_list(producer)
    roots = producer.archive.roots if producer.archive else ()
    audit = judge("producer.toml", prompts, read_spool(producer.spool.dir, prompts.ids, roots))
    (directory / "audit.json").write_bytes(msgspec.json.encode(audit))


def _note_archive(directory: Path, config: ArchiveConfig) -> None:
    """What the archive's own files say, every chunk of them verified."""
    contents = same_contents(config.roots)
    archive = Archive(config, contents.descriptor, contents.prompts)
    try:
        headers = [record.header for record in archive.records()]
        counts = archive.statistics()
        archived = Archived(
            segments=counts.segments,
            bytes=counts.bytes,
            digests={str(header.id): header.digest for header in headers},
            damaged=[str(header.id) for header in headers if not archive.whole(header.id)],
        )
    finally:
        archive.close()
    (directory / "archived.json").write_bytes(msgspec.json.encode(archived))


def _fresh(directory: Path) -> Path:
    """An empty directory; a former demo's is cleared, anything else is left alone."""
    try:
        if directory.exists() and any(directory.iterdir()):
            if not (directory / MARKER).exists():
                raise DemoError(f"{directory} is not empty and not a demo's; choose another --dir")
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARKER).touch()
    except OSError as error:
        raise OutputError(directory, error, "choose another --dir") from None
    return directory


def _shipped(directory: Path, name: str, lines: int | None = None) -> Path:
    """A copy of a shipped prompt file, or of its first lines, in the run's directory."""
    text = resources.files("draftfeed_deploy.data").joinpath(name).read_bytes()
    path = directory / name
    path.write_bytes(b"".join(text.splitlines(keepends=True)[:lines]))
    return path


def _write_configs(
    directory: Path, prompts: Path, target: Path, engine: DemoEngine, options: DemoOptions
) -> int:
    """Returns the number of prompts."""
    address = json.dumps(f"tcp://127.0.0.1:{_free_port()}")
    count = len(prompts.read_bytes().splitlines())
    values = {
        "address": address,
        "python": engine.python,
        "target": _quoted(target),
        "prompts": _quoted(prompts),
        "spool": _quoted(directory / "spool"),
        "checkpoints": _quoted(directory / "checkpoints"),
        "max_new_tokens": options.max_new_tokens,
        "shard_size": SHARD_SIZE,
        **_pace(count, options),
        **_several(directory, options.epochs),
    }
    producer = PRODUCER_TOML.format(engine=engine.toml.format(**values), **values)
    (directory / "producer.toml").write_text(producer)
    (directory / "consumer.toml").write_text(CONSUMER_TOML.format(**values))
    return count


def _pace(prompts: int, options: DemoOptions) -> dict[str, int]:
    """A swap in mid-run needs a checkpoint before it and prompts not yet generated after it; an
    archive gets what two checkpoints contain, and is to have most before the second epoch."""
    if not options.swap:
        interval = 50 if options.epochs == 1 else max(4, min(20, prompts // 10))
        return {"batch_size": 40, "save_interval_steps": interval}
    return {
        "batch_size": max(1, min(40, prompts // 8)),
        "save_interval_steps": max(1, min(50, prompts // 8)),
    }


def _several(directory: Path, epochs: int) -> dict[str, str]:
    """Of the producer's tables, what depends on it. A segment is archived as a whole."""
    if epochs == 1:
        return {"epochs": "", "retain": "", "archive": "", "segment_bytes": "16_000_000"}
    return {
        "segment_bytes": "2_000_000",
        "epochs": EPOCHS_TOML.format(epochs=epochs),
        "retain": RETAIN_TOML,
        "archive": ARCHIVE_TOML.format(archive=_quoted(directory / "archive")),
    }


def _quoted(path: Path) -> str:
    """A JSON string is a TOML string."""
    return json.dumps(str(path.absolute()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
