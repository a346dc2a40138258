"""Compiles the gather kernels for GPUs that need not be there: one JSON object a line.

Run by `test_tap_kernel` in a process of its own, with one version of Triton on its path.
"""

# Triton is not in the environment that type checkers look at.
# pyright: reportMissingImports=false

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftfeed_producer.tap.kernel import layer_kernel, packed_kernel
from draftfeed_producer.tap.launch import ONE_INPUT, TWO_INPUTS

HIDDEN, LAYERS = 5120, 5
POINTERS = {"packed": "*bf16", "hidden": "*bf16", "residual": "*bf16", "row_map": "*i32"}
BINARIES = Path(str(triton.__file__)).parent / "backends/nvidia/bin"


def compiled(kernel: Any, wire: str, residual: bool, capability: int) -> Any:
    blocking = (TWO_INPUTS if residual else ONE_INPUT).options()
    warps = blocking.pop("num_warps")
    constants: dict[str, Any] = {"P": LAYERS, "L": LAYERS, "H": HIDDEN, **blocking}
    if not residual:
        constants["residual"] = None
    types = {**POINTERS, "rows": f"*{wire}", "counters": "*i32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    # What a launch finds out for itself: all pointers but row_map divide by 16, integers need not.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") and name != "row_map"
    }
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
    )


def inspected(binary: bytes, folder: Path, tool: str, *options: str) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    command = [BINARIES / tool, *options, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def report(name: str, kernel: Any, wire: str, residual: bool, capability: int) -> dict[str, Any]:
    code = compiled(kernel, wire, residual, capability).asm
    folder = Path(sys.argv[1])
    usage = inspected(code["cubin"], folder, "cuobjdump", "--dump-resource-usage")
    machine = inspected(code["cubin"], folder, "nvdisasm", "-c")
    resources = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert resources, usage
    registers, stack, shared, local = map(int, resources.groups())
    return {
        "form": f"{name} {wire}",
        "capability": capability,
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "local": local,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", machine)),
        "slow_conversions": len(re.findall(r"\bF2F\.", machine)),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]+\*/ ", machine, re.MULTILINE)),
        "memory": re.findall(r"\b(?:ld|st)\.global[.\w:]*", code["ptx"]),
        "flushes": ".ftz" in code["ptx"],
    }


if __name__ == "__main__":
    for capability in (90, 100, 120):
        for wire in ("fp16", "bf16"):
            for form in (
                ("packed", packed_kernel, wire, False),
                ("layer", layer_kernel, wire, False),
                ("layer + residual", layer_kernel, wire, True),
            ):
                sys.stdout.write(json.dumps(report(*form, capability)) + "\n")
