"""A plan as a list of results, each with the assumptions that drive it."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from draftfeed_deploy.plan import Plan, samples_per_second
from draftfeed_deploy.plan_inputs import Inputs
from draftfeed_deploy.plan_units import Unit


class Result(Struct, frozen=True):
    group: str
    key: str
    value: float
    unit: Unit
    meaning: str
    inputs: tuple[str, ...]
    """The keys of the file that drive it, such as "workload.prompts"."""


class Row(NamedTuple):
    key: str
    value: float
    unit: Unit
    meaning: str
    inputs: str
    """With spaces between."""


SAMPLE = "workload.prompt_tokens workload.response_tokens"
WORK = f"workload.prompts {SAMPLE} workload.epochs"
ROW = "target.tapped_layers target.hidden_size"
OUTPUT = "rates.output_tokens_per_second layout.replicas"
PREFILL = "rates.prefill_tokens_per_second layout.replicas"
LATER = "layout.later_epochs"
TRAINER = (
    "training.gpus training.flops training.utilisation training.drafter_parameters "
    "training.anchors training.block_size workload.response_tokens"
)
PASSES = (
    "hardware.memory_bytes_per_second target.weights_bytes layout.gpus_per_replica layout.batch "
    "layout.tokens_per_pass"
)


def results(inputs: Inputs, plan: Plan) -> list[Result]:
    groups = {
        "work": _work(plan),
        "time": _time(inputs, plan),
        "stream": _stream(inputs, plan),
        "spool and buffers": _buffers(plan),
        "storage and moves": _storage(inputs, plan),
        "GPU memory": _memory(plan),
        "limits of the GPUs": _limits(inputs, plan),
        "cost": _cost(inputs, plan),
    }
    return [
        Result(group, row.key, row.value, row.unit, row.meaning, tuple(row.inputs.split()))
        for group, rows in groups.items()
        for row in rows
    ]


def _work(plan: Plan) -> Iterator[Row]:
    volume = plan.volume
    yield Row(
        "response_tokens",
        volume.response_tokens,
        "tokens",
        "to generate",
        f"workload.prompts workload.response_tokens workload.epochs {LATER}",
    )
    yield Row(
        "prompt_tokens",
        volume.prompt_tokens,
        "tokens",
        "to prefill",
        f"workload.prompts workload.prompt_tokens workload.epochs {LATER}",
    )
    if volume.second_pass_rows:
        yield Row(
            "second_pass_tokens",
            volume.second_pass_rows,
            "tokens",
            "to capture in a pass over responses that exist",
            f"{WORK} layout.capture {LATER}",
        )
    yield Row("row_bytes", volume.row_bytes, "bytes", "of states a token", ROW)
    yield Row(
        "states_bytes", volume.states_bytes, "bytes", "of states in all epochs", f"{WORK} {ROW}"
    )


def _time(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    times, stream = plan.times, inputs.stream
    yield Row(
        "output_seconds",
        times.output,
        "seconds",
        "generating responses",
        f"workload.prompts workload.response_tokens workload.epochs {OUTPUT}",
    )
    how = (
        "rates.prefill_share"
        if inputs.rates.prefill_share is not None
        else f"rates.output_includes_prefill {PREFILL}"
    )
    yield Row("prefill_seconds", times.prefill, "seconds", "prefilling prompts", how)
    if times.second_pass:
        yield Row(
            "second_pass_seconds",
            times.second_pass,
            "seconds",
            "capturing in a second pass",
            PREFILL,
        )
    yield Row("generation_seconds", times.generation, "seconds", "generating node, all of it", "")
    yield Row(
        "encode_seconds",
        times.encode,
        "seconds",
        "encoding, alone",
        "stream.encode_bytes_per_second layout.replicas",
    )
    if inputs.layout.network:
        link = "stream.link_bits_per_second stream.ratio"
        if stream.link_bits_per_second:
            yield Row("link_seconds", times.link, "seconds", "on the link, alone", link)
    yield Row(
        "decode_seconds",
        times.decode,
        "seconds",
        "decoding, alone",
        "stream.decode_bytes_per_second stream.decode_threads",
    )
    trainer = "training.samples_per_second" if inputs.training.samples_per_second else TRAINER
    yield Row(
        "samples_per_second",
        samples_per_second(inputs),
        "samples/s",
        "that the trainer can take",
        trainer,
    )
    yield Row("training_seconds", times.training, "seconds", "training, alone", "")
    yield Row(
        "elapsed_seconds",
        times.elapsed,
        "seconds",
        f"THE RUN; {times.bottleneck} decides",
        "layout.training",
    )


def _stream(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    width = plan.bandwidth
    yield Row(
        "response_rows_bytes_per_second",
        width.response_rows,
        "bytes/s",
        "rows of responses alone",
        f"{OUTPUT} {ROW}",
    )
    yield Row("stream_bytes_per_second", width.mean, "bytes/s", "mean, rows of prompts too", "")
    if width.later:
        meaning = "in later epochs, as fast as they are " + (
            "trained on" if inputs.layout.later_epochs == "replay" else "captured"
        )
        yield Row("later_bytes_per_second", width.later, "bytes/s", meaning, LATER)
    yield Row(
        "burst_bytes_per_second",
        width.burst,
        "bytes/s",
        "burst, when all replicas prefill",
        f"{PREFILL} {ROW}",
    )
    if inputs.layout.network:
        yield Row(
            "wire_bytes_per_second", width.wire, "bytes/s", "on the wire, encoded", "stream.ratio"
        )
        yield Row(
            "link_bits_needed", width.link_bits_needed, "bits/s", "link needed", "stream.headroom"
        )


def _buffers(plan: Plan) -> Iterator[Row]:
    kept = plan.storage
    swap = "layout.swap_minutes layout.checkpoint_minutes layout.replicas"
    yield Row(
        "spool_bytes",
        kept.spool_of_a_replica,
        "bytes",
        "spool of a replica, if nothing shrinks: its quota",
        swap,
    )
    yield Row(
        "spool_encoded_bytes",
        kept.spool_of_a_replica_encoded,
        "bytes",
        "spool of a replica, encoded",
        "stream.ratio",
    )
    yield Row(
        "buffer_least_bytes",
        kept.buffer_least,
        "bytes",
        "trainer's buffer, at least",
        "workload.longest_tokens stream.batch_samples",
    )
    yield Row(
        "buffer_bytes",
        kept.buffer_with_window,
        "bytes",
        "trainer's buffer, with its window",
        f"{SAMPLE} stream.window_samples stream.batch_samples",
    )
    yield Row(
        "staging_bytes",
        kept.staging_of_a_replica,
        "bytes",
        "host memory of a replica, rows in the making",
        "layout.batch workload.longest_tokens",
    )


def _storage(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    kept, moved = plan.storage, plan.moved
    yield Row(
        "epoch_bytes",
        plan.volume.epoch_bytes,
        "bytes",
        "one epoch of states, if kept",
        f"workload.prompts {SAMPLE} {ROW}",
    )
    yield Row(
        "epoch_encoded_bytes", kept.epoch_encoded, "bytes", "the same, encoded", "stream.ratio"
    )
    yield Row(
        "all_encoded_bytes",
        kept.all_encoded,
        "bytes",
        "all epochs, encoded",
        "workload.epochs stream.ratio",
    )
    yield Row(
        "archive_bytes",
        kept.archive,
        "bytes",
        "what this layout has to keep",
        f"layout.training {LATER}",
    )
    yield Row("moved_bytes", moved.before, "bytes", "moved before it begins", _moved_inputs(inputs))
    yield Row(
        "streamed_bytes", moved.stream, "bytes", "moved as states", "layout.network stream.ratio"
    )
    yield Row(
        "drafter_bytes",
        moved.drafter,
        "bytes",
        "the drafter, at the end",
        "training.drafter_parameters",
    )


def _moved_inputs(inputs: Inputs) -> str:
    there = "" if inputs.layout.data_is_there else "target.weights_bytes workload.prompts_bytes"
    head = "target.vocab_size target.hidden_size" if inputs.layout.network else ""
    return f"layout.data_is_there {there} layout.network {head}"


def _memory(plan: Plan) -> Iterator[Row]:
    memory = plan.memory
    if memory is None:
        return
    attention = "target.kv_layers target.kv_heads target.head_dim layout.gpus_per_replica"
    yield Row(
        "memory_budget_bytes",
        memory.budget,
        "bytes",
        "of each GPU",
        "hardware.memory_bytes hardware.memory_fraction",
    )
    yield Row(
        "memory_weights_bytes",
        memory.weights,
        "bytes",
        "weights",
        "target.weights_bytes layout.gpus_per_replica",
    )
    yield Row(
        "memory_token_bytes", memory.cache_of_a_token, "bytes", "KV cache of a token", attention
    )
    yield Row(
        "memory_state_bytes",
        memory.state_of_a_request,
        "bytes",
        "linear-attention state of a request",
        "target.request_state_bytes layout.gpus_per_replica",
    )
    yield Row(
        "memory_cache_bytes",
        memory.cache_at_batch,
        "bytes",
        "caches of a batch, all of them longest",
        "layout.batch workload.longest_tokens",
    )
    yield Row(
        "memory_ring_bytes",
        memory.staging_ring,
        "bytes",
        "staging ring, outside the budget",
        "layout.chunked_prefill_tokens layout.batch",
    )
    yield Row(
        "fits_longest",
        memory.fits_longest,
        "requests",
        "fit, all of them longest",
        "workload.longest_tokens",
    )
    yield Row("fits_mean", memory.fits_mean, "requests", "fit, of mean length", SAMPLE)


def _limits(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    limits = plan.limits
    peak = "hardware.flops layout.gpus_per_replica"
    yield Row(
        "prefill_flops",
        limits.prefill_flops,
        "flops",
        "that the prefill rate of a replica takes",
        "rates.prefill_tokens_per_second target.parameters",
    )
    yield Row("prefill_of_peak", limits.prefill_of_peak, "share", "of the peak of its GPUs", peak)
    yield Row(
        "output_bound",
        limits.output_bound_tokens_per_second,
        "tokens/s",
        "output of a replica at most, by reading its weights",
        PASSES,
    )
    if inputs.rates.prefill_share is not None:
        yield Row(
            "implied_prefill",
            limits.implied_prefill_tokens_per_second,
            "tokens/s",
            "prefill of all replicas that the share stands for",
            "rates.prefill_share",
        )


def _cost(inputs: Inputs, plan: Plan) -> Iterator[Row]:
    cost, prices = plan.cost, inputs.prices
    nodes = {
        "generating node": (cost.generating_node, "prices.generating_node_per_hour"),
        "training node": (cost.training_node, "prices.training_node_per_hour"),
        "archive": (cost.storage, "prices.storage_per_terabyte_month"),
    }
    if not cost.total:
        return
    for name, (money, price) in nodes.items():
        if money:
            yield Row(
                f"cost_{name.replace(' ', '_')}",
                money,
                "money",
                f"{prices.currency}, {name}",
                price,
            )
    yield Row("cost", cost.total, "money", f"{prices.currency}, in all", "")
