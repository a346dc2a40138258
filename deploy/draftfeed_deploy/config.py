"""TOML files into frozen Structs; what is unknown or wrong is named, with the nearest right key."""

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from draftfeed_deploy.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)
Table = dict[str, Any]
_TABLES = {"engine": "producer", "trainer": "consumer"}
"""A table that only that service's file has, and has to have."""
MOST_BYTES = 1 << 20
"""Of a file."""
_type_info = functools.cache(inspect.type_info)
"""It takes as long as all the rest of reading a file."""


def load(path: Path, kind: type[Config], overrides: Iterable[str] = ()) -> Config:
    """overrides: `table.key=value`, the value in TOML or a bare word. Raises ConfigError."""
    table = read(path)
    _check_service(table, kind, path)
    for text in overrides:
        override(table, text)
    return build(table, kind, str(path))


def _check_service(table: Table, kind: type[Config], path: Path) -> None:
    """A file of the other service is full of unknown keys; what is wrong is none of them."""
    wanted = [name for name in _TABLES if name in kind.__struct_fields__]
    found = [name for name in _TABLES if name in table]
    if len(wanted) == len(found) == 1 and wanted != found:
        service, other = _TABLES[wanted[0]], _TABLES[found[0]]
        raise ConfigError(
            str(path), f"is a {other}'s file, with [{found[0]}]; a {service}'s is needed here"
        )


def build(table: Table, kind: type[Config], where: str) -> Config:
    """A table as the Struct it should be. Raises ConfigError."""
    for fault in _faults(table, _type_info(kind), ()):
        raise ConfigError(where, fault)
    try:
        return msgspec.convert(table, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(where, plain_words(str(error))) from None


def _path(kind: type, value: Any) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise TypeError("expected a path, as a string")
    if not value:
        raise ValueError("expected a path, not an empty string")
    return Path(value).expanduser()


def read(path: Path) -> Table:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ConfigError(str(path), f"has more than {MOST_BYTES} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from None


def override(table: Table, text: str) -> None:
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}", "is not of the form table.key=value")
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {text}", f"{key!r} is a value, not a table")
        table = inner
    table[keys[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _faults(value: Any, kind: inspect.Type, path: tuple[str, ...]) -> Iterator[str]:
    """Keys that no Struct declares, tags that no Struct carries and words that are no choice."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, str):
        yield from _no_choice(value, kinds, path)
    structs = [one for one in kinds if isinstance(one, inspect.StructType)]
    if not structs or not isinstance(value, dict):
        return
    tagged = {one.tag: one for one in structs if one.tag_field}
    if not tagged:
        yield from _unknown_keys(value, structs[0], path)
    elif (tag := value.get(str(structs[0].tag_field))) in tagged:
        yield from _unknown_keys(value, tagged[tag], path)
    else:
        name = ".".join((*path, str(structs[0].tag_field)))
        near = f", not {tag!r}" if tag is not None else ""
        yield f"{name} must be one of {', '.join(map(repr, tagged))}{near}"


def _no_choice(value: str, kinds: Sequence[inspect.Type], path: tuple[str, ...]) -> Iterator[str]:
    choices = [
        one for kind in kinds if isinstance(kind, inspect.LiteralType) for one in kind.values
    ]
    if choices and value not in choices and not any(isinstance(k, inspect.StrType) for k in kinds):
        yield f"{'.'.join(path)} must be one of {', '.join(map(repr, choices))}, not {value!r}"


def _unknown_keys(table: Table, struct: inspect.StructType, path: tuple[str, ...]) -> Iterator[str]:
    fields = {field.encode_name: field.type for field in struct.fields}
    known = [*fields, *([struct.tag_field] if struct.tag_field else [])]
    for key, inner in table.items():
        if key not in known:
            yield _unknown_words((*path, key), known)
        elif key in fields:
            yield from _faults(inner, fields[key], (*path, key))


def _unknown_words(path: tuple[str, ...], known: list[str]) -> str:
    near = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {'.'.join(path)!r}; {hint}"


def plain_words(text: str) -> str:
    """msgspec's words with our names: "`$.spool.dir`" becomes "spool.dir"."""
    return re.sub(r"`\$\.?([^`]*)`", lambda found: found[1] or "the file", text)
