"""Plan files into Inputs: what one extends, a model's config, measurements, and defaults."""

from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from draftfeed_deploy import config, plan_measured, plan_target
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.plan_inputs import PLACES, REASONS, Inputs, Measured, filled

Table = dict[str, Any]
SCENARIOS = Path(str(package_files("draftfeed_deploy").joinpath("scenarios")))
OWN = ("claims", "title")
"""What a file does not have from those that it extends."""
WHOLE = (
    "target.tapped_layers",
    "hardware.gpus",
    "layout.replicas",
    "layout.gpus_per_replica",
    "layout.batch",
)
"""Of these a part is none."""
MOST_EXTENDED = 8
"""Files that may extend each other; more are a circle."""


class Assumption(Struct, frozen=True):
    """One value of a plan and where it comes from."""

    key: str
    value: Any
    source: Literal["given", "measured", "default"]
    note: str = ""
    """Of what is given: the file that gives it, where it is not the plan's own."""


class Layer(NamedTuple):
    name: str
    """Of a file that is extended, or of the settings; "" of the plan's own file."""
    directory: Path
    """That paths in it start from."""
    table: Table


class Case(Struct, frozen=True):
    """A plan's complete inputs, and all that it assumes."""

    name: str
    inputs: Inputs
    stated: Inputs
    """The same before `filled`."""
    assumptions: dict[str, Assumption]
    doubts: tuple[str, ...] = ()
    """Why the benchmark may not be one of this plan's target."""


def names() -> list[str]:
    """Of the scenarios that are shipped."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def load(
    name: str,
    overrides: Sequence[str] = (),
    benchmark: Path | None = None,
    running: Measured | None = None,
) -> Case:
    """name: of a shipped scenario, or a file's. running: what running producers have measured,
    which outdoes a benchmark. What is in `overrides` outdoes all that was measured. Raises
    ConfigError."""
    path = _path(name)
    settings = _settings(overrides)
    table, notes = _merged([*_layers(path), settings])
    fixed = {f"{name}.{key}" for name, part in settings.table.items() for key in part}
    read = plan_measured.read(benchmark) if benchmark is not None else None
    stated = config.build(table, Inputs, str(path))  # faults are told before more is filled in
    notes |= _apply_measured(table, stated.measured, "[measured]", fixed)
    if read is not None:
        where, capture = str(benchmark), stated.layout.capture == "live"
        plan_measured.check_target(read, stated, where)
        rates = plan_measured.measured(read, capture, where)
        notes |= _apply_measured(table, rates, where, fixed)
    if running is not None:
        notes |= _apply_measured(table, running, "this run", fixed)
    tables = {name: part for name, part in table.items() if isinstance(part, dict)}
    given = {f"{name}.{key}" for name, part in tables.items() for key in part}
    stated = config.build(table, Inputs, str(path))
    _check(stated, str(path))
    inputs = filled(stated)
    doubts = plan_measured.doubts(read, inputs, str(benchmark)) if read is not None else ()
    return Case(path.stem, inputs, stated, _assumptions(inputs, given, notes), tuple(doubts))


def _path(name: str) -> Path:
    if name in names():
        return SCENARIOS / f"{name}.toml"
    if name.endswith(".toml") or Path(name).is_file():
        return Path(name)
    known = ", ".join(names())
    raise ConfigError(name, f"is neither a file nor a scenario; scenarios: {known}")


def _layers(path: Path) -> list[Layer]:
    """The file after those that it extends. Claims and the title are a file's own."""
    chain = [Layer("", path.parent, config.read(path))]
    while (base := chain[0].table.get("extends")) is not None:
        if len(chain) == MOST_EXTENDED:
            raise ConfigError(str(path), f"extends more than {MOST_EXTENDED} files, or itself")
        if not isinstance(base, str):
            raise ConfigError(str(path), "extends is not a name")
        inner = _path(base if base in names() else str(chain[0].directory / base))
        table = {key: part for key, part in config.read(inner).items() if key not in OWN}
        chain.insert(0, Layer(inner.stem, inner.parent, table))
    return chain


def _settings(overrides: Iterable[str]) -> Layer:
    table: Table = {}
    for text in overrides:
        config.override(table, text)
    return Layer("--set", Path(), table)


def _merged(layers: Iterable[Layer]) -> tuple[Table, dict[str, str]]:
    """One table; and which of its keys were read from a model's config.json, or come from another
    file than the plan's own.

    A config outdoes what an earlier layer says, and is outdone by what its own says.
    """
    table: Table = {}
    notes: dict[str, str] = {}
    for layer in layers:
        read = _read_config(layer)
        stated = {key: part for key, part in layer.table.items() if isinstance(part, dict)}
        for key, part in stated.items():
            notes |= dict.fromkeys((f"{key}.{inner}" for inner in part), layer.name)
        notes |= dict.fromkeys((f"target.{key}" for key in read), "config.json")
        for key, part in layer.table.items():
            under = table.get(key)
            if key == "target" and read:
                part = {**read, **part}
            if isinstance(part, dict) and isinstance(under, dict):
                part = {**under, **part}
            table[key] = part
    return table, notes


def _read_config(layer: Layer) -> Table:
    """What [target] does not say itself."""
    target = layer.table.get("target")
    if not isinstance(target, dict) or not isinstance(target.get("config"), str):
        return {}
    path = layer.directory / Path(target["config"]).expanduser()
    return {key: value for key, value in plan_target.facts_of(path).items() if key not in target}


def _apply_measured(
    table: Table, found: Measured, where: str, fixed: Collection[str]
) -> dict[str, str]:
    """fixed: keys that stay as they are."""
    notes = {}
    for key, value in msgspec.to_builtins(found).items():
        if value is None or f"{PLACES[key]}.{key}" in fixed:
            continue
        part = table.setdefault(PLACES[key], {})
        assumed = f", assumed {part[key]:g}" if isinstance(part.get(key), int | float) else ""
        part[key] = value
        notes[f"{PLACES[key]}.{key}"] = f"measured: {where}{assumed}"
    known = {"rates.prefill_tokens_per_second", "rates.output_includes_prefill"} & notes.keys()
    if known and "rates.prefill_share" not in fixed:
        table["rates"].pop("prefill_share", None)  # it stood in for what is known now
    return notes


def _check(inputs: Inputs, where: str) -> None:
    """What fields alone do not tell. Raises ConfigError."""
    work = inputs.workload
    for key in WHOLE:
        table, name = key.split(".")
        value = getattr(getattr(inputs, table), name)
        if value != int(value):
            raise ConfigError(where, f"{key} is {value:g}, which is no whole number")
    if inputs.target.hidden_size is None:
        raise ConfigError(where, "target.hidden_size is needed, or target.config to read it from")
    if work.longest_tokens < work.prompt_tokens + work.response_tokens:
        raise ConfigError(where, "workload.longest_tokens is less than a sample of mean length")


def _assumptions(
    inputs: Inputs, given: Iterable[str], notes: dict[str, str]
) -> dict[str, Assumption]:
    found = {}
    for name in (
        "workload",
        "target",
        "hardware",
        "layout",
        "rates",
        "stream",
        "training",
        "prices",
    ):
        part = getattr(inputs, name)
        for field in type(part).__struct_fields__:
            key = f"{name}.{field}"
            found[key] = _assumption(key, getattr(part, field), key in given, notes.get(key, ""))
    return found


def _assumption(key: str, value: Any, given: bool, note: str) -> Assumption:
    if note.startswith("measured: "):
        return Assumption(key, value, "measured", note.removeprefix("measured: "))
    if given:
        return Assumption(key, value, "given", note)
    return Assumption(key, value, "default", REASONS.get(key, ""))
