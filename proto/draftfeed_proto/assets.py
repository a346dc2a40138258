"""What names and identifies the target's files, at both ends."""

import hashlib
import re
from collections.abc import Iterable

from draftfeed_proto.messages import AssetFile

TARGET_MANIFEST = "draftfeed-target.json"
"""In a directory of fetched files. Whoever needs a whole model looks for it: nothing else says that
the blocks are missing, and transformers would make random ones up."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,126}\.(json|jinja|model|txt|safetensors)")
"""Of data: nothing that a loader would execute, and nothing outside the directory."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_plain_name(name: str) -> bool:
    """Whether a file of that name may be written into a directory of the target's files."""
    return _PLAIN_NAME.fullmatch(name) is not None


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def identity(files: Iterable[AssetFile]) -> str:
    """32 hex digits, equal for the same files with the same contents (PROTOCOL.md, Assets)."""
    hashed = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        hashed.update(f"{file.digest} {file.bytes} {file.name}\n".encode())
    return hashed.hexdigest()[:32]
