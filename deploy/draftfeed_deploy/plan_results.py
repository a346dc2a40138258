"""A plan as a list of results. What drives each is found by varying what it rests on
(plan_drivers.py), not kept here."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from draftfeed_deploy.plan import Plan, plan, samples_per_second
from draftfeed_deploy.plan_inputs import Inputs, Later
from draftfeed_deploy.plan_units import Unit


class Result(Struct, frozen=True):
    group: str
    key: str
    value: float
    unit: Unit
    meaning: str


_AGAINST: dict[Later, str] = {
    "generate": "saved beside generating every epoch anew",
    "prefill": "saved beside capturing later epochs by prefill",
    "replay": "saved beside an archive of the first epoch",
}


class Row(NamedTuple):
    key: str
    value: float
    unit: Unit
    meaning: str


def results(inputs: Inputs, plan: Plan) -> list[Result]:
    groups = {
        "work": _work(plan),
        "time": _time(inputs, plan),
        "stream": _stream(inputs, plan),
        "spool and buffers": _buffers(plan),
        "storage and moves": _storage(plan),
        "drives of the archive": _drives(plan),
        "GPU memory": _memory(plan),
        "limits of the GPUs": _limits(inputs, plan),
        "cost": _cost(inputs, plan),
    }
    return [Result(group, *row) for group, rows in groups.items() for row in rows]


def values(inputs: Inputs) -> dict[str, float]:
    return {result.key: result.value for result in results(inputs, plan(inputs))}


def _work(plan: Plan) -> Iterator[Row]:
    volume = plan.volume
    yield Row("response_tokens", volume.response_tokens, "tokens", "to generate")
    yield Row("prompt_tokens", volume.prompt_tokens, "tokens", "to prefill")
    if volume.second_pass_rows:
        meaning = "to capture in a pass over responses that exist"
        yield Row("second_pass_tokens", volume.second_pass_rows, "tokens", meaning)
    yield Row("row_bytes", volume.row_bytes, "bytes", "of states a token")
    yield Row("states_bytes", volume.states_bytes, "bytes", "of states in all epochs")


def _time(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    times, layout = plan.times, inputs.layout
    yield Row("output_seconds", times.output, "seconds", "generating responses")
    yield Row("prefill_seconds", times.prefill, "seconds", "prefilling prompts")
    if times.second_pass:
        meaning = "capturing in a second pass"
        yield Row("second_pass_seconds", times.second_pass, "seconds", meaning)
    yield Row("generation_seconds", times.generation, "seconds", "generating node, all of it")
    yield Row("encode_seconds", times.encode, "seconds", "encoding, alone")
    if layout.network and inputs.stream.link_bits_per_second:
        yield Row("link_seconds", times.link, "seconds", "on the link, alone")
    yield Row("decode_seconds", times.decode, "seconds", "decoding, alone")
    rate = samples_per_second(inputs)
    yield Row("samples_per_second", rate, "samples/s", "that the trainer can take")
    yield Row("training_seconds", times.training, "seconds", "training, alone")
    yield Row("elapsed_seconds", times.elapsed, "seconds", f"THE RUN; {times.bottleneck} decides")
    for name, saved in _saved(inputs, times.elapsed):
        yield Row(f"saved_against_{name}_seconds", saved, "seconds", _AGAINST[name])


def _saved(inputs: Inputs, elapsed: float) -> Iterator[tuple[Later, float]]:
    """What the choice for later epochs saves beside each of the others; below 0 it costs."""
    if inputs.workload.epochs <= 1 or inputs.layout.later_epochs == "generate":
        return
    for name in _AGAINST:
        if name != inputs.layout.later_epochs:
            layout = replace(inputs.layout, later_epochs=name)
            yield name, plan(replace(inputs, layout=layout)).times.elapsed - elapsed


def _stream(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    width = plan.bandwidth
    meaning = "rows of responses alone"
    yield Row("response_rows_bytes_per_second", width.response_rows, "bytes/s", meaning)
    yield Row("stream_bytes_per_second", width.mean, "bytes/s", "mean, rows of prompts too")
    if width.later:
        how = "trained on" if inputs.layout.later_epochs == "replay" else "captured"
        meaning = f"in later epochs, as fast as they are {how}"
        yield Row("later_bytes_per_second", width.later, "bytes/s", meaning)
    meaning = "burst, when all replicas prefill"
    yield Row("burst_bytes_per_second", width.burst, "bytes/s", meaning)
    if inputs.layout.network:
        yield Row("wire_bytes_per_second", width.wire, "bytes/s", "on the wire, encoded")
        yield Row("link_bits_needed", width.link_bits_needed, "bits/s", "link needed")


def _buffers(plan: Plan) -> Iterator[Row]:
    kept = plan.storage
    meaning = "spool of a replica, if nothing shrinks: its quota"
    yield Row("spool_bytes", kept.spool_of_a_replica, "bytes", meaning)
    meaning = "spool of a replica, encoded"
    yield Row("spool_encoded_bytes", kept.spool_of_a_replica_encoded, "bytes", meaning)
    yield Row("buffer_least_bytes", kept.buffer_least, "bytes", "trainer's buffer, at least")
    meaning = "trainer's buffer, with its window"
    yield Row("buffer_bytes", kept.buffer_with_window, "bytes", meaning)
    meaning = "host memory of a replica, rows in the making"
    yield Row("staging_bytes", kept.staging_of_a_replica, "bytes", meaning)


def _storage(plan: Plan) -> Iterator[Row]:
    kept, moved = plan.storage, plan.moved
    yield Row("epoch_bytes", plan.volume.epoch_bytes, "bytes", "one epoch of states, if kept")
    yield Row("epoch_encoded_bytes", kept.epoch_encoded, "bytes", "the same, encoded")
    yield Row("all_encoded_bytes", kept.all_encoded, "bytes", "all epochs, encoded")
    yield Row("archive_bytes", kept.archive, "bytes", "what this layout has to keep")
    yield Row("moved_bytes", moved.before, "bytes", "moved before it begins")
    yield Row("streamed_bytes", moved.stream, "bytes", "moved as states")
    yield Row("drafter_bytes", moved.drafter, "bytes", "the drafter, at the end")


def _drives(plan: Plan) -> Iterator[Row]:
    drives = plan.drives
    if drives is None:
        return
    yield Row("drives_filled", drives.filled, "share", "of their capacity")
    yield Row("drives_worn", drives.worn, "share", "of their endurance, by one run")
    meaning = "read in later epochs, encoded, as fast as they are trained on"
    yield Row("drives_read_bytes_per_second", drives.read, "bytes/s", meaning)
    yield Row("drives_read_share", drives.read_share, "share", "of what they can read")


def _memory(plan: Plan) -> Iterator[Row]:
    memory = plan.memory
    if memory is None:
        return
    yield Row("memory_budget_bytes", memory.budget, "bytes", "of each GPU")
    yield Row("memory_weights_bytes", memory.weights, "bytes", "weights")
    yield Row("memory_token_bytes", memory.cache_of_a_token, "bytes", "KV cache of a token")
    meaning = "linear-attention state of a request"
    yield Row("memory_state_bytes", memory.state_of_a_request, "bytes", meaning)
    meaning = "caches of a batch, all of them longest"
    yield Row("memory_cache_bytes", memory.cache_at_batch, "bytes", meaning)
    meaning = "staging ring, outside the budget"
    yield Row("memory_ring_bytes", memory.staging_ring, "bytes", meaning)
    yield Row("fits_longest", memory.fits_longest, "requests", "fit, all of them longest")
    yield Row("fits_mean", memory.fits_mean, "requests", "fit, of mean length")


def _limits(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    limits = plan.limits
    yield Row("gpus_used", limits.gpus_used, "share", "of the node's GPUs, by the target")
    meaning = "that the prefill rate of a replica takes"
    yield Row("prefill_flops", limits.prefill_flops, "flops", meaning)
    yield Row("prefill_of_peak", limits.prefill_of_peak, "share", "of the peak of its GPUs")
    bound = limits.output_bound_tokens_per_second
    meaning = "output of a replica at most, by reading its weights"
    yield Row("output_bound", bound, "tokens/s", meaning)
    if inputs.rates.prefill_share is not None:
        implied = limits.implied_prefill_tokens_per_second
        meaning = "prefill of all replicas that the share stands for"
        yield Row("implied_prefill", implied, "tokens/s", meaning)


def _cost(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    cost, currency = plan.cost, inputs.prices.currency
    if not cost.total:
        return
    for money, key, name in (
        (cost.generating_node, "cost_generating_node", "generating node"),
        (cost.training_node, "cost_training_node", "training node"),
        (cost.storage, "cost_archive", "archive"),
    ):
        if money:
            yield Row(key, money, "money", f"{currency}, {name}")
    yield Row("cost", cost.total, "money", f"{currency}, in all")
