"""What the other rooms import. A name goes only together with the protocol's major version."""

import importlib
from types import ModuleType

import pytest

from draftfeed_proto import errors

PUBLIC = {
    "assets": "TARGET_MANIFEST identity is_digest is_plain_name",
    "chunk": "ChunkHeader ChunkKind HEADER_BYTES MAGIC decode_chunk decode_states decode_tokens "
    "encode_states encode_tokens frame_bytes read_header verify",
    "codecs": "Chooser Codec PACKED by_name by_number names",
    "descriptor": "Descriptor Expectation dflash_layer_ids",
    "encoder": "Encoder",
    "ids": "IdSet SampleId Shards WireRanges",
    "messages": "Account AllTerminal AssetFile AssetPiece Assets AtWork Begin Bye CheckpointWanted "
    "Chunk Closing Commit Committed Credit EndOfSamples Fence FetchAsset FromMember FromProducer "
    "Grant Granted InSession Inquire ListAssets Message Nack Offer Open Opened Ping Refused "
    "Reject Release VERSION check_version decode_from_member decode_from_producer encode",
    "sample": "Assembler LayerCounters Sample SampleHeader decoded_bytes encode_chunks header_of",
    "workers": "Workers",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names_are_there(module: str) -> None:
    found: ModuleType = importlib.import_module(f"draftfeed_proto.{module}")
    assert not set(PUBLIC[module].split()) - set(vars(found))


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    own = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    tree = (errors.__doc__ or "").replace("(", " ").split()
    kinds = [kind for kind in own if kind.__module__ == errors.__name__]
    assert kinds
    assert all(issubclass(kind, ValueError) and kind.__name__ in tree for kind in kinds)
