"""One rank of one load: `python -m benchmarks.load_worker SPEC`, with RANK and so on; writes its `LoadReport`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    import deepspeed

    import lowmem_load

    deepspeed.init_distributed(dist_backend="gloo")
    model = lowmem_load.load_model(spec["checkpoint"], spec["ds_config"])
    report = lowmem_load.load_report(model)
    Path(spec["out"], f"rank{report.rank}.json").write_text(json.dumps(asdict(report), default=str))
    sys.stdout.flush()
    os._exit(0)  # as benchmarks/worker.py says


if __name__ == "__main__":
    main()
