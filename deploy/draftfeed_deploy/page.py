"""The status page: one file, whose script asks `/status.json` of its server, and nobody else."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files as package_files
from typing import NamedTuple


class Page(NamedTuple):
    body: bytes
    policy: str
    """Content-Security-Policy: this script and style, questions to this server, nothing else."""


@cache
def page() -> Page:
    text = package_files("draftfeed_deploy").joinpath("data/status.html").read_text("utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; "
        f"script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text.encode(), policy)


def _hash(text: str, name: str) -> str:
    (inner,) = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    digest = hashlib.sha256(inner.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
