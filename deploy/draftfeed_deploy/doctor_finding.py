"""What `draftfeed doctor` says of one thing."""

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "FAIL"]


class Finding(msgspec.Struct, frozen=True):
    check: str
    level: Level
    """FAIL: it will not run, or what runs is wrong. warn: it runs, and may be slow or stop."""
    found: str
    fix: str = ""
    """A command, where there is one."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "warn", found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "FAIL", found, fix)
