"""The producer's configuration: one table for each part, declared beside the part."""

import msgspec

from draftfeed_producer.engines import EngineConfig, SyntheticConfig
from draftfeed_producer.errors import ProducerError
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import PromptsConfig
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.target import TargetConfig


class ProducerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig
    """`name = "transformers"` runs a model, `name = "synthetic"` makes samples without one."""
    target: TargetConfig | None = None
    prompts: PromptsConfig | None = None
    spool: SpoolConfig
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        if isinstance(self.engine, SyntheticConfig) and (self.target or self.prompts):
            raise ValueError("the synthetic engine has neither [target] nor [prompts]: remove them")

    def needed(self) -> tuple[TargetConfig, PromptsConfig]:
        """The tables an engine with a model needs. Raises ProducerError."""
        if self.target is None:
            raise ProducerError("the table [target] is missing: its path names the model directory")
        if self.prompts is None:
            raise ProducerError("the table [prompts] is missing: its path names the prompt file")
        return self.target, self.prompts
