"""How a plan shows its figures, and the units that a claim may be in."""

import math
from typing import Literal

Unit = Literal[
    "seconds",
    "bytes",
    "bytes/s",
    "bits/s",
    "tokens",
    "tokens/s",
    "samples/s",
    "requests",
    "flops",
    "share",
    "money",
]

FACTORS: dict[str, float] = {
    "s": 1.0,
    "h": 3600.0,
    "d": 86400.0,
    "B": 1.0,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "MiB/s": 2.0**20,
    "Gbit/s": 1e9,
    "tokens": 1.0,
    "tokens/s": 1.0,
    "PFLOPS": 1e15,
    "%": 0.01,
}
"""What one of each is in the unit that results have."""
MEASURES: dict[str, str] = {
    **dict.fromkeys(("s", "h", "d"), "seconds"),
    **dict.fromkeys(("B", "MB", "GB", "TB", "MiB", "GiB", "TiB"), "bytes"),
    **dict.fromkeys(("MB/s", "GB/s", "MiB/s"), "bytes/s"),
    "Gbit/s": "bits/s",
    "tokens": "tokens",
    "tokens/s": "tokens/s",
    "PFLOPS": "flops",
    "%": "share",
}
"""The unit of the results that each may be about."""
_SYMBOLS = {"bytes": "B", "bytes/s": "B/s", "bits/s": "bit/s", "flops": "FLOPS"}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show(value: float, unit: Unit) -> str:
    if not math.isfinite(value):
        return "no limit"
    if unit == "seconds":
        return _duration(value)
    if unit == "share":
        return f"{value:.0%}"
    if unit in ("tokens", "requests"):
        return f"{value:,.0f}"
    if unit in ("tokens/s", "samples/s", "money"):
        number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        return number if unit == "money" else f"{number} /s"
    return _prefixed(value, _SYMBOLS[unit])


def plain(value: object) -> str:
    """A value of the file, shortly."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float | int):
        return str(value)
    if value >= 1e7:
        return f"{value:.4g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _duration(seconds: float) -> str:
    if seconds >= 86400:
        return f"{seconds / 86400:.2f} d"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.3g} s"


def _prefixed(value: float, unit: str) -> str:
    for factor, prefix in _PREFIXES:
        if value >= 0.9995 * factor:  # what would be rounded up to 1000 of the next smaller
            return f"{value / factor:,.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
