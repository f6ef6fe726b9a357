"""All faults of a save as a table in Markdown.

python -m tests.faults.table
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.all_faults import damages, full_disks, kills, passing_errors, replacing
from tests.faults.faults import WARM, Faults, Outcome
from tests.faults.fork_server import ForkServer


def rows(faults: Faults, root: Path) -> Iterator[Outcome]:
    """Each is judged before it is given."""
    for row in (*kills(faults), *replacing(faults)):
        yield row()
    draw = random.Random(0)
    for _ in range(20):
        yield faults.kill_both(draw.random() * 0.08)
    try:
        for row in full_disks(faults, root):
            yield row()
    except PermissionError as error:
        print(f"left out: {error}")
    for row in (*passing_errors(faults), *damages(faults)):
        yield row()


def main() -> None:
    fork_server = ForkServer(*WARM)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print("| fault | on | found | said | steps lost | s |\n|---|---|---|---|---|---|")
        found = []
        for outcome in rows(Faults(fork_server, root), root):
            found.append(outcome)
            cells = (outcome.what, outcome.whom, f"step {outcome.found}", outcome.said, outcome.lost, outcome.seconds)
            print("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |", flush=True)
        print(f"\n{len(found)} faults, {len({outcome.what for outcome in found})} kinds; steps lost at most: "
              f"{max(outcome.lost for outcome in found)}; the slowest took {max(o.seconds for o in found):g} s")  # fmt: skip
    fork_server.close()


if __name__ == "__main__":
    main()
