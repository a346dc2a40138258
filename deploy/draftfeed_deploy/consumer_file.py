"""consumer.toml: what the consumer is, and how it is watched."""

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_deploy.status import StatusConfig


class ConsumerFile(ConsumerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    status: StatusConfig = StatusConfig()
