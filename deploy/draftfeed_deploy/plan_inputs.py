"""What `draftfeed plan` is told: workload, target, hardware, layout and rates, as TOML tables.

Counts that are multiplied are floats, so that the sensitivity can vary them. All bytes and rates
are plain SI units: bytes, seconds, tokens per second.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

Positive = Annotated[float, Meta(ge=1e-9, le=1e21)]
Fraction = Annotated[float, Meta(ge=1e-9, le=1)]
Later = Literal["generate", "replay", "prefill"]
NotNegative = Annotated[float, Meta(ge=0, le=1e21)]


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be generated and trained on."""

    prompts: Positive
    prompt_tokens: Positive
    """Mean."""
    response_tokens: Positive
    """Mean, thinking included."""
    epochs: Positive = 1.0
    """Passes of the trainer over all prompts."""
    longest_tokens: Positive = 8192.0
    """Prompt and response of the longest sample together."""
    prompts_bytes: Positive | None = None
    """Of the prompt file. None: 4 bytes a token."""


class TargetModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The target. What is None here is read from `config`, or must be given."""

    config: str | None = None
    """The model's directory or its config.json."""
    weights_bytes: Positive
    parameters: Positive | None = None
    """Active for each token. None: weights_bytes / 2."""
    hidden_size: Positive | None = None
    vocab_size: Positive | None = None
    tapped_layers: Positive = 5.0
    kv_layers: NotNegative | None = None
    """Layers that keep keys and values: those with full attention."""
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    request_state_bytes: NotNegative | None = None
    """What the other layers, of linear attention, keep for each request."""


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node that generates; figures of one GPU."""

    gpu: str
    gpus: Positive
    memory_bytes: Positive
    memory_bytes_per_second: Positive
    flops: Positive
    """Dense bf16, at its peak."""
    memory_fraction: Fraction = 0.85
    """Of a GPU's memory, for weights, KV cache and states."""


class Layout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the run is laid over the hardware."""

    replicas: Positive
    """Of the target, each with a producer of its own."""
    gpus_per_replica: Positive
    batch: Positive = 64.0
    """Requests of a replica at a time."""
    capture: Literal["live", "prefill"] = "live"
    """prefill: responses are generated without a capture, which is one more pass over them."""
    tokens_per_pass: Positive = 1.0
    """Of a request in one pass; more than 1 with speculative decoding."""
    later_epochs: Later = "generate"
    """Where the samples of all epochs but the first come from: generated anew; out of an archive
    of the first; or captured once more from its responses, in one pass over each."""
    training: Literal["streamed", "after"] = "streamed"
    """after: on the same GPUs, when everything is generated; all states are kept till then."""
    network: bool = True
    """Whether trainer and target are on different nodes."""
    data_is_there: bool = True
    """Whether the generating node has the target's weights and the prompts."""
    chunked_prefill_tokens: Positive = 4096.0
    checkpoint_minutes: Positive = 5.0
    """Between two checkpoints of the trainer."""
    swap_minutes: Positive = 30.0
    """How long the training node may be away without stopping generation."""


class Rates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one replica."""

    output_tokens_per_second: Positive
    prefill_tokens_per_second: Positive
    output_includes_prefill: bool = False
    """Whether the output rate is of whole requests, their prompts' prefill included."""
    prefill_share: Positive | None = None
    """Prefill of prompts as a share of the decoding time. Nobody's measurement: it stands in for
    the prefill rate, to compute what somebody else has computed."""


class Stream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From the target to the trainer."""

    ratio: Positive = 1.48
    """Bytes of states over bytes encoded."""
    link_bits_per_second: Positive | None = None
    """None: not known; the plan says what is needed."""
    headroom: Positive = 1.3
    """A link has so many times the mean."""
    encode_bytes_per_second: Positive = 4.8e9
    """Of states, one thread; each replica's producer has one."""
    decode_bytes_per_second: Positive = 4.5e9
    decode_threads: Positive = 2.0
    window_samples: Positive = 64.0
    batch_samples: Positive = 1.0


class Archive(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drives that keep one epoch, where later ones are replayed; figures of one drive."""

    drives: Positive = 1.0
    drive_bytes: Positive = 30.72e12
    read_bytes_per_second: Positive = 7e9
    write_bytes_per_second: Positive = 3e9
    endurance_bytes: Positive = 28e15
    """That may be written to it before it is worn."""


class Training(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drafter and what trains it."""

    gpus: Positive
    flops: Positive | None = None
    """Of one GPU. None: [hardware] flops."""
    drafter_parameters: Positive = 2e9
    utilisation: Fraction = 0.3
    """Of the peak."""
    anchors: Positive = 512.0
    """Blocks of a sample; a sample has no more than response tokens."""
    block_size: Positive = 16.0
    samples_per_second: Positive | None = None
    """Of all GPUs together. None: computed from the above."""


class Prices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out costs nothing."""

    currency: str = "USD"
    generating_node_per_hour: NotNegative = 0.0
    training_node_per_hour: NotNegative = 0.0
    storage_per_terabyte_month: NotNegative = 0.0


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements, which replace the assumption of the same name."""

    prompt_tokens: Positive | None = None
    response_tokens: Positive | None = None
    output_tokens_per_second: Positive | None = None
    prefill_tokens_per_second: Positive | None = None
    output_includes_prefill: bool | None = None
    batch: Positive | None = None
    ratio: Positive | None = None
    samples_per_second: Positive | None = None


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure of somebody's; the plan computes it on the same terms, and on its own."""

    says: str
    """In words."""
    result: str
    """The key of the result that it is about."""
    value: float
    high: float | None = None
    """With it the claim is a range from `value` on."""
    unit: str
    """As in docs/plan.md: "d", "h", "TiB", "MiB/s" ..."""
    rounding: Positive
    """The step that `value` is rounded to."""
    case: tuple[str, ...] = ()
    """What is other than in the plan, as `--set` would have it."""
    terms: tuple[str, ...] = ()
    """How the claim reckons where the plan reckons otherwise, in the same form."""
    against: tuple[str, ...] | None = None
    """With it `value` is a change in percent, against the plan with these in place of `case`."""
    note: str = ""


class Inputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan's file. It may begin as another one, `extends`, and say what differs."""

    title: str = ""
    extends: str = ""
    workload: Workload
    target: TargetModel
    hardware: Hardware
    layout: Layout
    rates: Rates
    training: Training
    stream: Stream = Stream()
    archive: Archive = Archive()
    prices: Prices = Prices()
    measured: Measured = Measured()
    claims: tuple[Claim, ...] = ()


def filled(inputs: Inputs) -> Inputs:
    """With what follows from the rest in the place of None."""
    work, target, training = inputs.workload, inputs.target, inputs.training
    tokens = work.prompts * work.prompt_tokens
    return replace(
        inputs,
        workload=replace(work, prompts_bytes=work.prompts_bytes or 4 * tokens),
        target=replace(target, parameters=target.parameters or target.weights_bytes / 2),
        training=replace(training, flops=training.flops or inputs.hardware.flops),
    )


REASONS = {
    "workload.longest_tokens": "a guess",
    "workload.prompts_bytes": "4 bytes a token",
    "target.parameters": "2 bytes each",
    "target.tapped_layers": "DFlash",
    "hardware.memory_fraction": "docs/deploy-pro6000.md",
    "stream.ratio": "SmolLM2-135M, docs/status.md",
    "stream.encode_bytes_per_second": "AVX2, docs/benchmarks.md",
    "stream.decode_bytes_per_second": "AVX2, docs/benchmarks.md",
    "stream.headroom": "a guess",
    "archive.drives": "one of today's, QLC",
    "archive.drive_bytes": "one of today's, QLC",
    "archive.read_bytes_per_second": "one of today's, QLC",
    "archive.write_bytes_per_second": "one of today's, QLC",
    "archive.endurance_bytes": "half of it a day for five years",
    "training.drafter_parameters": "DFlash for H = 5120",
    "training.utilisation": "a guess: measure it",
    "training.anchors": "SpecForge 0.2.0",
    "training.block_size": "DFlash",
    "training.flops": "as [hardware]",
}
"""Where a default comes from."""
PLACES = {
    "prompt_tokens": "workload",
    "response_tokens": "workload",
    "output_tokens_per_second": "rates",
    "prefill_tokens_per_second": "rates",
    "output_includes_prefill": "rates",
    "batch": "layout",
    "ratio": "stream",
    "samples_per_second": "training",
}
"""The table in which each of Measured's keys replaces one."""
