"""Job script of --launcher slurm: its text, what it does with each exit code, and its submission."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.config.schema import LaunchConfig
from dstrain.errors import UsageError
from dstrain.launch.plan import LaunchOptions
from dstrain.launch.slurm import Node, SlurmLaunch, list_nodes, plan_slurm_launch, submit
from tests.workers import ROOT

Stub = Callable[[str, str], None]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Make a command of Slurm; no other is on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\nPATH=$PATH:/usr/bin:/bin\n{text}\n")
        (folder / name).chmod(0o755)

    return make


def plan(run_dir: Path, env: dict[str, str] | None = None, config: Any = None, **options: Any) -> SlurmLaunch:
    launch_config = LaunchConfig.model_validate(config or {})
    return plan_slurm_launch(LaunchOptions(**options), ["train", "r.yaml"], env or {}, launch_config, run_dir)


def directives(launch: SlurmLaunch) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in launch.script.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_a_gpu_per_task(stub: Stub, tmp_path: Path) -> None:
    stub("sinfo", "echo 'cpu* 64 (null)'; echo 'gpu 96 gpu:a100:8(S:0-1)'; echo 'gpu 64 gpu:a100:4,tmp:1'")
    launch = plan(
        tmp_path / "one", config={"slurm": {"partition": "gpu", "account": "lab", "time": "1-0"}}, num_nodes=2
    )
    assert launch.world_size == 8
    assert {
        "--partition=gpu", "--account=lab", "--time=1-0", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4",
        "--cpus-per-task=12", f"--output={tmp_path}/one/logs/slurm-%j.out", "--open-mode=append", "--requeue",
        "--signal=B:USR1@120", "--dependency=singleton",
    } <= set(directives(launch))  # fmt: skip
    assert "DS_ACCELERATOR" not in launch.script


@pytest.mark.parametrize("gres", ["gpu:8", "(null)"])
def test_the_script_of_a_cpu_run_asks_for_no_gpu(gres: str, stub: Stub, tmp_path: Path) -> None:
    stub("sinfo", f"echo 'all* 64 {gres}'")
    launch = plan(tmp_path, env={"DS_ACCELERATOR": "cpu"} if gres == "gpu:8" else {}, num_gpus=4)
    assert launch.use_cpu
    assert not any(line.startswith("--gpus") for line in directives(launch))
    assert "\nexport DS_ACCELERATOR=cpu\n" in launch.script


def test_nodes_are_those_of_the_partition(stub: Stub) -> None:
    stub(
        "sinfo",
        "echo 'CLUSTER: one'; echo 'a* 8 gpu:2,gpu:h100:1'; echo; echo 'b 16+ (null)'; echo 'c 4 craynetwork:4'",
    )
    assert list_nodes(None) == [Node(8, 3)]
    assert list_nodes("b,c") == [Node(16, 0), Node(4, 0)]


def test_gpus_that_sinfo_does_not_tell_must_be_given(stub: Stub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sinfo does not tell the GPUs of a node here; give --num-gpus"):
        plan(tmp_path)
    launch = plan(tmp_path, num_gpus=2)
    assert "--gpus-per-node=2" in directives(launch)
    assert not any(line.startswith("--cpus") for line in directives(launch))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hostfile": "h", "include": "a", "exclude": "b"}, "--hostfile, --include, --exclude"),
        ({"no_ssh": True, "node_rank": 0, "master_addr": "a"}, "--node-rank, --master-addr, --no-ssh"),
        ({"master_port": 1}, "--master-port"),
    ],
)
def test_options_of_other_launchers_are_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{named}: no option of --launcher slurm"):
        plan(tmp_path, num_gpus=1, **options)


def test_a_variable_that_is_not_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"launch\.env: KEY is not set here"):
        plan(tmp_path, config={"env": ["KEY"]}, num_gpus=1)
    assert "KEY" not in plan(tmp_path, env={"KEY": "x"}, config={"env": ["KEY"]}, num_gpus=1).script.replace(
        "RANK_KEY", ""
    )


def test_every_word_of_the_user_is_quoted(tmp_path: Path) -> None:
    odd = tmp_path / "a {job} 'b $(c) 5%"
    launch = plan(odd, config={"env": ["A=$(b) c"], "slurm": {"setup": ["module load cuda"]}}, num_gpus=1)
    done = subprocess.run(["bash", "-n"], input=launch.script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nexport A='$(b) c'\n" in launch.script
    assert "\nset -e\nmodule load cuda\nset +e\n" in launch.script
    assert "5%%/logs/slurm-%j.out" in launch.script


def test_the_script_is_sound(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    (tmp_path / "script").write_text(plan(tmp_path / "run", config={"env": ["A=b c"]}, num_gpus=1).script)
    done = subprocess.run(["shellcheck", tmp_path / "script"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_shipped_job_script_is_sound_and_has_every_setting(tmp_path: Path) -> None:
    """Users copy it."""
    shipped = (ROOT / "launchers/job.sbatch").read_text()
    assert subprocess.run(["bash", "-n"], input=shipped, text=True).returncode == 0
    names = {line.split("=")[0] for line in shipped.splitlines() if line.startswith(("#SBATCH", "RUN_DIR", "COMMAND"))}
    config = {"slurm": {"time": "1-0"}}
    written = plan(tmp_path, config=config, num_gpus=8).script.splitlines()
    assert {line.split("=")[0] for line in written} >= names - {"#SBATCH --cpus-per-task"}


def run_script(stub: Stub, tmp_path: Path, srun: str, state: str = "RUNNING") -> tuple[int, bool]:
    """Run the job script with an srun of these lines; return its exit code, and True if the job was requeued."""
    run_dir, requeued = tmp_path / "a run's", tmp_path / "requeued"
    requeued.unlink(missing_ok=True)
    stub("srun", f'cd "{run_dir}"\n{srun}')
    stub("squeue", f"echo {state}")
    stub("scontrol", f'[ "$*" = "requeue 7" ] && touch "{requeued}"')
    stub("scancel", f'[ "$*" = "--signal=TERM 7" ] && touch "{run_dir}/asked"')
    (run_dir / ".workers").mkdir(parents=True, exist_ok=True)
    env = {"PATH": f"{os.environ['PATH']}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["/bin/bash"], input=plan(run_dir, num_gpus=1).script, text=True, env=env, timeout=60)
    return done.returncode, requeued.exists()


SAVED = "mkdir -p checkpoints/step-000$$\n"


@pytest.mark.parametrize(
    ("srun", "state", "code", "requeued"),
    [
        ("exit 0", "RUNNING", 0, False),
        (f"{SAVED}exit 2", "RUNNING", 2, False),
        (f"{SAVED}exit 75", "RUNNING", 75, True),
        ("exit 75", "RUNNING", 75, True),
        ("exit 75", "COMPLETING", 75, False),
        ("exit 1", "RUNNING", 1, False),
        (f"{SAVED}exit 1", "RUNNING", 1, True),
        (f"{SAVED}exit 137", "RUNNING", 137, True),
        (f"{SAVED}exit 1", "COMPLETING", 1, False),
        ("mkdir -p checkpoints/step-00000020.partial; exit 1", "RUNNING", 1, False),
    ],
)
def test_the_job_is_requeued_after_a_save_or_progress(
    srun: str, state: str, code: int, requeued: bool, stub: Stub, tmp_path: Path
) -> None:
    assert run_script(stub, tmp_path, srun, state) == (code, requeued)


def test_failures_in_a_row_are_counted_from_the_last_stop_with_a_checkpoint(stub: Stub, tmp_path: Path) -> None:
    failures = [run_script(stub, tmp_path, f"{SAVED}exit 1")[1] for _ in range(4)]
    assert failures == [True, True, True, False]
    run_script(stub, tmp_path, f"{SAVED}exit 75")
    assert run_script(stub, tmp_path, f"{SAVED}exit 1")[1]


def test_a_time_limit_without_time_for_a_step_does_not_requeue_without_end(stub: Stub, tmp_path: Path) -> None:
    """A rank that is stopped before its first step ends with 75 too where there is a checkpoint."""
    run_script(stub, tmp_path, f"{SAVED}exit 75")
    assert [run_script(stub, tmp_path, "exit 75")[1] for _ in range(4)] == [True, True, True, False]


def test_sigusr1_to_the_job_script_becomes_sigterm_to_the_ranks(stub: Stub, tmp_path: Path) -> None:
    # The stub's parent is the job script's shell.
    srun = 'kill -USR1 "$PPID"; until [ -e asked ]; do sleep 0.01; done; kill -TERM "$PPID"; sleep 0.1; exit 75'
    assert run_script(stub, tmp_path, srun) == (75, True)


def test_a_job_is_submitted_from_the_script_in_the_run_folder(stub: Stub, tmp_path: Path) -> None:
    stub("sbatch", f'[ "$*" = --parsable ] && cat >"{tmp_path}/submitted"; echo "12;cluster"')
    launch = plan(tmp_path / "one", num_gpus=1)
    assert submit(launch) == "12"
    assert (tmp_path / "submitted").read_text() == launch.script == (tmp_path / "one/slurm.sbatch").read_text()
    assert (tmp_path / "one/logs").is_dir()


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """`dstrain train demo-rm --launcher slurm` in a folder of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return CliRunner().invoke(main, ["train", "demo-rm", "--launcher", "slurm", *options])


def test_dry_run_prints_the_script_and_writes_nothing(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(tmp_path, monkeypatch, "--num-gpus", "2", "--num-nodes", "3", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "#SBATCH --nodes=3\n" in done.output.partition("# launch\n#!/bin/bash\n")[2]
    assert not [*(tmp_path / "work").iterdir()]


def test_a_submission_without_sbatch_is_refused(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(tmp_path, monkeypatch, "--num-gpus", "1")
    assert done.exit_code == 2
    assert "sbatch is not on PATH; start from a login node of a Slurm cluster" in done.output
    assert not [*(tmp_path / "work").glob("runs/*")]


def test_sbatch_is_quoted_where_it_refuses_the_job(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub("sbatch", "cat >/dev/null; echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    done = train(tmp_path, monkeypatch, "--num-gpus", "1")
    assert done.exit_code == 2
    assert "sbatch refused the job (sbatch: error: invalid partition specified: x); correct launch.slurm" in done.output
    assert not [*(tmp_path / "work").glob("runs/*")]


@pytest.mark.parametrize("value", ["gpu\n#SBATCH --wrap=x", "gpu\x07"])
def test_a_value_that_would_be_another_line_is_refused(value: str, tmp_path: Path) -> None:
    launch = plan(tmp_path, config={"slurm": {"partition": value}}, num_gpus=1)
    with pytest.raises(UsageError, match=r"--partition=gpu.* has a line break or control character"):
        _ = launch.script
