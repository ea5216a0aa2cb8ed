"""tileattn env: what is installed, what the hardware is, which backends can be used and why not."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from tileattn import dispatch
from tileattn.problem import Problem

DESCRIPTION = """\
Say what tileattn finds here: versions, processor, caches and threads, GPUs, and for each backend whether it can be used
on them and if not, why. Paste the output into a report of a bug.
"""
PACKAGES = ("tileattn", "torch", "triton", "numpy", "transformers")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "env",
        help="versions, hardware, and which backends can be used here",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = {
        "versions": versions(),
        "system": platform.platform(),
        "cpu": cpu(),
        "gpus": gpus(),
        "backends": backends(),
    }
    print(json.dumps(found, indent=2) if args.json else _report(found))
    return 0


def versions() -> dict[str, str | None]:
    """Version of python and of each package of interest, None for one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu() -> dict[str, Any]:
    """Name, instruction set that PyTorch uses, cores, threads, caches ({"L1d": "32K", ...}; Linux only)."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            caches[f"L{level}{'d' if kind == 'Data' else ''}"] = size
    return {
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "caches": caches,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "l2": properties.L2_cache_size,
            }
        )
    return found


def backends() -> dict[str, dict[str, str]]:
    """For each backend and kind of device here: "usable", or why not."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {name: {device: _usable(name, device) for device in devices} for name in dispatch.BACKENDS}


def _usable(name: str, device: str) -> str:
    q = torch.empty(1, 1, 1, 64, device=device)
    problem, _ = Problem.of(q, q, q)
    try:
        return dispatch.load(name).supports(problem) or "usable"
    except ImportError as error:
        return f"cannot be imported: {error}"


def stamp(device: torch.device) -> dict[str, Any]:
    """Where and when a result was measured: the head of a result file."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{_cpu_name()}, {torch.get_num_threads()} threads"
    )
    return {"device": name, "date": datetime.date.today().isoformat(), "versions": versions()}


def _report(found: dict[str, Any]) -> str:
    processor = found["cpu"]
    caches = ", ".join(f"{level} {size}" for level, size in processor["caches"].items()) or "unknown"
    lines = [f"{name:14}{version or 'not installed'}" for name, version in found["versions"].items()]
    lines += [
        f"{'system':14}{found['system']}",
        f"{'cpu':14}{processor['name']}, {processor['capability']}",
        f"{'threads':14}{processor['threads']} of {processor['cores']} cores",
        f"{'caches':14}{caches}",
    ]
    for gpu in found["gpus"]:
        memory, l2 = dispatch.format_bytes(gpu["memory"]), dispatch.format_bytes(gpu["l2"])
        lines.append(
            f"{'gpu':14}{gpu['name']}, compute capability {gpu['capability']}, {memory}, "
            f"{gpu['multiprocessors']} multiprocessors, L2 {l2}"
        )
    if not found["gpus"]:
        lines.append(f"{'gpu':14}none that PyTorch can use")
    for name, devices in found["backends"].items():
        lines += [f"{'backend':14}{name} on {device}: {answer}" for device, answer in devices.items()]
    return "\n".join(lines)
