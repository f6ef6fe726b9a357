"""`--launcher slurm` under a real Slurm on two hosts: same losses, and what happens to its jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.lab import Lab
from tests.hosts.running import Run, dstrain
from tests.hosts.slurm import CASES, Slurm, missing, suffer

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=str(missing()))]


@pytest.mark.parametrize("name", CASES)
def test_a_job_ends_as_documented(name: str, lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    outcome = suffer(name, lab, tmp_path / "job", unbroken.losses())
    assert not outcome.wrong, "\n".join(outcome.wrong)


def test_a_job_with_a_bad_recipe_is_not_queued_again(lab: Lab, tmp_path: Path) -> None:
    """Submitted by hand, from the script of a run whose data has gone."""
    slurm, run = Slurm(lab), Run(tmp_path / "job")
    code, said = lab.run(
        1, dstrain(run, "--launcher", "slurm", "--num-nodes", "2", "--num-gpus", "1", "--dry-run"), env=slurm.env
    )
    assert code == 0, said
    script = run.folder / "by-hand.sbatch"
    script.write_text(said.partition("# launch\n")[2])
    (run.run_dir / "logs").mkdir(parents=True)
    (run.folder / "train.jsonl").unlink()
    found = slurm.wait(slurm.ask("sbatch", "--parsable", str(script)))
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")


def test_a_second_job_of_a_run_waits_for_the_first(lab: Lab, tmp_path: Path) -> None:
    slurm, run = Slurm(lab), Run(tmp_path / "job")
    first, second = slurm.submit(run), slurm.submit(run)
    assert slurm.show(second)["Reason"] == "Dependency"
    run.pace(None)
    assert [slurm.wait(job)["JobState"] for job in (first, second)] == ["COMPLETED", "COMPLETED"]
