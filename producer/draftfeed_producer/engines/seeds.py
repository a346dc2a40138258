"""Where a sample's random numbers come from, whichever engine draws them."""

import hashlib

from draftfeed_proto.ids import SampleId


def sample_seed(seed: int, id: SampleId) -> int:
    """128 bits of a configuration's seed and a sample's id."""
    digest = hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")
