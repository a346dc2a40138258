"""What one episode is made of. Everything follows from the seed but the time things take."""

import random
from typing import Literal, NamedTuple

from draftfeed_producer.engines.synthetic import SyntheticConfig

SAMPLES_PER_FAULT = 130
"""Enough that faults end before samples do: the rest is trained at full speed."""
SHARD_SAMPLES = 50
Source = Literal["generated", "archived", "replayed"]
"""Where samples come from: made, in one epoch; made once and archived, then served once more; out
of an archive alone, twice."""
SOURCES: tuple[Source, ...] = ("generated", "replayed", "archived")


Link = Literal["tcp", "local"]
"""Training nodes are other hosts; or they are where the producers are, and read their files."""


class Plan(NamedTuple):
    seed: int
    faults: int
    producers: int
    source: Source
    link: Link
    samples: int
    """Lines of the prompt file."""
    fsync: str
    keep_checkpoints: int
    codec: str
    chunk_bytes: int
    checkpoint_steps: int
    batch_samples: int
    window_samples: int
    step_seconds: float
    archive_bytes: int
    """The archive's quota; 0: none. What does not fit is generated once more."""

    def engine(self) -> SyntheticConfig:
        return SyntheticConfig(
            samples=self.samples,
            num_layers=8,
            hidden_size=64,
            vocab_size=512,
            prompt_tokens=16,
            response_tokens=48,
            max_tokens=256,
            shard_size=SHARD_SAMPLES,
            seed=self.seed,
            epochs=self.epochs if self.source == "archived" else 1,
        )

    @property
    def epochs(self) -> int:
        return 1 if self.source == "generated" else 2

    def shards(self, producer: int) -> str:
        """As `[spool] shards` has it: this producer's stretch of all shards."""
        count = -(-self.samples // SHARD_SAMPLES)
        edges = [count * k // self.producers for k in range(self.producers + 1)]
        return f"{edges[producer]}-{edges[producer + 1] - 1}"


def draw(
    seed: int,
    faults: int,
    producers: int,
    source: Source = "generated",
    link: Link = "tcp",
) -> Plan:
    rng = random.Random(seed)
    epochs = 1 if source == "generated" else 2
    return Plan(
        seed=seed,
        faults=faults,
        producers=producers,
        source=source,
        link=link,
        samples=faults * SAMPLES_PER_FAULT // epochs,
        fsync=rng.choice(["always", "interval", "never"]),
        keep_checkpoints=rng.choice([1, 2, 3]),
        codec=rng.choice(["raw", "zstd", "packed"] if link == "tcp" else ["zstd", "auto"]),
        chunk_bytes=rng.choice([8_000, 20_000, 1_000_000]),
        checkpoint_steps=rng.choice([5, 10, 20]),
        batch_samples=rng.choice([1, 2, 3]),
        window_samples=rng.choice([1, 4, 16]),
        step_seconds=rng.choice([0.05, 0.1, 0.2]),
        archive_bytes=rng.choice([0, 8_000_000]) if source == "archived" else 0,
    )
