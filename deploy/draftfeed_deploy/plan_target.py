"""What a model's config.json says of the memory that its requests take."""

import json
from pathlib import Path
from typing import Any

from draftfeed_deploy.errors import ConfigError

STATE_BYTES, CONVOLVED_BYTES = 4, 2
"""SGLang keeps the recurrent state in fp32 and the convolution's in the model's own dtype."""

MOST = 10**9
"""Of anything that a config counts."""


def facts_of(path: Path) -> dict[str, float]:
    """Keys of [target], from a Hugging Face config.json or its directory. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(str(file), "is not JSON") from None
    if not isinstance(config, dict):
        raise ConfigError(str(file), "is not a model's config")
    text = config.get("text_config", config)
    try:
        return _facts(text)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(str(file), f"is not a language model's config: {error}") from None


def _facts(config: dict[str, Any]) -> dict[str, float]:
    layers, hidden = _count(config, "num_hidden_layers"), _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    full = _full_attention_layers(config)
    facts = {
        "hidden_size": hidden,
        "vocab_size": _count(config, "vocab_size"),
        "kv_layers": full,
        "kv_heads": _count(config, "num_key_value_heads", 0) or heads,
        "head_dim": _count(config, "head_dim", 0) or hidden // heads,
        "request_state_bytes": (layers - full) * _linear_state_bytes(config),
    }
    return {name: float(value) for name, value in facts.items()}


def _full_attention_layers(config: dict[str, Any]) -> int:
    """A layer with a sliding window counts as full: its cache is only smaller."""
    kinds, layers = config.get("layer_types"), _count(config, "num_hidden_layers")
    if kinds:
        if not isinstance(kinds, list):
            raise ValueError("layer_types is not a list")
        return sum(kind != "linear_attention" for kind in kinds)
    interval = _count(config, "full_attention_interval", 0)
    return layers // interval if interval else layers


def _linear_state_bytes(config: dict[str, Any]) -> int:
    """Of one gated-delta-net layer: a matrix for each value head, and the last inputs of the
    convolution over keys, queries and values. 0 where the config has no such layers."""
    if "linear_num_value_heads" not in config:
        return 0
    value_heads = _count(config, "linear_num_value_heads")
    key_heads = _count(config, "linear_num_key_heads")
    value_dim = _count(config, "linear_value_head_dim")
    key_dim = _count(config, "linear_key_head_dim")
    matrices = value_heads * value_dim * key_dim * STATE_BYTES
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    window = _count(config, "linear_conv_kernel_dim") - 1
    return matrices + window * channels * CONVOLVED_BYTES


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """default: where there is none, or null. Raises KeyError, ValueError."""
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{key} is {str(value)[:40]!r}, which is no count")
    return value
