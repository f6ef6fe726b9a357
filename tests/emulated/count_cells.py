"""Count the waits of runs on the emulator: `python -m tests.emulated.count_cells "sft zero2" "sft zero2 2"` (2 processes)."""

from __future__ import annotations

import json
import sys

from benchmarks.device_counts import SAMPLES, WAITS, CountedRun, count_run, import_all


def main() -> None:
    counts = {}
    import_all()
    for name in sys.argv[1:]:
        task, preset, *processes = name.split()
        micro_batches = SAMPLES if task == "sft" and preset != "zero0" else 1
        run = CountedRun(task, preset, micro_batches, processes=int(processes[0]) if processes else 1)
        counts[name] = {
            part: {wait: found[wait] for wait in WAITS if found[wait]} for part, found in count_run(run).items()
        }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
