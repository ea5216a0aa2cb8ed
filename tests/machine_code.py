"""What a kernel's machine code says."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton


def instructions(cubin: bytes | Path) -> list[str]:
    """Of a kernel, one a line, "/*address*/ instruction". Triton's own listing leaves lines out."""
    if isinstance(cubin, bytes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(cubin)
            return instructions(path)
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    sass = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]


def spilled(instruction: str) -> int:
    """Bytes of local memory that it stores or loads."""
    local = re.search(r"\b(?:LDL|STL)(\S*)", instruction)
    return 0 if not local else next((n for kind, n in (("128", 16), ("64", 8)) if kind in local[1]), 4)


def overwritten(code: list[str]) -> list[str]:
    """Products whose left operand, in registers, is what it was before the loop, but not in the loop's second turn:
    nothing writes it between the loop's head and the product, something does behind, and no spilled value comes back.
    (Of kernels that carry no left operand from turn to turn.)"""
    code = [match[1] + match[2] for line in code if (match := re.search(r"/\*([0-9a-f]+)\*/(\s+.*?);", line))]
    place = {int(line.split()[0], 16): i for i, line in enumerate(code)}
    written = [set(_written(line.split(maxsplit=1)[1])) for line in code]
    found = []
    for end, line in enumerate(code):
        back = re.search(r"@!?U?P\d+ BRA\S*\s.*?0x([0-9a-f]+)", line)  # one without a condition is no loop's edge
        head = place.get(int(back[1], 16), end) if back else end
        for i in range(head, end):
            product = re.search(r"HGMMA\S+ R\d+, R(\d+)", code[i])
            if product:
                operand = set(range(int(product[1]), int(product[1]) + 4)) - set().union(*written[head:i])
                last = {register: code[k] for k in range(i + 1, end) for register in written[k] & operand}
                if any("LDL" not in writer for writer in last.values()):
                    found.append(code[i])
    return found


def written_in_flight(code: list[str]) -> list[str]:
    """Instructions that write a register which a product in flight reads or adds to. In the listing's order: no product
    is in flight across a loop's edge."""
    groups: list[set[int]] = []  # of products, as they are waited for; the last is not committed yet
    found, open_group = [], set()
    for line in code:
        instruction = line.split("*/", 1)[1].strip()
        if "HGMMA" in instruction:
            accumulator = set(_written(instruction))
            left = re.search(r"HGMMA\S+ R\d+, R(\d+)", instruction)
            open_group |= accumulator | (set(range(int(left[1]), int(left[1]) + 4)) if left else set())
            if "gsb0" in instruction:
                groups.append(open_group)
                open_group = set()
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", instruction):
            groups = groups[len(groups) - int(wait[1]) :] if int(wait[1]) else []
        elif set(_written(instruction)) & open_group.union(*groups):
            found.append(line)
    return found


def _written(instruction: str) -> range:
    """Registers that an instruction writes."""
    match = re.match(r"(?:@!?U?P\w+ )?(\w+)(\S*)\s+(?:!?U?P\w+, )*R(\d+)\b", instruction)
    if not match or match[1] in ("ST", "STS", "STG", "STL", "RED", "BAR", "BRA", "STSM"):
        return range(0)
    operation, kinds, first = match[1], match[2], int(match[3])
    shape = re.search(r"\.64x(\d+)x", kinds)
    if operation == "HGMMA" and shape:
        return range(first, first + int(shape[1]) // 2)
    wide = {".128": 4, ".M88.4": 4, ".MT88.4": 4, ".64": 2, ".WIDE": 2, ".M88.2": 2}
    return range(first, first + max((n for kind, n in wide.items() if kind in kinds), default=1))
