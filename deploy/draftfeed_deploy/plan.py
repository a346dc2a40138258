"""The arithmetic of `draftfeed plan`: pure functions from Inputs to a Plan.

Inputs are complete: what may be None in a file was filled in when it was read (plan_files.py).
A sample of p prompt and r response tokens counts as p + r rows. It has one less; plans do not.
"""

from typing import NamedTuple

from draftfeed_deploy.plan_inputs import Inputs
from draftfeed_deploy.plan_memory import VALUE_BYTES, Memory, memory_of, staged_row_bytes

CHECKPOINTS_KEPT = 3
"""Intervals that a spool holds: those of [spool] keep_checkpoints, and the one that runs."""
MINUTE = 60.0


class Volume(NamedTuple):
    """What is made. `generated_epochs` have responses of their own."""

    generated_epochs: float
    response_tokens: float
    prompt_tokens: float
    rows_of_an_epoch: float
    second_pass_rows: float
    """Rows captured in a pass over responses that exist."""
    row_bytes: float
    epoch_bytes: float
    states_bytes: float


class Phase(NamedTuple):
    """A part of the run, in seconds that each stage would take alone."""

    name: str
    epochs: float
    generation: float
    encode: float
    drives: float
    link: float
    decode: float
    training: float


class Times(NamedTuple):
    """Seconds."""

    output: float
    prefill: float
    second_pass: float
    generation: float
    """All that the generating node's GPUs do."""
    link: float
    encode: float
    drives: float
    """Writing an archive and reading it again."""
    decode: float
    training: float
    elapsed: float
    bottleneck: str


class Bandwidth(NamedTuple):
    """Bytes per second of states, except where the name says bits."""

    response_rows: float
    mean: float
    """While what is generated is captured."""
    later: float
    """While later epochs are captured or replayed; 0 without any."""
    burst: float
    """While all replicas prefill."""
    wire: float
    """Of the faster of mean and later, encoded."""
    link_bits_needed: float


class Storage(NamedTuple):
    """Bytes."""

    epoch_encoded: float
    all_states: float
    all_encoded: float
    archive: float
    """What this layout has to keep, encoded."""
    spool_of_a_replica: float
    spool_of_a_replica_encoded: float
    buffer_least: float
    buffer_with_window: float
    staging_of_a_replica: float


class Drives(NamedTuple):
    """Of an archive that later epochs are replayed from."""

    filled: float
    """Share of their capacity."""
    worn: float
    """Share of their endurance that one run takes."""
    read: float
    """Bytes per second, encoded, that keep the trainer busy."""
    read_share: float
    """Of what they can read."""


class Moved(NamedTuple):
    """Bytes."""

    before: float
    stream: float
    drafter: float


class Limits(NamedTuple):
    """Rates of one replica against what its GPUs can do."""

    gpus_used: float
    """Share of the node's that the replicas take."""
    prefill_flops: float
    prefill_of_peak: float
    output_bound_tokens_per_second: float
    """By reading the weights once a pass; nothing else takes time."""
    implied_prefill_tokens_per_second: float
    """Of all replicas, by [rates] prefill_share; 0 without it."""


class Cost(NamedTuple):
    generating_node: float
    training_node: float
    storage: float
    total: float


class Plan(NamedTuple):
    volume: Volume
    times: Times
    bandwidth: Bandwidth
    storage: Storage
    drives: Drives | None
    """None where nothing is replayed."""
    memory: Memory | None
    """None where it is not known what the target's layers keep."""
    moved: Moved
    limits: Limits
    cost: Cost


def plan(inputs: Inputs) -> Plan:
    volume = _volume(inputs)
    phases = _phases(inputs, volume)
    times = _times(inputs, volume, phases)
    bandwidth = _bandwidth(inputs, volume, phases)
    storage = _storage(inputs, volume, bandwidth)
    return Plan(
        volume,
        times,
        bandwidth,
        storage,
        _drives(inputs, bandwidth, storage),
        memory_of(inputs, volume.row_bytes),
        _moved(inputs, volume),
        _limits(inputs, volume, times),
        _cost(inputs, times, storage),
    )


def _volume(inputs: Inputs) -> Volume:
    work, layout = inputs.workload, inputs.layout
    generated = work.epochs if layout.later_epochs == "generate" else min(1.0, work.epochs)
    rows = work.prompts * (work.prompt_tokens + work.response_tokens)
    twice = generated if layout.capture == "prefill" else 0.0
    if layout.later_epochs == "prefill":
        twice += work.epochs - generated
    row_bytes = inputs.target.tapped_layers * _given(inputs.target.hidden_size) * VALUE_BYTES
    return Volume(
        generated_epochs=generated,
        response_tokens=work.prompts * work.response_tokens * generated,
        prompt_tokens=work.prompts * work.prompt_tokens * generated,
        rows_of_an_epoch=rows,
        second_pass_rows=rows * twice,
        row_bytes=row_bytes,
        epoch_bytes=rows * row_bytes,
        states_bytes=rows * row_bytes * work.epochs,
    )


def _phases(inputs: Inputs, volume: Volume) -> list[Phase]:
    output, prefill = _output_seconds(inputs, volume), _prefill_seconds(inputs, volume)
    second = _second_pass_seconds(inputs, volume.rows_of_an_epoch)
    generation = output + prefill
    if inputs.layout.capture == "prefill":
        generation += second * volume.generated_epochs
    phases = [_phase(inputs, volume, "generation", volume.generated_epochs, generation)]
    later = inputs.workload.epochs - volume.generated_epochs
    if later > 0:
        name = inputs.layout.later_epochs
        phases.append(_phase(inputs, volume, name, later, second * later))
        if name == "replay":
            phases = _with_archive(inputs, volume, *phases)
    return phases


def _with_archive(inputs: Inputs, volume: Volume, first: Phase, later: Phase) -> list[Phase]:
    """Written while the first epoch is made, then read: nothing is generated or encoded again."""
    archive, encoded = inputs.archive, volume.epoch_bytes / inputs.stream.ratio
    written = encoded * first.epochs / (archive.drives * archive.write_bytes_per_second)
    read = encoded * later.epochs / (archive.drives * archive.read_bytes_per_second)
    return [
        first._replace(drives=written),
        later._replace(generation=0.0, encode=0.0, drives=read),
    ]


def _phase(inputs: Inputs, volume: Volume, name: str, epochs: float, generation: float) -> Phase:
    stream, wired = inputs.stream, inputs.layout.network and inputs.stream.link_bits_per_second
    states = volume.epoch_bytes * epochs
    encoders = stream.encode_bytes_per_second * inputs.layout.replicas
    return Phase(
        name=name,
        epochs=epochs,
        generation=generation,
        encode=states / encoders,
        drives=0.0,
        link=8 * states / stream.ratio / wired if wired else 0.0,
        decode=states / (stream.decode_bytes_per_second * stream.decode_threads),
        training=inputs.workload.prompts * epochs / samples_per_second(inputs),
    )


def _output_seconds(inputs: Inputs, volume: Volume) -> float:
    return volume.response_tokens / (inputs.rates.output_tokens_per_second * inputs.layout.replicas)


def _prefill_seconds(inputs: Inputs, volume: Volume) -> float:
    if inputs.rates.prefill_share is not None:
        return inputs.rates.prefill_share * _output_seconds(inputs, volume)
    if inputs.rates.output_includes_prefill:
        return 0.0
    return _second_pass_seconds(inputs, volume.prompt_tokens)


def _second_pass_seconds(inputs: Inputs, rows: float) -> float:
    return rows / (inputs.rates.prefill_tokens_per_second * inputs.layout.replicas)


def samples_per_second(inputs: Inputs) -> float:
    """Of the trainer. 6 operations for each parameter and position of a block; the target's head,
    which is frozen, takes 4 for each of its values.

    Context rows add a projection to it that is small beside the blocks.
    """
    training, target = inputs.training, inputs.target
    if training.samples_per_second is not None:
        return training.samples_per_second
    positions = training.block_size * min(training.anchors, inputs.workload.response_tokens)
    head = _given(target.hidden_size) * (target.vocab_size or 0.0)
    operations = positions * (6 * training.drafter_parameters + 4 * head)
    return training.gpus * _given(training.flops) * training.utilisation / operations


def _times(inputs: Inputs, volume: Volume, phases: list[Phase]) -> Times:
    total = Phase("", 0.0, *(sum(column) for column in zip(*(p[2:] for p in phases), strict=True)))
    if inputs.layout.training == "after":
        making, using = max(total[2:6]), max(total[6:])
        elapsed = making + using
        bottleneck = "generation, then training"
    else:
        elapsed = sum(max(phase[2:]) for phase in phases)
        bottleneck = ", then ".join(dict.fromkeys(_slowest(phase) for phase in phases))
    return Times(
        output=_output_seconds(inputs, volume),
        prefill=_prefill_seconds(inputs, volume),
        second_pass=_second_pass_seconds(inputs, volume.second_pass_rows),
        generation=total.generation,
        link=total.link,
        encode=total.encode,
        drives=total.drives,
        decode=total.decode,
        training=total.training,
        elapsed=elapsed,
        bottleneck=bottleneck,
    )


def _slowest(phase: Phase) -> str:
    stages = phase._fields[2:]
    return max(zip(phase[2:], stages, strict=True))[1]


def _bandwidth(inputs: Inputs, volume: Volume, phases: list[Phase]) -> Bandwidth:
    layout = inputs.layout
    first, *rest = phases
    capturing = first.generation
    if layout.capture == "prefill":  # nothing streams while responses are generated
        capturing = _second_pass_seconds(inputs, volume.rows_of_an_epoch * first.epochs)
    mean = volume.epoch_bytes * first.epochs / capturing
    later = max((_rate(volume, phase) for phase in rest), default=0.0)
    wire = max(mean, later) / inputs.stream.ratio if layout.network else 0.0
    prefill = inputs.rates.prefill_tokens_per_second * layout.replicas
    return Bandwidth(
        response_rows=inputs.rates.output_tokens_per_second * layout.replicas * volume.row_bytes,
        mean=mean,
        later=later,
        burst=prefill * volume.row_bytes,
        wire=wire,
        link_bits_needed=8 * wire * inputs.stream.headroom,
    )


def _rate(volume: Volume, phase: Phase) -> float:
    """A replay is as fast as its trainer."""
    return volume.epoch_bytes * phase.epochs / (phase.generation or phase.training)


def _storage(inputs: Inputs, volume: Volume, bandwidth: Bandwidth) -> Storage:
    layout, ratio = inputs.layout, inputs.stream.ratio
    seconds = MINUTE * (CHECKPOINTS_KEPT * layout.checkpoint_minutes + layout.swap_minutes)
    spool = max(bandwidth.mean, bandwidth.later) / layout.replicas * seconds
    mean_rows = volume.rows_of_an_epoch / inputs.workload.prompts
    longest, samples = inputs.workload.longest_tokens, inputs.stream.batch_samples
    return Storage(
        epoch_encoded=volume.epoch_bytes / ratio,
        all_states=volume.states_bytes,
        all_encoded=volume.states_bytes / ratio,
        archive=_archive(inputs, volume),
        spool_of_a_replica=spool,
        spool_of_a_replica_encoded=spool / ratio,
        buffer_least=longest * volume.row_bytes * (1 + samples),
        buffer_with_window=mean_rows * volume.row_bytes * (inputs.stream.window_samples + samples),
        staging_of_a_replica=layout.batch * longest * staged_row_bytes(inputs, volume.row_bytes),
    )


def _archive(inputs: Inputs, volume: Volume) -> float:
    """One epoch where it is replayed; with the training after, all that was generated."""
    if inputs.layout.later_epochs == "replay":
        return volume.epoch_bytes / inputs.stream.ratio
    return volume.states_bytes / inputs.stream.ratio if inputs.layout.training == "after" else 0.0


def _drives(inputs: Inputs, bandwidth: Bandwidth, storage: Storage) -> Drives | None:
    archive = inputs.archive
    if inputs.layout.later_epochs != "replay" or not bandwidth.later:
        return None
    read = bandwidth.later / inputs.stream.ratio
    return Drives(
        filled=storage.archive / (archive.drives * archive.drive_bytes),
        worn=storage.archive / (archive.drives * archive.endurance_bytes),
        read=read,
        read_share=read / (archive.drives * archive.read_bytes_per_second),
    )


def _moved(inputs: Inputs, volume: Volume) -> Moved:
    """A trainer on another node needs the target's embedding and head, and no more of it."""
    target, layout = inputs.target, inputs.layout
    before = 0.0
    if not layout.data_is_there:
        before += target.weights_bytes + _given(inputs.workload.prompts_bytes)
    if layout.network:
        before += 2 * (target.vocab_size or 0.0) * _given(target.hidden_size) * VALUE_BYTES
    return Moved(
        before=before,
        stream=volume.states_bytes / inputs.stream.ratio if layout.network else 0.0,
        drafter=inputs.training.drafter_parameters * VALUE_BYTES,
    )


def _limits(inputs: Inputs, volume: Volume, times: Times) -> Limits:
    hardware, layout, rates = inputs.hardware, inputs.layout, inputs.rates
    flops = 2 * _given(inputs.target.parameters) * rates.prefill_tokens_per_second
    bandwidth = hardware.memory_bytes_per_second * layout.gpus_per_replica
    passes = bandwidth / inputs.target.weights_bytes
    implied = volume.prompt_tokens / times.prefill if rates.prefill_share else 0.0
    return Limits(
        gpus_used=layout.replicas * layout.gpus_per_replica / hardware.gpus,
        prefill_flops=flops,
        prefill_of_peak=flops / (hardware.flops * layout.gpus_per_replica),
        output_bound_tokens_per_second=passes * layout.batch * layout.tokens_per_pass,
        implied_prefill_tokens_per_second=implied,
    )


def _cost(inputs: Inputs, times: Times, storage: Storage) -> Cost:
    """Each node is paid for as long as the run lasts, and no longer; an archive as well."""
    prices, hours = inputs.prices, times.elapsed / 3600
    generating = prices.generating_node_per_hour * hours
    training = prices.training_node_per_hour * hours
    months = hours / (24 * 30)
    kept = prices.storage_per_terabyte_month * months * storage.archive / 1e12
    return Cost(generating, training, kept, generating + training + kept)


def _given(value: float | None) -> float:
    assert value is not None, "filled in when the file was read"
    return value
