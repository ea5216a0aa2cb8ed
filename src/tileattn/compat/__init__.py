"""Other packages' names over tileattn.

    from tileattn.compat import flash_attn               # FlashAttention-2's functions
    from tileattn.compat import flash_attn_interface     # FlashAttention-3's

`install()` makes `import flash_attn` and `import flash_attn_interface` find these in this process, for code that cannot
be changed. Importing this module installs nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

# import name -> (distribution, version that the functions follow)
_PACKAGES = {"flash_attn": ("flash-attn", "2.8.3"), "flash_attn_interface": ("flash-attn-3", "3.0.0")}


def install() -> None:
    """Let `import flash_attn` (FlashAttention-2) and `import flash_attn_interface` (FlashAttention-3) find tileattn's
    functions in this process, and checks for the packages flash-attn 2.8.3 and flash-attn-3 succeed (Transformers' do).
    Call it before anything imports flash_attn. Calling it again changes nothing.

    Raises:
        RuntimeError: another flash_attn is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in _PACKAGES:
        if name in sys.modules:
            raise RuntimeError(
                f"tileattn.compat.install: {name} is imported already, from "
                f"{getattr(sys.modules[name], '__file__', 'somewhere')}; call install() before anything imports it"
            )
    sys.meta_path.insert(0, _Finder())
    _tell_transformers()


def _tell_transformers() -> None:
    """Transformers reads the list of distributions once, when it is imported, and remembers what it found."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is None:
        return
    for name, (distribution, _) in _PACKAGES.items():
        module.PACKAGE_DISTRIBUTION_MAPPING[name] = [distribution]
    for check in vars(module).values():
        if getattr(check, "__name__", "").startswith("is_flash_attn_") and hasattr(check, "cache_clear"):
            check.cache_clear()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds flash_attn.x as tileattn.compat.flash_attn.x, one module under two names; and the two distributions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _PACKAGES:
            return None
        ours = importlib.util.find_spec(f"{__name__}.{fullname}")
        if ours is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, _Alias(), origin=ours.origin, is_package=ours.submodule_search_locations is not None
        )

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        for name, (distribution, version) in _PACKAGES.items():
            if wanted is None or _normalised(wanted) == _normalised(distribution):
                yield _Distribution(name, distribution, version)


class _Alias(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(f"{__name__}.{spec.name}")

    def exec_module(self, module: ModuleType) -> None:
        """It is imported already."""


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, distribution: str, version: str) -> None:
        self.files_ = {
            "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.files_.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: tileattn stands in for this distribution, which has no files")


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
