"""Checks of `dstrain train` around its launch: data read once, no folder left by a refused launch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.commands import preflight, train
from dstrain.commands.recipe_args import TrainRequest
from dstrain.commands.train import resume_on_restart
from dstrain.launch.plan import Launch
from dstrain.launch.spawn import LocalWorkerGroup
from dstrain.launch.worker import LAUNCH_ID_ENV
from dstrain.training import build_run
from tests.vision_recipes import named_recipe

OWN = """
from dataclasses import dataclass
from dstrain.tasks.rm import RewardModel

@dataclass(frozen=True, kw_only=True)
class Own(RewardModel):
    def parse_record(self, record):
        assert self.tokenizer.eos_token
        return super().parse_record(record)
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`launch(work, *words)`: the exit code of a launch whose processes do `work(run_dir)` and come to its result."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    _, values = named_recipe("rm", tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    for file in tmp_path.glob("*.jsonl"):
        os.utime(file, (time.time() - 3600, time.time() - 3600))

    def run(work: Callable[[Path], int], *words: str) -> int:
        @contextlib.contextmanager
        def gathered(ready: Any, run_dir: Path) -> Iterator[Any]:
            yield LocalWorkerGroup(make_launch([], {}), run_dir)

        monkeypatch.setattr("dstrain.launch.hosts.open_worker_group", gathered)
        monkeypatch.setattr("dstrain.commands.train.supervise", lambda group, *_: work(group.run_dir))
        words = ("train", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / "run"), "--num-gpus", "2", *words)
        told = CliRunner().invoke(main, words)
        assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
        return told.exit_code

    return run


def make_launch(argv: list[str], environment: dict[str, str]) -> Launch:
    """One rank, or none where the command is empty."""
    return Launch(argv=argv, environment=environment, ranks=range(bool(argv)), world_size=1)


def write(*files: str) -> Callable[[Path], int]:
    """Leaves these files in the run folder, and is refused."""

    def work(run_dir: Path) -> int:
        for name in files:
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).write_text("x")
        return 2

    return work


def test_a_refused_launch_leaves_no_folder_and_one_that_trained_keeps_it(
    launch: Callable[..., int], tmp_path: Path
) -> None:
    assert launch(write("logs/rank-00000.log", "recipe.yaml")) == 2
    assert not (tmp_path / "run").exists()
    for file in ("checkpoints/step-00000002/MANIFEST.json", "metrics.jsonl"):
        assert launch(write(file)) == 2
        assert (tmp_path / "run" / file).is_file()
        (tmp_path / "run").rename(tmp_path / f"kept-{Path(file).name}")
    (tmp_path / "run").mkdir()
    assert launch(write("logs/rank-00000.log")) == 2
    assert (tmp_path / "run/logs").is_dir(), "it was there before"


def test_records_are_checked_once(launch: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.cache.RACY_WINDOW_NS", -1_000_000_000_000)
    looked: list[int] = []
    monkeypatch.setattr(preflight, "_check_records", lambda task: looked.append(1))
    for _ in range(2):
        launch(lambda run_dir: 1)
    assert looked == [1]
    launch(lambda run_dir: 1, "--set", "data.on_error=fail")
    assert looked == [1, 1]
    monkeypatch.setattr(preflight, "MAX_CHECKED_BYTES", 10)
    launch(lambda run_dir: 1, "--set", "data.max_length=47")
    assert looked == [1, 1], "large files are left to the ranks"


def test_later_records_are_read_where_one_of_the_first_is_bad(
    launch: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "NUM_FIRST_RECORDS", 3)
    good, bad = {"chosen": "a good answer", "rejected": "a bad answer"}, {"chosen": "", "rejected": ""}
    file = tmp_path / "pairs.jsonl"
    for first, code in ((good, 0), (bad, 2)):
        file.write_text("".join(json.dumps(record) + "\n" for record in [first, good, good, *[bad] * 4]))
        assert launch(lambda run_dir: 0, "--set", f"data.train={file}") == code


def test_a_task_of_ones_own_may_ask_for_its_tokenizer(launch: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert launch(lambda run_dir: 0, "--task", str(tmp_path / "own.py")) == 0


def test_records_of_another_launch_stay_where_records_are_named_by_launch(tmp_path: Path) -> None:
    folder = tmp_path / ".workers"
    folder.mkdir()
    (folder / "rank-00000.other.json").write_text("{}")
    group = LocalWorkerGroup(make_launch(["true"], {**os.environ, LAUNCH_ID_ENV: "mine"}), tmp_path)
    group.start()
    group.kill()
    assert (folder / "rank-00000.other.json").exists()


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_resume_never_holds_for_the_first_start_of_a_job(name: str) -> None:
    wish = TrainRequest(resume="never")
    assert resume_on_restart(wish, {name: "0"}).resume == "never"
    assert resume_on_restart(wish, {}).resume == "never"
    assert resume_on_restart(wish, {name: "1"}).resume == "auto"


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_resume_dir_holds_until_the_run_has_a_checkpoint_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish, own = TrainRequest(resume="runs/x", run_dir=tmp_path), tmp_path / "checkpoints"
    monkeypatch.setattr(train, "find_latest_complete", lambda folder: True if folder == own and own.exists() else None)
    assert resume_on_restart(wish, {name: "1"}).resume == "runs/x"
    own.mkdir()
    assert resume_on_restart(wish, {name: "1"}).resume == "auto"
    assert resume_on_restart(wish, {}).resume == "runs/x"


def test_bad_data_in_mid_training_is_no_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrain.errors import DataError, RunError

    def train(run: Any) -> Any:
        raise DataError("x.jsonl:7: cannot be used")

    monkeypatch.setattr("dstrain.training.build_run.train", train)
    with pytest.raises(RunError, match=r"^x\.jsonl:7: cannot be used$"):
        build_run._train_to_end(None)  # type: ignore[arg-type]


def test_a_start_removes_what_a_killed_preflight_left(launch: Callable[..., int], tmp_path: Path) -> None:
    left = tmp_path / "run/.workers/seen-0123"
    left.parent.mkdir(parents=True)
    left.touch()
    seen: list[bool] = []
    assert launch(lambda run_dir: seen.append(left.exists()) or 0) == 0
    assert seen == [False]
