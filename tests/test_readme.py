"""The README's promises that a machine can check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run():
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    names = {}
    exec(first, names)
    assert names["out"].shape == (2, 4096, 8, 64)
    assert names["bias"].grad.abs().sum() > 0


@pytest.mark.parametrize("page", ["mods.md", "kvcache.md"])
def test_the_first_example_of_a_page_runs(page):
    names = {}
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL).group(1), names)
    assert names["out"].isfinite().all()


def test_the_drop_in_page_runs():
    """In a process of its own: it changes what `import flash_attn` finds."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "drop-in.md").read_text(), re.DOTALL)
    code = "\n".join([*blocks, "assert flash_attn_func.__module__.startswith('tileattn.')"])
    assert len(blocks) == 2
    subprocess.run([sys.executable, "-c", code], check=True)


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [
        (page.parent / link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > len(pages)
    assert [link for link in links if not link.exists()] == []
