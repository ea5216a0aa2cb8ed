"""Draw result files: speed by sequence length beside the peers measured in the same run.

python benchmarks/plot.py speed.png benchmarks/results/h200-hopper-forward.json [more.json] --causal
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tileattn.lab import plots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="of one device")
    parser.add_argument("--causal", action="store_true", help="causal rows alone")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    rows = [row for result in results for row in result["rows"] if row["variant"] in ("", "random")]
    if options.causal:
        rows = [row for row in rows if row["causal"]]
    ran = sorted({f"torch {result['versions']['torch']}, commit {result['commit'][:7]}" for result in results})
    plots.attention_speed(rows, f"{results[0]['device']}, {rows[0]['dtype']}, {'; '.join(ran)}", options.picture)


if __name__ == "__main__":
    main()
