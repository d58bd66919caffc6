"""The process that ranks of the fault rig are forked from: it has the fault library and all imports in memory.

Started as `python -m tests.faults.zygote`. Each line of its input is the JSON of a rank's arguments; at the end of the
input it ends, and the ranks with it.
"""

import gc
import json
import os
import sys


def main() -> None:
    import tests.rank_preload  # noqa: F401

    gc.collect()
    gc.freeze()  # what a rank makes itself is then quick to list
    for line in sys.stdin:
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            from tests.faults.worker import serve

            serve(**json.loads(line))


if __name__ == "__main__":
    main()
