"""The batch script of the Slurm launcher: its text, its submission, and when it queues the job again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dstrain.cli import main
from dstrain.config.schema import LaunchConfig
from dstrain.errors import UsageError
from dstrain.launch.slurm import make_script
from dstrain.tasks import find_task
from tests.vocabulary import write_recipe

SBATCH = """#!/bin/sh
echo "$@" >"$SEEN"
[ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2; exit 1; }
echo "4711;cluster"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, find_task("rm").tiny(tmp_path) | {"steps": 2})


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, first on PATH, with an sbatch that accepts any job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(folder / "sbatch", SBATCH)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def train(recipe: Path, *options: str) -> Result:
    run_dir = recipe.with_name("run")
    return CliRunner().invoke(main, ["train", str(recipe), "--run-dir", str(run_dir), "--launcher", "slurm", *options])


def script(folder: Path, name: str = "rm", **config: Any) -> str:
    return make_script(
        path=folder / "slurm.sbatch", name=name, num_nodes=2, tasks_per_node=8, cpus_per_task=6, use_cpu=False, arguments=["train", "a b.yaml"],
        config=LaunchConfig(**config),
    )  # fmt: skip


def test_a_job_is_submitted_and_named(recipe: Path, programs: Path) -> None:
    done = train(recipe, "--num-nodes", "2", "--num-gpus", "2")
    assert done.exit_code == 0, done.output
    written = recipe.with_name("run") / "slurm.sbatch"
    assert recipe.with_name("seen").read_text().split() == ["--parsable", str(written)]
    assert f"job 4711: {written}, 4 tasks on 2 nodes" in done.output
    assert "scancel --signal=TERM 4711" in done.output
    lines = written.read_text().splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH --requeue"} <= {*lines}
    assert not [line for line in lines if "gpu" in line.lower() and line.startswith("#SBATCH")], "a job on CPUs"


def test_a_dry_run_prints_the_script_and_writes_nothing(recipe: Path, programs: Path) -> None:
    done = train(recipe, "--num-nodes", "2", "--num-gpus", "2", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "\n#SBATCH --nodes=2\n" in done.output
    assert not recipe.with_name("run").exists()
    assert not recipe.with_name("seen").exists()


def test_the_recipe_fills_the_script(tmp_path: Path) -> None:
    slurm = {
        "partition": "gpu",
        "account": "team",
        "time": "12:00:00",
        "setup": ["module load cuda", "ulimit -l unlimited"],
    }
    text = script(tmp_path, slurm=slurm, env=["NCCL_DEBUG=INFO", "A=b c", "HOME"])
    for line in (
        "#SBATCH --partition=gpu", "#SBATCH --account=team", "#SBATCH --time=12:00:00", "#SBATCH --gpus-per-node=8",
        "module load cuda", "export NCCL_DEBUG=INFO", "export A='b c'",
        "    \"$python\" -u -m dstrain.cli train 'a b.yaml' &",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "export HOME" not in text, "sbatch passes what is set here"
    assert text.index("module load cuda") < text.index("srun --wait")


def test_the_script_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "slurm.sbatch"
    path.write_text(script(tmp_path, slurm={"setup": ["true"]}, env=["A=b"]))
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_jobs_of_one_run_folder_have_one_name_and_those_of_another_do_not(tmp_path: Path) -> None:
    names = [
        line
        for folder in ("a", "a", "b")
        for line in script(tmp_path / folder, "my run").splitlines()
        if "job-name" in line
    ]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("#SBATCH --job-name=my-run-")


@pytest.mark.parametrize("value", ["gpu\n#SBATCH --wrap=x", "gpu\x07"])
def test_a_value_that_would_be_another_line_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--partition=gpu.* has a line break or control character"):
        script(tmp_path, slurm={"partition": value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hostfile", "hosts"], "--hostfile cannot be combined with it, since Slurm chooses the nodes"),
        (["--include", "host1", "--no-ssh"], "--include, --no-ssh cannot be combined"),
        (["--num-nodes", "0"], "--num-nodes 0 starts no process"),
        (["--set", "launch.env=[NOT_SET_ANYWHERE]"], "launch.env: NOT_SET_ANYWHERE is not set here"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], words: str, recipe: Path, programs: Path) -> None:
    done = train(recipe, *options)
    assert done.exit_code == 2
    assert words in done.output
    assert not recipe.with_name("run").exists()


def test_where_sinfo_tells_no_gpus_their_number_is_asked_for(
    recipe: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = train(recipe)
    assert done.exit_code == 2
    assert "give --num-gpus N" in done.output


def test_gpus_and_cores_of_a_node_are_those_of_its_partition(
    recipe: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = ["cpu 64 (null)", "gpu* 96 gpu:a100:8(S:0-1)", "gpu* 64 gpu:4,shard:8"]
    write_program(programs / "sinfo", "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    done = train(recipe, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n#SBATCH --cpus-per-task=12\n" in done.output
    assert "give --num-gpus N" in train(recipe, "--dry-run", "--set", "launch.slurm.partition=cpu").output


def test_a_refusal_of_sbatch_is_passed_on(recipe: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSAL", "sbatch: error: invalid partition specified: gpux")
    done = train(recipe)
    assert done.exit_code == 2
    assert "sbatch refused the job (sbatch: error: invalid partition specified: gpux)" in done.output
    assert not recipe.with_name("run").exists()


def test_a_host_without_slurm_is_told_so(recipe: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs.with_name("empty")))
    done = train(recipe)
    assert done.exit_code == 2
    assert "there is no `sbatch` on PATH" in done.output


SRUN = """#!{python}
import os, signal, sys, time
folder = {folder!r}
signal.signal(signal.SIGTERM, lambda *_: (os.makedirs(folder + "/checkpoints/step-00000009"), sys.exit(75)))
if os.environ.get("SAVES"):
    os.makedirs(folder + "/checkpoints/step-" + os.environ["SAVES"])
open(folder + "/srun", "w").write(str(os.getpid()))
if "WAITS" in os.environ:
    time.sleep(60)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Runs the batch script with programs of Slurm that only record; gives its process."""
    run_dir, programs = tmp_path / "run", tmp_path / "bin"
    for folder in (run_dir / ".workers", run_dir / "checkpoints", programs):
        folder.mkdir(parents=True)
    write_program(programs / "srun", SRUN.format(python=sys.executable, folder=str(run_dir)))
    write_program(programs / "scontrol", f'#!/bin/sh\necho "$@" >>{run_dir}/requeued\n')
    write_program(programs / "scancel", f"#!/bin/sh\nkill -TERM $(cat {run_dir}/srun)\n")
    (run_dir / "slurm.sbatch").write_text(script(run_dir))

    def start(**env: str) -> subprocess.Popen[bytes]:
        path = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
        return subprocess.Popen(["bash", str(run_dir / "slurm.sbatch")], env={**path, **env})

    return start


def requeues(folder: Path) -> int:
    path = folder / "run/requeued"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("env", "again"),
    [
        ({"CODE": "0", "SAVES": "00000005"}, 0),
        ({"CODE": "1"}, 0),
        ({"CODE": "1", "SAVES": "00000005"}, 1),
        ({"CODE": "137", "SAVES": "00000005"}, 1),
        ({"CODE": "1", "SAVES": "00000005.partial"}, 0),
        ({"CODE": "2", "SAVES": "00000005"}, 0),
        ({"CODE": "75", "SAVES": "00000005"}, 0),
    ],
)
def test_a_job_is_queued_again_after_a_failure_with_a_new_checkpoint(
    env: Mapping[str, str], again: int, job: Any, tmp_path: Path
) -> None:
    assert job(**env).wait(20) == int(env["CODE"])
    assert requeues(tmp_path) == again


def test_a_job_that_goes_on_failing_is_queued_a_few_times_only(job: Any, tmp_path: Path) -> None:
    for step in range(1, 6):
        job(CODE="1", SAVES=f"{step:08d}").wait(20)
    assert requeues(tmp_path) == 3


def test_ahead_of_the_time_limit_the_ranks_save_and_the_job_is_queued_again(job: Any, tmp_path: Path) -> None:
    process = job(CODE="0", WAITS="1")
    deadline = time.monotonic() + 20
    while not (tmp_path / "run/srun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 75
    assert requeues(tmp_path) == 1
