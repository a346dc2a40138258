"""SpecForge 0.2.0 trains a drafter from a live stream, in one process."""

import importlib.metadata
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers import SampleStream, TrainerRun, TrainResult
from draftfeed_consumer.trainers.specforge_checkpoints import RUN_ID, latest_checkpoint
from draftfeed_consumer.trainers.specforge_options import SpecForgeOptions, parse_options
from draftfeed_consumer.trainers.specforge_process import (
    ENVIRONMENT,
    environment,
    process_group,
    quiet,
    threads,
)
from draftfeed_proto.descriptor import Descriptor, Expectation

if TYPE_CHECKING:
    from draftfeed_consumer.trainers.dflash import DraftConfig
    from draftfeed_consumer.trainers.eagle3 import Eagle3Config
    from draftfeed_consumer.trainers.specforge_algorithms import Algorithm
    from draftfeed_consumer.trainers.specforge_hooks import Checkpoints

logger = logging.getLogger(__name__)

VERSION = "0.2.0"
INSTALL = (
    f"in the checkout run: pip install '.[specforge]' && pip install --no-deps specforge=={VERSION}"
)
SCHEDULE_STEPS = 1 << 20
"""SpecForge gives warm-up as a fraction of a length that a live stream does not have."""


def check(run: TrainerRun) -> None:
    """Raises TrainerError for options that cannot work, and when SpecForge is not installed.

    Before a stream is taken from another node: afterwards it would stand still.
    """
    _check_alone()
    options = parse_options(run.options)
    if run.partial and options.init == "target":
        raise TrainerError(
            'options.init = "target" copies blocks of the target, and producers serve its '
            "embedding and head only; set target to its whole model directory, or leave init out"
        )
    if not run.partial:
        _ = run.target_dir
    if options.resume_from is None and latest_checkpoint(run.output_dir) is not None:
        raise TrainerError(
            f"output_dir {run.output_dir} holds the checkpoints of another run, which would get "
            f'mixed up with this one\'s; set options.resume_from = "latest" or choose another '
            f"directory"
        )
    for package in ("torch", "transformers", "accelerate", "pydantic", "yaml", "psutil"):
        if importlib.util.find_spec(package) is None:
            raise TrainerError(f"kind = 'specforge' needs {package}; {INSTALL}")
    try:
        found = importlib.metadata.version("specforge")
    except importlib.metadata.PackageNotFoundError:
        raise TrainerError(f"SpecForge is not installed; {INSTALL}") from None
    if found != VERSION:
        raise TrainerError(f"works with SpecForge {VERSION}, found {found}; {INSTALL}")
    if options.algorithm == "eagle3" and importlib.util.find_spec("triton") is None:
        raise TrainerError(
            'algorithm = "eagle3" needs Triton, in which its loss is written, and which runs on '
            "GPUs; run: pip install triton"
        )
    if options.device == "cuda" and _device(SpecForgeOptions()) != "cuda":
        raise TrainerError('options.device is "cuda", and torch sees no GPU here')


def expectation(run: TrainerRun, expect: Expectation) -> Expectation:
    """What the stream must be for this run, beside what the user expects. The producers compare it
    before they take the stream from another node; what can be wrong with the target is looked for
    here, too. Raises TrainerError.
    """
    from draftfeed_consumer.trainers import dflash, eagle3, target_weights

    options = parse_options(run.options)
    architecture, blocks = dflash.read_architecture(run.target_dir)
    hidden, vocabulary = architecture["hidden_size"], architecture["vocab_size"]
    target_weights.check_frozen(run.target_dir, hidden, vocabulary)
    needed: dict[str, Any] = {
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_layers": blocks,
    }
    if options.algorithm == "eagle3":
        needed["final"] = "postnorm"
        if expect.layer_ids is None:
            raise TrainerError(
                f'algorithm = "eagle3" reads {eagle3.LAYERS} layers: name them in [expect] '
                "layer_ids, so that a stream of others is refused"
            )
        eagle3.check_layers(expect.layer_ids, blocks)
    else:
        draft_config(run, expect.layer_ids or (0,))  # chooses the mask token
    for name, value in needed.items():
        if getattr(expect, name) not in (None, value):
            found = getattr(expect, name)
            raise TrainerError(f"[expect] {name} is {found!r}, and this trainer needs {value!r}")
    return msgspec.structs.replace(expect, **needed)


def _device(options: SpecForgeOptions) -> str:
    import torch

    if options.device != "auto":
        return options.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_alone() -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise TrainerError(
            f"kind = 'specforge' trains in one process, and WORLD_SIZE is {ranks}; "
            "docs/examples/ddp_trainer.py is a loop for several"
        )


def _algorithm(run: TrainerRun, descriptor: Descriptor) -> "Algorithm":
    """What `run` trains on this stream. Raises TrainerError."""
    from draftfeed_consumer.trainers import eagle3, specforge_algorithms

    options = parse_options(run.options)
    config: DraftConfig | Eagle3Config
    if options.algorithm == "dflash":
        config = draft_config(run, descriptor.layer_ids)
    else:
        eagle3.check_stream(descriptor)
        config = _eagle3_config(run, options, descriptor.layer_ids)
    _check_target(descriptor, config)
    return specforge_algorithms.make(config)


def _eagle3_config(
    run: TrainerRun, options: SpecForgeOptions, layer_ids: tuple[int, ...]
) -> "Eagle3Config":
    from draftfeed_consumer.trainers.dflash import read_architecture
    from draftfeed_consumer.trainers.eagle3 import Eagle3Config

    architecture, blocks = read_architecture(run.target_dir)
    return Eagle3Config(
        layer_ids=layer_ids,
        num_target_layers=blocks,
        architecture=architecture,
        ttt_length=options.ttt_length,
        seed=options.seed,
        dtype=options.dtype,
    )


def draft_config(run: TrainerRun, layer_ids: tuple[int, ...]) -> "DraftConfig":
    """The DFlash drafter that `run` trains on a stream of these layers. Raises TrainerError."""
    from draftfeed_consumer.trainers.dflash import DraftConfig, pick_mask_token, read_architecture

    options = parse_options(run.options)
    architecture, blocks = read_architecture(run.target_dir)
    mask = options.mask_token_id
    return DraftConfig(
        layer_ids=layer_ids,
        num_target_layers=blocks,
        architecture=architecture,
        num_layers=options.num_layers,
        block_size=options.block_size,
        mask_token_id=pick_mask_token(run.target_dir) if mask is None else mask,
        num_anchors=options.num_anchors,
        gamma=options.gamma,
        objective_chunk_blocks=options.objective_chunk_blocks,
        init=options.init,
        seed=options.seed,
        dtype=options.dtype,
    )


def train(stream: SampleStream, run: TrainerRun) -> TrainResult:
    """Train until the stream ends; a checkpoint every so many steps and one at the end.

    Raises TrainerError, and whatever the stream raises when it does not end normally: then the
    last checkpoint made before stays the newest.
    """
    check(run)
    options = parse_options(run.options)
    algorithm = _algorithm(run, stream.descriptor)  # waits until the stream is granted
    resume = _resume_from(options, run.output_dir)
    run.output_dir.mkdir(parents=True, exist_ok=True)
    device = _device(options)
    with ExitStack() as stack:
        stack.enter_context(environment({**ENVIRONMENT, "SPECFORGE_DEVICE": device}))
        stack.enter_context(threads(run.threads))
        stack.enter_context(process_group(device))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftfeed-")))
        training = _Training(stream, run, options, algorithm, device, resume, folder)
        stack.callback(training.close)
        return training.fit()


class _Training:
    """One call of `train`: SpecForge's trainer and our parts of it."""

    def __init__(
        self,
        stream: SampleStream,
        run: TrainerRun,
        options: SpecForgeOptions,
        algorithm: "Algorithm",
        device: str,
        resume: Path | None,
        folder: Path,
    ) -> None:
        from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel

        from draftfeed_consumer.trainers import dflash
        from draftfeed_consumer.trainers.specforge_hooks import AckLedger, Feeder, Shelf

        self._stream, self._output_dir = stream, run.output_dir
        self._options, self._algorithm = options, algorithm
        step = _load_stream_state(stream, resume) if resume else None
        # One optimizer step under way and the next one waiting.
        self._shelf: Shelf = Shelf(capacity=2 * options.window)
        channel = StreamingRefChannel(str(folder / "samples.jsonl"))
        self._feeder: Feeder = Feeder(stream, self._shelf, channel, run.policy, algorithm)
        self._ledger: AckLedger = AckLedger(stream, self._shelf, self._metrics, step)
        with quiet():
            model, head = algorithm.build(run.target_dir, device)
        self._trainer = self._build_trainer(model, head, channel, resume)
        self._checkpoints = self._take_over(self._trainer._controller)
        # SpecForge has compared it with the checkpoint.
        dflash.save_config(algorithm.config, run.output_dir)

    def fit(self) -> TrainResult:
        self._stream.checkpoint_every(self._options.window * self._options.save_interval_steps)
        self._feeder.start()
        try:
            steps = self._trainer.fit()
        except RuntimeError as error:
            # SpecForge passes on the text of an error; this is the error itself.
            cause = self._feeder.error or self._ledger.error or self._checkpoints.error
            if cause is not None:
                raise cause from error
            raise
        return self._result(steps)

    def close(self) -> None:
        self._feeder.stop()

    def _result(self, steps: int) -> TrainResult:
        """The last checkpoint is committed: now those that did not fill a step are let go."""
        # A consumer that drains leaves them to whoever comes next.
        tail = () if self._stream.draining else tuple(self._shelf.tail)
        if tail:
            names = ", ".join(str(id) for id in tail)
            logger.warning("%d samples did not fill a last step, untrained: %s", len(tail), names)
            self._stream.tail(tail)
        return TrainResult(
            steps, self._ledger.trained, self._feeder.rejected, tail, self._checkpoints.last
        )

    def _build_trainer(self, model: Any, head: Any, channel: Any, resume: Path | None) -> Any:
        import torch
        from specforge.launch import build_disagg_online_consumer

        from draftfeed_consumer.trainers.specforge_hooks import ShelfStore

        registration = self._algorithm.registration()
        torch.manual_seed(self._options.seed)  # anchors are drawn from this
        with quiet(), _refused_resume(resume):
            return build_disagg_online_consumer(
                algorithm=registration,
                feature_store=ShelfStore(self._shelf, self._algorithm.config.torch_dtype),
                channel=channel,
                draft_model=model,
                target_head=head,
                collate_fn=self._algorithm.collate,
                optimizer_factory=_optimizer_factory(self._options),
                run_id=RUN_ID,
                output_dir=str(self._output_dir),
                batch_size=self._options.batch_size,
                accumulation_steps=self._options.accumulation_steps,
                save_interval=self._options.save_interval_steps,
                metadata_store=self._ledger,
                logger=_log_step,
                log_interval=self._options.log_interval_steps,
                strategy_kwargs=_resume_contract(registration, model, self._algorithm),
                max_checkpoints=self._options.max_checkpoints,
                resume_from=str(resume) if resume else None,
            )

    def _take_over(self, controller: Any) -> "Checkpoints":
        """Where SpecForge has no parameter for what is ours."""
        from draftfeed_consumer.trainers.specforge_hooks import Checkpoints, IdleCheckpoints

        checkpoints = Checkpoints(
            self._stream,
            self._ledger,
            output_dir=str(self._output_dir),
            run_id=RUN_ID,
            max_checkpoints=self._options.max_checkpoints,
        )
        controller._checkpoint_mgr = checkpoints
        controller._make_progress_bar = lambda: None  # the terminal is not ours
        self._ledger.on_step = self._checkpoint_when_wanted
        idle = IdleCheckpoints(self._stream, self._trainer.save_checkpoint, self._boundary)
        # Between two looks at its feed the training thread sleeps: nowhere else is it idle.
        self._trainer._loader.queue._sleep = idle.sleep
        return checkpoints

    def _boundary(self) -> int | None:
        """The last optimizer step, when no gradients of another one are accumulated."""
        if self._trainer.core.accumulation_remainder:
            return None
        step: int = self._trainer.global_step
        return step

    def _checkpoint_when_wanted(self) -> None:
        """SpecForge looks at its interval after every step: with 1 it saves after this one."""
        wanted = self._stream.checkpoint_wanted
        interval = 1 if wanted else self._options.save_interval_steps
        self._trainer._controller.save_interval = interval

    def _metrics(self) -> dict[str, float]:
        return _numbers(self._trainer._controller.last_metrics)


@contextmanager
def _refused_resume(resume: Path | None) -> Iterator[None]:
    """SpecForge goes on only with the batch, the accumulation, the number of ranks and the drafter
    that the checkpoint was made with, and says which of them is another."""
    try:
        yield
    except ValueError as error:
        if resume is None:
            raise
        raise TrainerError(" ".join(str(error).split())) from error


def _optimizer_factory(options: SpecForgeOptions) -> Any:
    from specforge.optimizer import BF16Optimizer

    def make(module: Any) -> Any:
        return BF16Optimizer(
            module,
            lr=options.learning_rate,
            max_grad_norm=options.max_grad_norm,
            lr_scheduler="constant",
            total_steps=SCHEDULE_STEPS,
            warmup_ratio=options.warmup_steps / SCHEDULE_STEPS,
        )

    return make


def _resume_contract(registration: Any, model: Any, algorithm: "Algorithm") -> Any:
    """What must be the same when a checkpoint is resumed; SpecForge compares it."""
    from specforge.algorithms.common.providers import (
        MODEL_PROVENANCE_CONTRACT_KEY,
        OMITTED_STATE_FINGERPRINT_CONTRACT_KEY,
        StepRuntimeConfig,
        checkpoint_key_fingerprint,
    )

    contract = algorithm.resume_contract(registration, model)
    contract[MODEL_PROVENANCE_CONTRACT_KEY] = tuple(sorted(algorithm.config.architecture.items()))
    if unsaved := algorithm.unsaved(model):
        fingerprint = checkpoint_key_fingerprint(model.draft_model, unsaved)
        contract[OMITTED_STATE_FINGERPRINT_CONTRACT_KEY] = fingerprint
    return StepRuntimeConfig(
        options={},
        resume_contract=contract,
        allowed_missing_checkpoint_keys=unsaved,
    )


def _resume_from(options: SpecForgeOptions, output_dir: Path) -> Path | None:
    """To be called when the stream is granted: see `specforge_checkpoints`."""
    if options.resume_from is None:
        return None
    if options.resume_from != "latest":
        found: Path | None = Path(options.resume_from).expanduser()
    else:
        found = latest_checkpoint(output_dir)
    if found is None:
        logger.info("begins anew: there is no checkpoint in %s", output_dir)
    else:
        logger.info("goes on from %s", found)
    return found


def _load_stream_state(stream: SampleStream, checkpoint: Path) -> int:
    """Tell the stream what the checkpoint has trained; returns its step. Raises TrainerError."""
    from draftfeed_consumer.trainers import dflash

    state = dflash.read_state(checkpoint)
    if "draftfeed" not in state:
        raise TrainerError(f"{checkpoint} was not made by this trainer: it has no stream state")
    stream.load_state_dict(state["draftfeed"])
    return int(state["global_step"])


def _check_target(served: Descriptor, config: "DraftConfig | Eagle3Config") -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = config.architecture[name], getattr(served, name)
        if ours != theirs:
            raise TrainerError(f"the target's {name} is {ours}, the stream's is {theirs}")
    if served.num_layers != config.num_target_layers:
        raise TrainerError(
            f"the target has {config.num_target_layers} layers, the stream's {served.num_layers}"
        )


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in numbers.items()}


def _log_step(metrics: dict[str, Any], step: int) -> None:
    logger.info("step %d: loss %.3f, accuracy %.3f", step, metrics["loss"], metrics["acc"])
