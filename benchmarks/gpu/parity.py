"""Is what the tap writes on the device, bit for bit, what the reference computes on the CPU?"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from findings import Deadline, Report, name_of
from machine import Machine
from torch import Tensor

from draftfeed_producer.tap import reference

PART = "parity"
POISON = 0x5A5A
"""Bits of slots that nobody may touch, and of packed rows once they have been read."""


class Tap(Protocol):
    """The two functions of `draftfeed_producer.tap.gather` and of the reference."""

    def gather_packed(
        self, packed_TLH: Tensor, row_map: Tensor, rows_SLH: Tensor, counters_SL4: Tensor, /
    ) -> None: ...

    def gather_layer(
        self,
        hidden_TH: Tensor,
        residual_TH: Tensor | None,
        layer: int,
        row_map: Tensor,
        rows_SLH: Tensor,
        counters_SL4: Tensor,
        /,
    ) -> None: ...


class Case(NamedTuple):
    layers: int
    hidden: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"L={self.layers} H={self.hidden} {name_of(self.dtype)}"


class Input(NamedTuple):
    """One forward pass, on any device."""

    packed: Tensor
    """bf16 [T, L*H]"""
    residual: Tensor
    """bf16 [T, L*H]"""
    row_map: Tensor
    """int32 [T]"""

    def to(self, device: torch.device) -> "Input":
        return Input(*(tensor.to(device, copy=True) for tensor in self))

    def overwrite(self, other: "Input") -> None:
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)


class Output(NamedTuple):
    rows: Tensor
    """fp16 or bf16 [slots, L, H]"""
    counters: Tensor
    """int32 [slots, L, 4]"""

    @staticmethod
    def poisoned(slots: int, case: Case, device: torch.device) -> "Output":
        rows = torch.empty(slots, case.layers, case.hidden, dtype=case.dtype, device=device)
        shape = (slots, case.layers, reference.COUNTERS)
        made = Output(rows, torch.empty(shape, dtype=torch.int32, device=device))
        made.poison()
        return made

    def poison(self) -> None:
        self.rows.view(torch.int16).fill_(POISON)
        self.counters.fill_(-POISON)


Gather = Callable[[Tap, Input, Output], None]


def packed_form(tap: Tap, given: Input, out: Output) -> None:
    tap.gather_packed(given.packed, given.row_map, out.rows, out.counters)


def layer_form(tap: Tap, given: Input, out: Output) -> None:
    _by_layer(tap, given, out, residual=False)


def residual_form(tap: Tap, given: Input, out: Output) -> None:
    _by_layer(tap, given, out, residual=True)


def _by_layer(tap: Tap, given: Input, out: Output, *, residual: bool) -> None:
    hidden = out.rows.shape[2]
    for layer in range(out.rows.shape[1]):
        mine = slice(layer * hidden, (layer + 1) * hidden)
        hidden_TH, added = given.packed[:, mine], given.residual[:, mine] if residual else None
        tap.gather_layer(hidden_TH, added, layer, given.row_map, out.rows, out.counters)


FORMS: dict[str, Gather] = {
    "packed": packed_form,
    "one layer": layer_form,
    "one layer + residual": residual_form,
}


class ParitySizes(NamedTuple):
    shapes: tuple[tuple[int, int], ...]
    """(layers, hidden), the most important first"""
    replays: int
    seed: int = 20


FULL = ParitySizes(
    shapes=(
        (5, 5120),
        (1, 4096),
        (2, 576),
        (3, 8),
        (4, 1000),
        (6, 2048),
        (7, 7168),
        (8, 2056),
    ),
    replays=2,
)
TINY = ParitySizes(shapes=((5, 64), (1, 8), (2, 24), (8, 40)), replays=2)


def measure(
    machine: Machine, tap: Tap, sizes: ParitySizes, report: Report, deadline: Deadline
) -> None:
    """Rows for eager calls and for replays of a captured graph, one per form."""
    cases = [
        Case(layers, hidden, dtype)
        for layers, hidden in sizes.shapes
        for dtype in (torch.float16, torch.bfloat16)
    ]
    tallies = {form: Tally() for form in FORMS}
    replayed = {form: Tally() for form in FORMS}
    for number, case in enumerate(cases):
        if deadline.passed:
            report.shortened(PART, f"{number} of {len(cases)} shapes and dtypes compared")
            break
        inputs = [
            make_input(case, seed) for seed in range(sizes.seed, sizes.seed + 1 + sizes.replays)
        ]
        plain = [_expected(packed_form, given, case) for given in inputs]
        summed = [_expected(residual_form, given, case) for given in inputs]
        for form, gather in FORMS.items():
            expected = summed if gather is residual_form else plain
            where = f"{form}, {case}"
            tallies[form].add(eager(machine, tap, gather, inputs[0], expected[0], case, where))
            if machine.graphs:
                replayed[form].add(graphed(machine, tap, gather, inputs, expected, case, where))
    for form in FORMS:
        _tell(report, f"{form}, eager", tallies[form])
    for form in FORMS:
        if machine.graphs:
            _tell(report, f"{form}, graph replayed", replayed[form])
        else:
            report.needs_cuda(PART, f"{form}, graph replayed")


class Tally:
    def __init__(self) -> None:
        self.values = 0
        self.passes = 0
        self.wrong: list[str] = []

    def add(self, compared: "Compared") -> None:
        self.values += compared.values
        self.passes += compared.passes
        self.wrong += compared.wrong


class Compared(NamedTuple):
    passes: int
    values: int
    wrong: list[str]


def _tell(report: Report, what: str, tally: Tally) -> None:
    said = f"{tally.values:,} values in {tally.passes} passes"
    report.check(PART, what, said, tally.values, tally.wrong)
    kept: list[Any] = report.rounds.setdefault(PART, [])
    kept.append({"what": what, "values": tally.values, "wrong": tally.wrong[:20]})


def eager(
    machine: Machine, tap: Tap, gather: Gather, given: Input, want: Output, case: Case, where: str
) -> Compared:
    """One call for rows side by side, one for rows that lie wider apart than they are long."""
    there = given.to(machine.device)
    wider = there._replace(packed=_wider(there.packed), residual=_wider(there.residual))
    out = Output.poisoned(len(want.rows), case, machine.device)
    wrong = list[str]()
    for put, words in ((there, where), (wider, f"{where}, wide rows")):
        out.poison()
        gather(tap, put, out)
        machine.synchronize()
        wrong += first_difference(out, want, given, words)
    return Compared(2, 2 * want.rows.numel(), wrong)


def graphed(
    machine: Machine,
    tap: Tap,
    gather: Gather,
    inputs: list[Input],
    expected: list[Output],
    case: Case,
    where: str,
) -> Compared:
    """Captured once on fixed buffers, whose contents change between the replays."""
    fixed = inputs[0].to(machine.device)
    out = Output.poisoned(len(expected[0].rows), case, machine.device)
    replay = machine.captured(lambda: gather(tap, fixed, out))
    wrong, values = [], 0
    for number, (given, want) in enumerate(zip(inputs, expected, strict=True)):
        fixed.overwrite(given)
        out.poison()
        replay()
        machine.synchronize()
        wrong += first_difference(out, want, given, f"{where}, replay {number}")
        values += want.rows.numel()
    return Compared(len(inputs), values, wrong)


def _wider(packed: Tensor) -> Tensor:
    tokens, width = packed.shape
    wide = torch.full((tokens, width + 64), float("nan"), dtype=packed.dtype, device=packed.device)
    wide[:, :width] = packed
    return wide[:, :width]


def _expected(gather: Gather, given: Input, case: Case) -> Output:
    want = Output.poisoned(_slots(len(given.row_map)), case, torch.device("cpu"))
    gather(reference, given, want)
    return want


def make_input(case: Case, seed: int) -> Input:
    """Rows of all patterns, random bits, ordinary values and zeros, mixed with padding."""
    made = torch.Generator().manual_seed(seed)
    width = case.layers * case.hidden
    packed = _bits(width, made)
    residual = _bits(width, made)[torch.randperm(len(packed), generator=made)]
    tokens = len(packed)
    row_map = torch.randperm(_slots(tokens), generator=made)[:tokens].to(torch.int32)
    padding = torch.rand(tokens, generator=made) < 0.2
    # Patterns are fed to be compared: none of the rows with them is padding in the first input.
    if seed % 2 == 0:
        padding[: _pattern_rows(width)] = False
    return Input(packed, residual, torch.where(padding, -1, row_map))


def _slots(tokens: int) -> int:
    return tokens + 7


def _pattern_rows(width: int) -> int:
    return -(-65536 // width)


def _bits(width: int, made: torch.Generator) -> Tensor:
    """bf16 [T, width]"""
    everything = torch.arange(_pattern_rows(width) * width).remainder(65536)
    random = torch.randint(0, 65536, (13, width), generator=made)
    bits = torch.cat((everything.view(-1, width), random)).to(torch.int32).to(torch.int16)
    ordinary = torch.randn(29, width, generator=made).mul(40).to(torch.bfloat16)
    # Past 65504 and below fp16's smallest, as a few channels of real models are.
    ordinary[:, ::97] *= 1e5
    ordinary[:, 3::89] *= 1e-9
    zeros = torch.zeros(3, width, dtype=torch.bfloat16)
    zeros[1] = -0.0
    zeros[2, -1] = 1e-40
    return torch.cat((bits.view(torch.bfloat16), ordinary, zeros))


def first_difference(got: Output, want: Output, given: Input, where: str) -> list[str]:
    """Nothing, or one line that names the first element which differs."""
    rows, wanted = got.rows.cpu().view(torch.int16), want.rows.view(torch.int16)
    if at := _first_differing(rows, wanted):
        place = f"{_place(given.row_map, *at[:2])} element {at[2]}"
        return [f"{where}: {place}: {_hex(rows[at])}, not {_hex(wanted[at])}"]
    counters = got.counters.cpu()
    if at := _first_differing(counters, want.counters):
        place = f"{_place(given.row_map, *at[:2])} counter {at[2]}"
        return [f"{where}: {place}: {int(counters[at])}, not {int(want.counters[at])}"]
    return []


def _first_differing(got: Tensor, want: Tensor) -> tuple[int, int, int] | None:
    if torch.equal(got, want):
        return None
    slot, layer, column = (got != want).nonzero()[0].tolist()
    return slot, layer, column


def _place(row_map: Tensor, slot: int, layer: int) -> str:
    (tokens,) = (row_map == slot).nonzero(as_tuple=True)
    token = f"token {int(tokens[0])}" if len(tokens) else "a slot that no token named"
    return f"{token}, slot {slot} layer {layer}"


def _hex(bits: Tensor) -> str:
    return f"0x{int(bits) & 0xFFFF:04x}"
