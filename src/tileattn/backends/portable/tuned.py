"""Files of tiles that were found by `tileattn tune`, for chips whose tiles are not in `tuning`: written, read, checked.

    {"device": "NVIDIA H200", "versions": {...}, "tiles": [
      {"kernel": "forward", "dtype": "bfloat16", "head_dim": 64, "tile": {"block_m": 64, "block_n": 128, ...}}, ...]}

A file holds for GPUs of its name; a tile for head dims up to its own, float16 and bfloat16 alike.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tileattn.backends.portable.tuning import Kernel, Table, Tile

KERNELS = get_args(Kernel)
DTYPES = ("bfloat16", "float16", "float32")


class Tuned(NamedTuple):
    """device: the name that PyTorch gives it. tables: by dtype."""

    device: str
    tables: dict[str, Table]

    def table_for(self, dtype: str) -> Table:
        """A tile for one of float16 and bfloat16 serves the other where that has none."""
        alike = ["float32"] if dtype == "float32" else [*sorted({"float16", "bfloat16"} - {dtype}), dtype]
        found: Table = {}
        for name in alike:
            for kernel, by_dim in self.tables.get(name, {}).items():
                found[kernel] = found.get(kernel, {}) | by_dim
        return found


class Entry(NamedTuple):
    kernel: Kernel
    dtype: str
    head_dim: int
    tile: Tile


def write(path: str | os.PathLike[str], device: str, versions: dict[str, Any], entries: list[Entry]) -> None:
    tiles = [{**entry._asdict(), "tile": _as_json(entry.tile)} for entry in entries]
    Path(path).write_text(json.dumps({"device": device, "versions": versions, "tiles": tiles}, indent=1) + "\n")


def _as_json(tile: Tile) -> dict[str, Any]:
    return {**tile._asdict(), "dv": tile.dv and _as_json(tile.dv)}


def read(path: str | os.PathLike[str]) -> Tuned:
    """Raises ValueError, in a sentence that names the place in the file, for anything but tiles."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"TILEATTN_TILES={path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"TILEATTN_TILES={path}: not JSON ({error})") from error
    try:
        fields = _fields(content, "the file", {"device", "tiles"}, {"versions"})
        tables: dict[str, Table] = {}
        for i, entry in enumerate(_typed(fields["tiles"], "tiles", list)):
            kernel, dtype, head_dim, tile = _entry(entry, f"tiles[{i}]")
            tables.setdefault(dtype, {}).setdefault(kernel, {})[head_dim] = tile
        return Tuned(_typed(fields["device"], "device", str), tables)
    except ValueError as error:
        raise ValueError(f"TILEATTN_TILES={path}: {error}") from None


def _entry(entry: Any, where: str) -> Entry:
    entry = _fields(entry, where, set(Entry._fields))
    for name, known in (("kernel", KERNELS), ("dtype", DTYPES)):
        if entry[name] not in known:
            raise ValueError(f"{where}.{name}={entry[name]!r}: must be one of {', '.join(known)}")
    head_dim = _number(entry["head_dim"], f"{where}.head_dim", 1, 1024)
    return Entry(entry["kernel"], entry["dtype"], head_dim, _tile(entry["tile"], f"{where}.tile", entry["kernel"]))


def _tile(fields: Any, where: str, kernel: str) -> Tile:
    required = {"block_m", "block_n", "num_warps", "num_stages"}
    fields = _fields(fields, where, required, set(Tile._fields) - required)
    for name in ("block_m", "block_n"):
        _power_of_two(fields[name], f"{where}.{name}", 16, 128)
    _power_of_two(fields["num_warps"], f"{where}.num_warps", 1, 16)
    _number(fields["num_stages"], f"{where}.num_stages", 1, 8)
    for name in ("registers", "masked_registers"):
        _number(fields.get(name, 0), f"{where}.{name}", 0, 255)
    for name in {"descriptors", "ranges", "held"} & fields.keys():
        _typed(fields[name], f"{where}.{name}", bool)
    if fields.get("dv") is None:
        return Tile(**fields)
    if kernel != "backward_kv":
        raise ValueError(f"{where}.dv: only a tile of backward_kv has one")
    return Tile(**{**fields, "dv": _tile(fields["dv"], f"{where}.dv", "")})


def _fields(x: Any, where: str, required: set[str], optional: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    x = _typed(x, where, dict)
    for problem, names in (("lacks", required - x.keys()), ("has unknown", x.keys() - required - optional)):
        if names:
            raise ValueError(f"{where} {problem} {', '.join(sorted(names))}")
    return x


def _typed(x: Any, where: str, kind: type) -> Any:
    if not isinstance(x, kind):
        raise ValueError(f"{where}={json.dumps(x):.60}: must be {_IN_JSON[kind]}")
    return x


_IN_JSON = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}


def _number(x: Any, where: str, least: int, most: int) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or not least <= x <= most:
        raise ValueError(f"{where}={x!r}: must be a whole number from {least} to {most}")
    return x


def _power_of_two(x: Any, where: str, least: int, most: int) -> None:
    if _number(x, where, least, most) & (x - 1):
        raise ValueError(f"{where}={x}: must be a power of two")
