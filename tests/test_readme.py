"""The README's promises that a machine can check."""

import re
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


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [
        (page.parent / link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > len(pages)
    assert [link for link in links if not link.exists()] == []
