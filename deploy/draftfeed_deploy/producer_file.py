"""producer.toml: what the producer is, and how it is watched."""

from draftfeed_deploy.status import StatusConfig
from draftfeed_producer.config import ProducerConfig


class ProducerFile(ProducerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    status: StatusConfig = StatusConfig()
