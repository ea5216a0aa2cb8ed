"""The README's promises that a machine can check."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run():
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    names = {}
    exec(first, names)
    assert names["out"].shape == (2, 4096, 8, 64)
    assert names["bias"].grad.abs().sum() > 0


def test_the_example_of_mods_runs():
    names = {}
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs" / "mods.md").read_text(), re.DOTALL).group(1), names)
    assert names["out"].isfinite().all()


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
