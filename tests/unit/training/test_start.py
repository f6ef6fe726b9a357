"""One decision about the checkpoint to continue from, the same for the plan, the run and every rank."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from dstrain import cache
from dstrain.batch import Progress
from dstrain.cache import file_digest
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import RunConfig
from dstrain.config.schema import ModelConfig
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError, ResumeError, UsageError
from dstrain.launch.topology import Worker
from dstrain.models.weights import _cached_digest, weights_fingerprint
from dstrain.planner.workload import Cluster
from dstrain.report.run_log import RunLog
from dstrain.tasks import Task, make_task
from dstrain.training.build_run import prepare_start
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.input_digests import check_fingerprints, dump_training_recipe, fingerprint_weights
from dstrain.training.plan import RunPlan, make_plan
from dstrain.training.start import (
    ResumeOptions,
    ResumePoint,
    Start,
    agree_on_start,
    decide_start,
    find_point_by_sizes,
    find_resume_point,
)
from dstrain.training.state.manifest import (
    CheckpointInfo,
    find_checkpoints,
    inspect_checkpoint,
    write_hashed_file,
)
from tests.contract.lora_cases import save_base
from tests.unit.distributed.thread_world import on_ranks
from tests.vision_recipes import named_recipe

pytestmark = pytest.mark.usefixtures("fresh_cache")


def save(folder: Path, step: int, **record: Any) -> Path:
    manager = CheckpointStore(folder=folder / "checkpoints", world=SingleProcessWorld(), keep=None)
    return manager.save(
        lambda place: {"state": write_hashed_file(place / "state", b"values")}, Progress(step, step), record
    )


def flip_byte(checkpoint: Path) -> None:
    (checkpoint / "state").write_bytes(b"Values")


def plan_run(folder: Path, resume: str = "auto", rendezvous: Any = None) -> RunPlan:
    request = TrainRequest(recipe=str(folder / "recipe.yaml"), overrides=["batch={micro: 2}"])
    worker = Worker(0, 0, 1, "tests", 1)
    return make_plan(resolve_recipe(request), folder / "run", ResumeOptions(resume), worker, rendezvous)


def decide(folder: Path, resume: str = "auto", world: Any = None) -> ResumePoint:
    checkpoints = CheckpointStore(folder=folder / "checkpoints", world=world or SingleProcessWorld())
    return find_resume_point(checkpoints, ResumeOptions(resume))


def test_plan_and_run_continue_from_the_same_checkpoint_if_the_newest_is_damaged(tmp_path: Path) -> None:
    """Sizes do not show a flipped byte: the total of the newest used to go with the weights of the older one."""
    _, values = named_recipe("rm", tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    recipe = dump_training_recipe(plan_run(tmp_path).config)
    save(tmp_path / "run", 1, recipe=recipe, inputs={}, batch_total=4)
    flip_byte(save(tmp_path / "run", 2, recipe=recipe, inputs={}, batch_total=8))
    plan = plan_run(tmp_path)
    assert (plan.batch.total, plan.start.point.step) == (4, 1)
    checkpoints = CheckpointStore(folder=tmp_path / "run" / "checkpoints", world=SingleProcessWorld())
    start = prepare_start(plan.start.point, checkpoints, RunLog(tmp_path / "run"), prune_when_full=False)
    assert start is not None
    assert start.step == 1
    assert [path.name.split("-", 2)[2] for path in checkpoints.folder.glob("superseded-*")] == ["step-00000002"]


def test_a_run_that_goes_on_from_another_folder_is_resumed_not_the_one_that_was_here(tmp_path: Path) -> None:
    """A start after a kill, or after memory ran out, took the newest step of the earlier run in the folder."""
    other, run = save(tmp_path / "other", 2), tmp_path / "run"
    for step in (1, 4):
        save(run, step)
    point = decide(run, str(other))
    checkpoints = CheckpointStore(folder=run / "checkpoints", world=SingleProcessWorld())
    prepare_start(point, checkpoints, RunLog(run), prune_when_full=False)
    assert decide(run).checkpoint is None, "no own checkpoint yet"
    save(run, 3)
    assert decide(run).step == 3
    assert len([*checkpoints.folder.glob("superseded-*")]) == 2
    assert find_checkpoints(other.parent), "the other run keeps its own"


def test_every_rank_gets_the_decision_of_all(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_byte(save(tmp_path, 2))
    decisions = on_ranks(3, lambda world: decide(tmp_path, world=world))
    assert [decision.step for decision in decisions] == [1, 1, 1]
    assert len({decision.skipped[0].status for decision in decisions}) == 1
    assert "state is not what was written" in decisions[0].skipped[0].status


CLUSTER = Cluster(gpus_per_node=2, kind="cpu")


def agree(folder: Path, config: RunConfig, handed_on: str = "") -> list[Start]:
    """Return what two ranks start with."""
    return on_ranks(2, lambda world: agree_on_start(config, folder, ResumeOptions(), 2, CLUSTER, world, handed_on))


def decide_before_launch(folder: Path, config: RunConfig) -> Start:
    return decide_start(config, ResumeOptions(), 2, CLUSTER, find_point_by_sizes(folder, ResumeOptions()))


def test_rank_0_decides_preset_and_batch_for_all(tmp_path: Path) -> None:
    """Ranks read different amounts of free memory."""
    config = RunConfig.model_validate({"task": "rm", "ds_config": "auto", "batch": {"total": 16}})
    choices = iter([SimpleNamespace(preset="zero2", micro=4, reason="it fits")])
    with mock.patch("dstrain.training.start.choose_preset", side_effect=lambda *_: next(choices)):
        first, second = agree(tmp_path, config)
    assert first == second
    assert (first.preset.name, first.batch.micro, first.batch.accumulate) == ("zero2", 4, 2)
    assert first.auto == "ds_config auto: it fits"


def test_ranks_take_the_decision_of_the_launching_process(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"task": "rm", "ds_config": "auto", "batch": {"total": 16}})
    choices = iter([SimpleNamespace(preset="zero2", micro=4, reason="it fits")])
    with mock.patch("dstrain.training.start.choose_preset", side_effect=lambda *_: next(choices)):
        decided = decide_before_launch(tmp_path, config)
        assert agree(tmp_path, config, decided.to_json(tmp_path)) == [decided, decided]


def test_ranks_decide_again_where_the_checkpoint_of_the_decision_is_damaged(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"task": "rm", "optim": {"lr": 1e-5}, "ds_config": "zero2"})
    recipe = config.model_dump(mode="json")
    save(tmp_path, 1, recipe=recipe, batch_total=4)
    flip_byte(save(tmp_path, 2, recipe=recipe, batch_total=8))
    decided = decide_before_launch(tmp_path, config)
    assert (decided.point.step, decided.batch.total) == (2, 8)
    for start in agree(tmp_path, config, decided.to_json(tmp_path)):
        assert (start.point.step, start.batch.total) == (1, 4)


def test_every_rank_writes_the_time_that_the_chat_template_of_the_run_wrote(tmp_path: Path) -> None:
    """Ranks above 0 wrote the time of the resume, and so trained on other tokens."""
    config = RunConfig.model_validate({"task": "sft", "optim": {"lr": 1e-5}, "batch": {"total": 4}})
    values = config.model_dump(mode="json")
    values["model"]["chat_template_time"] = "2020-01-31T00:00:00"
    save(tmp_path, 1, recipe=values)
    for start in agree(tmp_path, config):
        assert start.config.model.chat_template_time == "2020-01-31T00:00:00"


def test_a_decision_changes_nothing_and_survives_the_cleanup(tmp_path: Path) -> None:
    """A commit that was killed between its two renames leaves step-N.old alone."""
    path = save(tmp_path, 1)
    path.rename(path.with_suffix(".old"))
    decision = decide(tmp_path)
    assert decision.checkpoint is not None
    assert decision.checkpoint.path.is_dir()
    checkpoints = CheckpointStore(folder=tmp_path / "checkpoints", world=SingleProcessWorld())
    run_log = RunLog(tmp_path, 0)
    assert prepare_start(decision, checkpoints, run_log, False) == replace(decision.checkpoint, path=path)
    run_log.close()


def test_resume_never_begins_a_new_run(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert decide(tmp_path, "never") == ResumePoint()


def test_a_named_checkpoint_that_is_damaged_is_refused_on_every_rank(tmp_path: Path) -> None:
    flip_byte(path := save(tmp_path, 1))
    for error in on_ranks(2, lambda world: decide(tmp_path, str(path), world)):
        assert isinstance(error, CheckpointError)
        assert f"--resume {path}: {path} is damaged: state is not what was written" in str(error)


def test_a_named_folder_without_a_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    for error in on_ranks(2, lambda world: decide(tmp_path, str(tmp_path), world)):
        assert type(error) is ResumeError
        assert str(error).startswith(f"--resume {tmp_path}: holds no complete checkpoint")


def test_a_named_checkpoint_that_one_rank_does_not_see_is_refused_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)

    def inspect(path: Path, check_hashes: bool, share: tuple[int, int]) -> CheckpointInfo:
        is_blind = share[0] == 1
        return inspect_checkpoint(path / "elsewhere" if is_blind else path, check_hashes, share)

    monkeypatch.setattr("dstrain.training.checkpoints.inspect_checkpoint", inspect)
    for error in on_ranks(2, lambda world: decide(tmp_path, str(path), world)):
        assert isinstance(error, CheckpointError)
        assert "is damaged: MANIFEST.json is missing (rank 1)" in str(error)


def test_a_named_checkpoint_that_was_replaced_is_refused(tmp_path: Path) -> None:
    """The cleanup removes it, and the run went on from its successor, which nobody had verified."""
    path = save(tmp_path, 1)
    shutil.copytree(path, old := path.with_suffix(".old"))
    with pytest.raises(ResumeError, match="was replaced by step-00000001; choose that one"):
        decide(tmp_path, str(old))


class BlindRank:
    """Rendezvous of rank 0 with a rank that sees none of its files."""

    rank, size = 0, 2

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value, False if value is True else "MANIFEST.json is missing" if value is None else value]


def test_a_run_folder_that_is_not_shared_is_named_before_its_checkpoints_are_judged(tmp_path: Path) -> None:
    """They were called damaged, with the advice to restore them."""
    _, values = named_recipe("rm", tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    save(tmp_path / "run", 1)
    with pytest.raises(UsageError, match="ranks 1 do not see what rank 0 writes there"):
        plan_run(tmp_path, rendezvous=BlindRank())


# A run goes on only beside the reference that it began with, and files are read once, not at every start.


PLAIN: dict[str, Any] = {"zero_optimization": {"stage": 2}}


def weights(folder: Path, content: bytes = b"first") -> Path:
    """Weights as the fingerprint reads them, an hour old."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def task(path: Path, kind: str = "dpo", lora: bool = False, **options: Any) -> Task:
    model = {"path": str(path)} | ({"lora": {"rank": 4}} if lora else {})
    return make_task(RunConfig.model_validate({"task": kind, "model": model, "options": options}))


def saved(folder: Path, record: dict[str, Any]) -> CheckpointInfo:
    kept = CheckpointStore(folder=folder, world=SingleProcessWorld())
    kept.save(
        lambda place: {"w.dat": write_hashed_file(place / "w.dat", b"x")},
        Progress(2, 8),
        {"inputs": {}, **record},
        None,
    )
    return find_checkpoints(kept.folder)[0]


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_another_reference_is_refused_by_name_unless_it_is_allowed(kind: str, tmp_path: Path) -> None:
    made = task(weights(tmp_path / "base"), kind)
    start = saved(tmp_path / "run", fingerprint_weights(made, PLAIN))
    check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ())
    weights(tmp_path / "base", b"other")
    now = fingerprint_weights(made, PLAIN)
    wanted = r"step-00000002: the weights of the run's reference model .* model\.path .* --allow-change model\.path$"
    for allowed in ((), ("options",), ("model.path.x",)):
        with pytest.raises(ResumeError, match=wanted):
            check_fingerprints(start, now, made, allowed)
    for allowed in (("model.path",), ("model",)):
        check_fingerprints(start, now, made, allowed)


def test_a_reference_of_its_own_is_named_by_its_own_key(tmp_path: Path) -> None:
    made = task(weights(tmp_path / "base"), ref_model=str(weights(tmp_path / "other")), lora=True)
    start = saved(tmp_path / "run", fingerprint_weights(made, PLAIN))
    assert {"base", "options.ref_model"} <= start.run_info.keys()
    weights(tmp_path / "other", b"newer")
    with pytest.raises(ResumeError, match=r"--allow-change options\.ref_model$"):
        check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ("model.path",))
    check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ("options.ref_model",))
    weights(tmp_path / "base", b"newer")
    with pytest.raises(ResumeError, match="its adapters were trained on other weights"):
        check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ("options.ref_model", "model"))


def test_a_reward_model_with_other_weights_is_named_by_its_key(tmp_path: Path) -> None:
    safety = {f"{name}_rm": str(weights(tmp_path / name)) for name in ("helpful", "harmless")}
    made = task(weights(tmp_path / "base"), safety=safety)
    start = saved(tmp_path / "run", fingerprint_weights(made, PLAIN))
    check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ())
    weights(tmp_path / "harmless", b"other")
    now = fingerprint_weights(made, PLAIN)
    with pytest.raises(
        ResumeError, match=r"the run's harmless reward model .*--allow-change options\.safety\.harmless_rm$"
    ):
        check_fingerprints(start, now, made, ("options.safety.helpful_rm",))
    for allowed in ("options.safety.harmless_rm", "options.safety"):
        check_fingerprints(start, now, made, (allowed,))
    online = task(tmp_path / "base", safety=safety | {"scoring": "online"})
    assert fingerprint_weights(online, PLAIN) == now, "scores of the same weights, whenever they are computed"


def test_runs_without_a_reference_have_no_fingerprint_of_one(tmp_path: Path) -> None:
    made = task(weights(tmp_path / "base"))
    for other in (task(tmp_path / "base", "rm"), task(tmp_path / "base", loss_type="simpo")):
        assert fingerprint_weights(other, PLAIN) == {}
    assert fingerprint_weights(task(tmp_path / "base", lora=True), PLAIN).keys() == {"base"}
    remembered = task(tmp_path / "base", precompute_ref_log_probs=True)
    assert fingerprint_weights(remembered, PLAIN) == fingerprint_weights(made, PLAIN), "another one would be asked anew"


def test_a_hub_name_that_moved_is_another_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, revision = task(Path("org/name")), ["a" * 40]
    monkeypatch.setattr("dstrain.models.weights._get_hub_commit", lambda name, wanted: revision[0])
    start = saved(tmp_path / "run", fingerprint_weights(made, PLAIN))
    check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ())
    revision[0] = "b" * 40
    with pytest.raises(ResumeError, match=r"model\.path"):
        check_fingerprints(start, fingerprint_weights(made, PLAIN), made, ())


def test_a_base_that_was_written_anew_is_refused_before_any_process_group(tmp_path: Path) -> None:
    _, values = named_recipe("dpo", tmp_path)
    save_base(str(tmp_path / "model"), values)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values | {"model": {"path": str(tmp_path / "model")}}))

    def plan(*allowed: str) -> RunPlan:
        wish = TrainRequest(recipe=str(tmp_path / "recipe.yaml"))
        return make_plan(
            resolve_recipe(wish), tmp_path / "run", ResumeOptions("auto", allowed), Worker(0, 0, 1, "tests", 1)
        )

    made = plan()
    saved(tmp_path / "run/checkpoints", {"recipe": dump_training_recipe(made.config), **made.fingerprints})
    assert plan().resume.source == "auto"
    file = tmp_path / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x40")
    with pytest.raises(
        ResumeError, match=r"the weights of the run's reference model are not those that model\.path names now"
    ):
        plan()
    assert not torch.distributed.is_initialized()
    plan("model.path")


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file were old enough for its state to tell a change."""
    monkeypatch.setattr(cache, "RACY_WINDOW_NS", -1_000_000_000_000)


def test_weights_are_read_at_the_first_start_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    made = ModelConfig(path=str(weights(tmp_path / "base")))
    first = weights_fingerprint(made, 0)
    for again in (False, True):
        _cached_digest.cache_clear()  # another process
        with mock.patch.object(cache.hashlib, "file_digest", side_effect=AssertionError("read again")):
            assert weights_fingerprint(made, 0) == first
        if not again:
            times = (tmp_path / "base/model.safetensors").stat()
            os.utime(tmp_path / "base/model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))  # the same content
            _cached_digest.cache_clear()
            assert weights_fingerprint(made, 0) == first
    weights(tmp_path / "base", b"other")
    assert weights_fingerprint(made, 0) != first


def test_a_file_is_read_again_where_it_changed_or_was_just_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"one")
    first = file_digest(file)
    assert not (tmp_path / "cache").exists(), "it may be written again within one tick of the clock"
    settled(monkeypatch)
    assert file_digest(file) == first
    assert len(list((tmp_path / "cache/digests").rglob("*.json"))) == 1
    times = file.stat()
    (tmp_path / "new").write_bytes(b"two")
    os.replace(tmp_path / "new", file)  # of the same size and time
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(file) != first


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"one")
    first = file_digest(file)
    (entry,) = (tmp_path / "cache/digests").rglob("*.json")
    for damage in ("", "[]", '{"state": 1}', '{"state": [], "value": "x"}'):
        entry.write_text(damage)
        assert file_digest(file) == first
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "file"))
    assert file_digest(file) == first
