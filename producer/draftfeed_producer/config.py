"""The producer's configuration: one table for each part, declared beside the part."""

import msgspec

from draftfeed_producer.archive import ArchiveConfig
from draftfeed_producer.conversations import OutputConfig
from draftfeed_producer.engines import (
    CaptureConfig,
    EngineConfig,
    ReplayConfig,
    SyntheticConfig,
)
from draftfeed_producer.engines.config import SGLangConfig
from draftfeed_producer.errors import ProducerError
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import PromptsConfig
from draftfeed_producer.quality import QualityConfig
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.target import TargetConfig


class ProducerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig
    """`name = "sglang"` or `"transformers"` runs a model, `"synthetic"` makes samples without."""
    capture: CaptureConfig = CaptureConfig()
    target: TargetConfig | None = None
    prompts: PromptsConfig | None = None
    spool: SpoolConfig
    archive: ArchiveConfig | None = None
    server: ServerConfig = ServerConfig()
    quality: QualityConfig = QualityConfig()
    output: OutputConfig = OutputConfig()

    def __post_init__(self) -> None:
        if self.capture.prefix_cache and not isinstance(self.engine, SGLangConfig):
            raise ValueError('[capture] prefix_cache is for [engine] name = "sglang": remove it')
        if self.output.conversations is not None and self.capture.mode == "prefill":
            raise ValueError('[output] conversations is for [capture] mode = "live": remove it')
        if self.spool.retain == "archive" and self.archive is None:
            raise ValueError('[spool] retain = "archive" needs [archive] with its roots')
        for root in self.archive.roots if self.archive is not None else ():
            if root.resolve() == self.spool.dir.resolve():
                raise ValueError(f"[archive] roots: {root} is [spool] dir; give it another one")
        if isinstance(self.engine, ReplayConfig):
            self._check_replay()
        if not isinstance(self.engine, SyntheticConfig):
            return
        if self.output.conversations is not None:
            raise ValueError("the synthetic engine has no conversations: remove [output]")
        if self.target or self.prompts:
            raise ValueError("the synthetic engine has neither [target] nor [prompts]: remove them")
        if self.capture.mode == "prefill":
            raise ValueError('the synthetic engine has no responses for [capture] mode = "prefill"')

    def _check_replay(self) -> None:
        if self.archive is None:
            raise ValueError('[engine] name = "archive" needs [archive] with its roots')
        if self.target or self.prompts or self.output.conversations is not None:
            raise ValueError("a replay has no [target], [prompts] or [output]: remove them")
        if self.spool.retain == "archive":
            raise ValueError('[spool] retain = "archive" is for a target: a replay makes nothing')

    def needed(self) -> tuple[TargetConfig, PromptsConfig]:
        """The tables an engine with a model needs. Raises ProducerError."""
        if self.target is None:
            raise ProducerError("the table [target] is missing: its path names the model directory")
        if self.prompts is None:
            raise ProducerError("the table [prompts] is missing: its path names the prompt file")
        return self.target, self.prompts
