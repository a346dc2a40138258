"""The consumer's configuration: one table for each part, declared beside the part."""

import msgspec

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.stream import StreamConfig
from draftfeed_consumer.trainers import TrainerConfig
from draftfeed_proto.descriptor import Expectation


class ConsumerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    producer: ClientConfig = ClientConfig()
    expect: Expectation = Expectation()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig

    @property
    def stream(self) -> StreamConfig:
        return StreamConfig(producer=self.producer, expect=self.expect, buffer=self.buffer)
