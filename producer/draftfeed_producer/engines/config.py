"""Configuration of engines that run a model. Apart from them, so that reading it needs no torch."""

from typing import Any, Literal

import msgspec

from draftfeed_proto.limits import MAX_EPOCHS


class CaptureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the responses come from, and how their rows are held until a sample is whole."""

    mode: Literal["live", "prefill"] = "live"
    """live: the target generates, and is captured meanwhile. prefill: the prompt file has the
    responses, and one pass over each captures them."""
    prefix_cache: bool = False
    """SGLang only: prompts share the KV cache of a common beginning, rows are kept by KV slot."""
    staging_bytes: int = 8 << 30
    """Host memory for the rows of samples that are not finished. A prompt is submitted only when
    its longest sample fits."""

    def __post_init__(self) -> None:
        if self.staging_bytes < 1:
            raise ValueError(f"staging_bytes is {self.staging_bytes}, it must be at least 1")


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are drawn."""

    max_new_tokens: int = 512
    """Longest response; one that reaches it finishes with reason "length"."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Smallest set of tokens with at least this probability; 1 = all."""
    top_k: int = 0
    """The k likeliest tokens; 0 = all."""
    seed: int = 0
    """With a sample's id it fixes every random number drawn for that sample."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own end tokens."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, it must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}, it must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, it must not be negative")

    def record(self) -> dict[str, Any]:
        """What goes with each sample."""
        fields = msgspec.structs.asdict(self)
        return {**fields, "stop_token_ids": list(self.stop_token_ids)}


class ReplayConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="archive",
):
    """No target: what is in [archive] roots is served again."""

    first_epoch: int = 1
    """Part of every sample's id: what the archive was made in is 0 unless configured."""
    epochs: int = 1
    """How often every archived prompt is served."""
    subset: tuple[float, float] = (0.0, 1.0)
    """Only samples whose key hashes into this half-open part of 0 to 1, the same ones in every
    epoch: [0, 0.98] to train on and [0.98, 1] to validate with have no sample in common."""

    def __post_init__(self) -> None:
        if self.first_epoch < 0:
            raise ValueError(f"first_epoch is {self.first_epoch}, it must not be negative")
        if not 1 <= self.epochs <= MAX_EPOCHS:
            raise ValueError(f"epochs is {self.epochs}, it must be in 1 to {MAX_EPOCHS}")
        if not 0 <= self.subset[0] < self.subset[1] <= 1:
            raise ValueError(f"subset is {list(self.subset)}, it must rise within 0 and 1")


class TransformersConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="transformers",
):
    """Hugging Face transformers, on the CPU or one GPU."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on a GPU and on CPUs that compute in it; elsewhere float32, faster there."""
    batch_size: int = 16
    """Sequences generated side by side."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, it must be at least 1")
        if self.threads < 0:
            raise ValueError(f"threads is {self.threads}, it must not be negative")


_OURS = {
    "model_path": "[target] path",
    "tp_size": "[engine] tp_size",
    "mem_fraction_static": "[engine] memory_fraction",
    "max_running_requests": "[engine] concurrency",
    "base_gpu_id": "[engine] replica",
    "random_seed": "[engine.sampling] seed",
    "dtype": "[engine] dtype",
    "disable_radix_cache": "[capture] prefix_cache",
    "return_aux_hidden_state_layer_ids": "[target] layer_ids",
    "enable_return_aux_hidden_states": "nothing: it is always on",
    "skip_tokenizer_init": "nothing: the producer tokenises",
}
"""SGLang's arguments that follow from keys of ours."""
_LOSES_ROWS = (
    "speculative_",
    "enable_hierarchical_cache",
    "hicache_",
    "enable_hisparse",
    "enable_lmcache",
    "enable_flexkv",
)
_REFUSED = {
    "disaggregation_mode": "prompts are fed in another engine, and their rows are there",
    "enable_layernorm_sp": "SGLang then keeps a part of each layer only",
    "allow_auto_truncate": "a sample would not have the prompt that it is filed under",
    "preferred_sampling_params": "samples would not say how they were drawn; [engine.sampling]",
}
_ONE = ("pp_size", "dp_size", "nnodes")


class SGLangConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="sglang",
):
    """SGLang, unpatched, in processes of its own; one replica of the target."""

    python: str | None = None
    """The interpreter that has SGLang and draftfeed installed; None: the producer's own."""
    concurrency: int = 64
    """Requests that are in the engine at a time."""
    tp_size: int = 1
    """GPUs of this replica."""
    replica: int = 0
    """Which of the machine's replicas: it takes GPUs from replica * tp_size on."""
    memory_fraction: float | None = None
    """Of each GPU's memory, for weights and KV cache; None: SGLang chooses."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16, when the target's config says so; otherwise it must be said here."""
    ring_bytes: int = 256 << 20
    """Pinned shared memory through which rows leave the engine."""
    start_timeout_seconds: float = 1800.0
    """From starting the engine's process to the first rows that come of it."""
    args: dict[str, Any] = {}
    """More arguments of SGLang's, by their Python names; SGLang checks them."""
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self) -> None:
        for name in ("concurrency", "tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.replica < 0:
            raise ValueError(f"replica is {self.replica}, it must not be negative")
        if self.memory_fraction is not None and not 0 < self.memory_fraction < 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}, it must be in (0, 1)")
        if self.ring_bytes < 1 << 20:
            raise ValueError(f"ring_bytes is {self.ring_bytes}, it must be at least 1 MiB")
        if self.start_timeout_seconds <= 0:
            raise ValueError("start_timeout_seconds must be positive")
        for key, value in self.args.items():
            _check_argument(key, value)


def _check_argument(key: str, value: Any) -> None:
    """Raises ValueError for what cannot go with a capture."""
    if key in _OURS:
        raise ValueError(f"args.{key} is not for [engine.args]; it follows from {_OURS[key]}")
    if key in _ONE and value != 1:
        hint = "start one producer for each replica" if key == "dp_size" else "it must be 1"
        raise ValueError(
            f"args.{key} is {value!r}: capture needs every layer in one engine; {hint}"
        )
    if key in _REFUSED and value not in (None, False, "null"):
        raise ValueError(f"args.{key} cannot go with a capture: {_REFUSED[key]}")
    if key == "chunked_prefill_size" and isinstance(value, int) and value <= 0:
        raise ValueError(
            "args.chunked_prefill_size must be above 0: GPU memory for the rows of two passes is "
            "set aside, and without chunks a pass is as long as the longest prompt"
        )
    # Even none: it is set, to name a convention, and loads nothing.
    if key.startswith(_LOSES_ROWS) and (value or key == "speculative_algorithm"):
        raise ValueError(
            f"args.{key}: rows are lost under speculative decoding and with a KV cache that is "
            "moved to the host; generate without capture, then capture the responses in one pass "
            'each with [capture] mode = "prefill"'
        )
