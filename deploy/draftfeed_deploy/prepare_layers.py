"""Which layers a drafter reads, beside those that a producer would take by default.

The formula is only a default: drafters are trained on other layers, too, and one that is fed the
formula's learns from tensors of the right shape, without an error, that are not its own.
"""

import json
from pathlib import Path

from msgspec import Struct

from draftfeed_deploy.errors import ConfigError
from draftfeed_producer.target import Target, check_layer_ids
from draftfeed_proto.descriptor import dflash_layer_ids


class Layers(Struct, frozen=True):
    """Ids as in [target] layer_ids: k is the output of decoder block k, from 0."""

    drafter: tuple[int, ...]
    default: tuple[int, ...]
    """What [target] without layer_ids takes; empty where the formula has none for this target."""

    def __str__(self) -> str:
        ids = list(self.drafter)
        if self.drafter == self.default:
            return f"{ids}, which [target] has by default"
        return (
            f"{ids}, not {list(self.default)} as by default: write layer_ids = {ids} into [target] "
            "of the producer and [expect] of the consumer"
        )


def layers_of(path: Path, target: Target) -> Layers:
    """path: a drafter's directory or its config.json. Raises ConfigError, and LayerIdError for
    layers that the target does not have."""
    file = path / "config.json" if path.is_dir() else path
    try:
        ids = json.loads(file.read_bytes())["dflash_config"]["target_layer_ids"]
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(str(file), "has no dflash_config with target_layer_ids") from None
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise ConfigError(str(file), f"its target_layer_ids are {ids!r}, not a list of numbers")
    return Layers(check_layer_ids(ids, target.num_layers), _default(target))


def _default(target: Target) -> tuple[int, ...]:
    try:
        return dflash_layer_ids(target.num_layers)
    except ValueError:
        return ()
