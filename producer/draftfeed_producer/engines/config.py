"""Configuration of engines that run a model. Apart from them, so that reading it needs no torch."""

from typing import Any, Literal

import msgspec


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
