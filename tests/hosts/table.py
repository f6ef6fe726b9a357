"""All faults of a launch on two hosts as a Markdown table: `python -m tests.hosts.table [WORD...]`."""

# With words, only the faults with one of them in their name.

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hosts.faults import FAULTS, Outcome, name, suffer
from tests.hosts.lab import Lab, missing
from tests.hosts.leased import started_twice, taken_over
from tests.hosts.running import unbroken
from tests.hosts.starts import REFUSALS, STARTS, refuse
from tests.hosts.stopped import STOPPED

Row = tuple[str, str, Callable[[Lab, Path, list[Any]], Outcome]]


def rows() -> Iterator[Row]:
    """(name, style of the hosts, what makes the row)."""
    for fault in FAULTS:
        yield name(fault), "plain", lambda lab, folder, losses, fault=fault: suffer(fault, lab, folder, losses)
    for refusal in REFUSALS:
        yield refusal.what, "plain", lambda lab, folder, losses, refusal=refusal: refuse(refusal, lab, folder)
    for make, style in STARTS:
        yield make.__name__, style, make
    for make in (*STOPPED, started_twice, taken_over):
        yield make.__name__, "plain", make


def main() -> None:
    """A row for each; what does not hold is told on stderr, and the others follow."""
    if reason := missing():
        sys.exit(reason)
    wanted, broken, done = sys.argv[1:], [], 0
    with tempfile.TemporaryDirectory() as path:
        root = Path(path)
        losses = unbroken(root / "unbroken").losses()
        print("| fault | on | ended after s | exit code | said | left | steps lost |\n|" + "---|" * 7)
        for number, (what, style, make) in enumerate(rows()):
            if wanted and not any(word in what for word in wanted):
                continue
            try:
                with Lab(root / f"lab-{number}", style=style) as lab:
                    outcome = make(lab, root / f"job-{number}", losses)
            except Exception as error:
                broken.append(what)
                print(f"{what}: {type(error).__name__}: {error}\n", file=sys.stderr, flush=True)
                continue
            if outcome.wrong:
                broken.append(what)
                print(f"{what}: {'; '.join(outcome.wrong)}\n", file=sys.stderr, flush=True)
            else:
                done += 1
            said = outcome.said.replace(str(root), "").replace("|", "/")
            lost = "" if outcome.lost is None else outcome.lost
            cells = (
                outcome.what,
                outcome.on,
                outcome.seconds,
                outcome.code,
                said,
                outcome.left,
                lost,
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"\n{done} held; {len(broken)} did not: {', '.join(broken) or 'none'}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
