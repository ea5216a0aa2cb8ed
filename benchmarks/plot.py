"""Draw result files: speed of attention beside the peers measured in the same run, or training.

python benchmarks/plot.py speed.png --causal benchmarks/results/h200-hopper-forward.json [more.json ...]
python benchmarks/plot.py training.png benchmarks/results/h200-training.json
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
    parser.add_argument("--causal", action="store_true", help="causal rows alone, of attention")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    rows = [row for result in results for row in result["rows"]]
    ran = dict.fromkeys(f"torch {result['versions']['torch']}, commit {result['commit'][:7]}" for result in results)
    subtitle = "; ".join([results[0]["device"] + ", bfloat16", *ran])
    if "loss" in rows[0]:
        plots.training(rows, subtitle, options.picture)
    else:
        shown = [row for row in rows if row["variant"] in ("", "random") and (row["causal"] or not options.causal)]
        plots.attention_speed(shown, subtitle, options.picture)


if __name__ == "__main__":
    main()
