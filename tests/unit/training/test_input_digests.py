"""A run that goes on learns from what it began with: data, images, tokenizer and task file are compared by content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dstrain.batch import Progress
from dstrain.cli import main
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import ResumeError, RunError
from dstrain.launch.topology import Worker
from dstrain.models.weights import config_fingerprint
from dstrain.tasks.rm import RewardModel
from dstrain.training.build_run import with_frozen_outputs
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.input_digests import (
    check_inputs_unchanged,
    dump_training_recipe,
    iter_input_changes,
)
from dstrain.training.messages import iter_resume_changes
from dstrain.training.plan import RunPlan, make_plan
from dstrain.training.run_dir import archive_previous_run, replace_folder, write_run_config
from dstrain.training.start import ResumeOptions
from dstrain.training.state.manifest import CheckpointInfo, find_checkpoints, write_hashed_file
from tests.cells import SLOW
from tests.reward_models import export_reward_model
from tests.vision_recipes import named_recipe

TASK = """
from dataclasses import dataclass
import torch
from dstrain.batch import Batch
from dstrain.tasks import Loss, Task

@dataclass(frozen=True, kw_only=True)
class Halves(Task):
    def examples(self, split):
        return [float(i) for i in range(8)] if split == "train" else None
    def collate(self, examples):
        return Batch(tensors={"x": torch.tensor(examples)}, weight=float(len(examples)), samples=tuple(map(int, examples)))
    def build_model(self):
        return torch.nn.Linear(1, 1)
    def loss(self, model, batch):
        return Loss(model(batch.tensors["x"][:, None]).sum(), batch.weight)
"""


pytestmark = pytest.mark.usefixtures("fresh_cache")


def plan(folder: Path, sets: Sequence[str] = (), *allowed: str) -> RunPlan:
    wish = TrainRequest(recipe=str(folder / "recipe.yaml"), overrides=sets)
    return make_plan(resolve_recipe(wish), folder / "run", ResumeOptions("auto", allowed), Worker(0, 0, 1, "tests", 1))


def begun(folder: Path, kind: str = "rm") -> dict[str, Any]:
    """A recipe, and a run folder with the checkpoint that a run of it would write; the recipe's values."""
    _, values = named_recipe(kind, folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    save(folder)
    return values


def save(folder: Path, *more: str, made: RunPlan | None = None) -> CheckpointInfo:
    made = made or plan(folder, more)
    run = folder / "run"
    write_run_config(run, made.config, made.ds_config, {})
    made.task.export.save_extras(run / "tokenizer")
    record = {"recipe": dump_training_recipe(made.config), "steps": made.steps, **made.fingerprints}
    kept = CheckpointStore(folder=run / "checkpoints", world=SingleProcessWorld())
    kept.save(lambda place: {"w.dat": write_hashed_file(place / "w.dat", b"x")}, Progress(2, 8), record, None)
    return find_checkpoints(kept.folder)[0]


def file_of(values: dict[str, Any], key: str = "train") -> Path:
    return Path(values["data"][key])


def shuffled(file: Path) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[1:], lines[0], ""]))


@pytest.mark.parametrize("kind", ["rm", "sft", "dpo", "vlm", "docqa", SLOW("protein")])
def test_nothing_is_refused_where_nothing_changed(kind: str, tmp_path: Path) -> None:
    begun(tmp_path, kind)
    shutil.rmtree(tmp_path / "cache")
    made = plan(tmp_path)
    assert not list(iter_resume_changes(save_info(tmp_path), made, made.fingerprints["inputs"]))


def move(folder: Path, kind: str) -> Path:
    """Return a copy of a run with its recipe, data and model in another folder, as on another machine."""
    values = begun(folder / "old", kind)
    shutil.copytree(folder / "old", folder / "new")
    for name in ("old/cache", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    text = yaml.safe_dump(values).replace(str(folder / "old"), str(folder / "new"))
    (folder / "old").rename(folder / "gone")
    (folder / "new" / "recipe.yaml").write_text(text)
    return folder / "new"


@pytest.mark.parametrize("kind", ["rm", "sft", "dpo", "vlm", "docqa", SLOW("protein")])
def test_a_run_that_was_moved_goes_on_without_an_option(kind: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    new = move(tmp_path, kind)
    made = plan(new)
    changes = list(iter_resume_changes(save_info(new), made, made.fingerprints["inputs"]))
    assert {change.event_fields["key"] for change in changes} <= {"data.train", "task"}
    for change in changes:
        assert str(tmp_path / "old") in str(change.event_fields["before"])
        assert str(new) in str(change.event_fields["now"])


@pytest.mark.parametrize("kind", ["rm", "vlm", SLOW("protein")])  # a structure that changed: below
def test_data_that_changed_on_the_way_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    new = move(tmp_path, kind)
    data = new / "train" / "000.pdb" if kind == "protein" else Path(yaml.safe_load((new / "recipe.yaml").read_text())["data"]["train"])  # fmt: skip
    data.write_text(data.read_text().replace("1.00", "0.90") if kind == "protein" else data.read_text() * 2)
    for allowed in ((), ("model.path",), ("data.eval",)):
        with pytest.raises(ResumeError, match=r"^data\.train: its content is not"):
            plan(new, (), *allowed)


def test_a_model_with_another_config_is_refused(tmp_path: Path) -> None:
    values = begun(tmp_path)
    from dstrain.tasks import make_task

    task = make_task(plan(tmp_path).config)
    (tmp_path / "model").mkdir()
    task.model_source.config.save_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    one = config_fingerprint(str(tmp_path / "model"))
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config | {"_name_or_path": "/elsewhere"}))
    assert config_fingerprint(str(tmp_path / "moved")) == one
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert config_fingerprint(str(tmp_path / "moved")) != one
    assert values
    was, now = {"model.path": {"digest": one}}, {"model.path": {"digest": "other"}}
    assert [key for key, _ in iter_input_changes(was, now)] == ["model.path"]


def test_other_tokens_of_the_same_data_are_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    made = plan(tmp_path)
    inputs = made.fingerprints["inputs"]
    assert inputs["data.train"]["tokens"] == made.train_dataset.store.digest  # type: ignore[attr-defined]
    changed = {**inputs, "data.train": {**inputs["data.train"], "tokens": "other"}}
    with pytest.raises(ResumeError, match=r"^data\.train: gives other tokens .* use the library versions"):
        check_inputs_unchanged(save_info(tmp_path), changed, ())


def save_info(folder: Path) -> CheckpointInfo:
    return find_checkpoints(folder / "run/checkpoints")[0]


@pytest.mark.parametrize("key", ["train", "eval"])
def test_data_of_other_content_is_refused_by_name(key: str, tmp_path: Path) -> None:
    values = begun(tmp_path)
    shuffled(file_of(values, key))
    with pytest.raises(ResumeError, match=rf"^data\.{key}: its content is not .* --allow-change data\.{key}$"):
        plan(tmp_path)
    with pytest.raises(ResumeError):
        plan(tmp_path, (), "optim.lr")
    for allowed in (f"data.{key}", "data"):
        made = plan(tmp_path, (), allowed)
        told = list(iter_resume_changes(save_info(tmp_path), made, made.fingerprints["inputs"]))
        assert [(change.event_name, change.event_fields["key"]) for change in told] == [("changed", f"data.{key}")]


@pytest.mark.slow
def test_a_structure_that_changed_at_the_same_size_is_refused(tmp_path: Path) -> None:
    file = file_of(begun(tmp_path, "protein")) / "000.pdb"
    file.write_text(file.read_text().replace("1.00", "0.90"))
    with pytest.raises(ResumeError, match=r"^data\.train: its content is not .* --allow-change data\.train$"):
        plan(tmp_path)


def test_all_that_changed_is_told_at_once(tmp_path: Path) -> None:
    values = begun(tmp_path)
    shuffled(file_of(values))
    shuffled(file_of(values, "eval"))
    with pytest.raises(ResumeError) as refused:
        plan(tmp_path)
    assert [fault.where for fault in refused.value.faults] == ["data.train", "data.eval"]


def test_another_evaluation_file_is_the_users_word_and_told(tmp_path: Path) -> None:
    values = begun(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(file_of(values).read_text())
    shuffled(other)
    made = plan(tmp_path, [f"data.eval={other}"])
    (told,) = iter_resume_changes(save_info(tmp_path), made, made.fingerprints["inputs"])
    assert "evaluation metrics before and after are not comparable" in told.message


def test_a_run_keeps_the_tokenizer_that_it_trained(tmp_path: Path) -> None:
    values = begun(tmp_path)
    before = plan(tmp_path).task.tokenizer.get_vocab()
    file = file_of(values)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:20]))
    shutil.rmtree(tmp_path / "cache")
    made = plan(tmp_path, (), "data.train")
    assert made.task.tokenizer.get_vocab() == before
    shutil.rmtree(tmp_path / "run/tokenizer")
    with pytest.raises(ResumeError, match=r"^model\.tokenizer: its content is not .* --allow-change model\.tokenizer$"):
        plan(tmp_path, (), "data.train")


def test_another_image_is_refused(tmp_path: Path) -> None:
    from PIL import Image

    values = begun(tmp_path, "vlm")
    image = next(path for path in file_of(values).parent.rglob("*.png"))
    with Image.open(image) as opened:
        size = opened.size
    Image.new("RGB", size, (1, 2, 3)).save(image)
    with pytest.raises(ResumeError, match=r"data\.(train|eval): its images are not"):
        plan(tmp_path)


def test_a_task_file_of_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(TASK)
    recipe = {
        "task": str(tmp_path / "halves.py"),
        "ds_config": "zero1",
        "steps": 3,
        "batch": {"total": 2},
        "precision": "fp32",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert save(tmp_path).run_info["inputs"].keys() == {"task", "data.train"}
    plan(tmp_path)
    (tmp_path / "halves.py").write_text(TASK + "# changed\n")
    with pytest.raises(ResumeError, match=r"^task: .*restore the old task file.* --allow-change task$"):
        plan(tmp_path)
    plan(tmp_path, (), "task")


def test_another_number_of_samples_is_refused_unless_a_key_that_may_change_it_is_allowed(tmp_path: Path) -> None:
    begun(tmp_path)
    start = save_info(tmp_path)
    file = start.path / "run.json"
    record = json.loads(file.read_text())
    record["inputs"]["data.train"]["samples"] += 1
    shutil.rmtree(start.path)
    kept = CheckpointStore(folder=tmp_path / "run/checkpoints", world=SingleProcessWorld())
    kept.save(lambda place: {"w.dat": write_hashed_file(place / "w.dat", b"x")}, Progress(2, 8), record, None)
    with pytest.raises(ResumeError, match=r"^data\.train: gives \d+ samples, but the run is trained on \d+ "):
        plan(tmp_path)
    plan(tmp_path, (), "data.max_length")


def test_the_recipe_is_compared_with_what_the_checkpoint_learned_by(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "run/recipe.yaml").unlink()
    with pytest.raises(ResumeError, match=r"^seed: is 7"):
        plan(tmp_path, ["seed=7"])
    made = plan(tmp_path)
    (told,) = iter_resume_changes(save_info(tmp_path), made, made.fingerprints["inputs"])
    assert "recipe.yaml is missing" in told.message
    # An allowed change writes recipe.yaml before a step is taken; until a checkpoint is written, nothing learned by it.
    write_run_config(tmp_path / "run", plan(tmp_path, ["optim.lr=0.5"], "optim.lr").config, {}, {})
    plan(tmp_path)
    with pytest.raises(ResumeError, match=r"optim\.lr: is 0\.5"):
        plan(tmp_path, ["optim.lr=0.5"])


def test_other_steps_are_told_with_the_rate_that_follows(tmp_path: Path) -> None:
    begun(tmp_path)
    made = plan(tmp_path, ["steps=44", "epochs=null"], "steps", "epochs")
    told = [change.message for change in iter_resume_changes(save_info(tmp_path), made, made.fingerprints["inputs"])]
    assert "steps: 44 from step 2 on" in told[-2]
    assert "the learning rate follows the schedule of a run of 44 steps from here on" in told[-1]


def test_changed_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    values = begun(tmp_path)
    shuffled(file_of(values))
    logs = tmp_path / "run/logs"
    words = ["train", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / "run"), "--num-gpus", "2"]
    told = CliRunner().invoke(main, words)
    assert told.exit_code == 2
    assert "error: recipe.yaml:7 data.train: its content is not" in told.output
    assert not logs.exists()


def test_resume_never_moves_what_the_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "run/data").mkdir()
    (tmp_path / "run/notes.txt").touch()
    archive_previous_run(tmp_path / "run", ResumeOptions("never"), SingleProcessWorld())
    assert (tmp_path / "run/data").is_dir()
    assert (tmp_path / "run/notes.txt").is_file()
    assert not (tmp_path / "run/checkpoints").exists()


def test_what_cannot_be_moved_aside_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(RunError, match=r"--resume never: cannot move .* \(Permission denied\)"):
        archive_previous_run(tmp_path / "run", ResumeOptions("never"), SingleProcessWorld())


def test_a_tokenizer_whose_replacement_was_cut_short_is_found_again(tmp_path: Path) -> None:
    begun(tmp_path)
    before = plan(tmp_path).task.tokenizer.get_vocab()
    (tmp_path / "run/tokenizer").rename(tmp_path / "run/.tokenizer.old")
    assert plan(tmp_path).task.tokenizer.get_vocab() == before
    assert (tmp_path / "run/tokenizer").is_dir()


def test_a_folder_is_replaced_whatever_stands_in_its_place(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "new").touch()

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/old").touch()
    (tmp_path / "tokenizer").symlink_to("elsewhere")
    for _ in range(2):
        replace_folder(tmp_path / "tokenizer", write)
        assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == ["new"]
    assert (tmp_path / "elsewhere/old").exists(), "a link is not followed"
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "tokenizer"}


def test_resume_never_moves_the_earlier_run_to_a_folder_of_its_own(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "run/logs").mkdir()
    for number in (1, 2):
        archive_previous_run(tmp_path / "run", ResumeOptions("never"), SingleProcessWorld())
        moved = tmp_path / f"run/previous-{number}"
        there = {path.name for path in moved.iterdir()}
        assert there == {"checkpoints", "recipe.yaml", "ds_config.json", "environment.json", "tokenizer"}
        assert {path.name for path in (tmp_path / "run").iterdir()} == {
            "logs",
            *(f"previous-{n + 1}" for n in range(number)),
        }
        save(tmp_path)
    archive_previous_run(tmp_path / "run", ResumeOptions("auto"), SingleProcessWorld())
    assert (tmp_path / "run/checkpoints").is_dir()


@pytest.mark.slow
def test_scores_computed_again_that_leave_other_samples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is gone, and another precision: a resumed run would train on other samples without a word."""
    safety = {"method": "safedpo", "harmless_rm": str(export_reward_model(tmp_path))}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(named_recipe("dpo", tmp_path)[1] | {"options": {"safety": safety}})
    )

    def ordered(*allowed: str) -> RunPlan:
        return with_frozen_outputs(plan(tmp_path, (), *allowed), SingleProcessWorld())

    first = ordered()
    save(tmp_path, made=first)
    shutil.rmtree(tmp_path / "cache")
    again = ordered()
    check_inputs_unchanged(save_info(tmp_path), again.fingerprints["inputs"], ())
    shutil.rmtree(tmp_path / "cache")
    scores = RewardModel.scores
    monkeypatch.setattr(RewardModel, "scores", lambda *args: scores(*args) + 1.0)
    other = ordered()
    assert len(other.train_dataset) != len(first.train_dataset)
    with pytest.raises(ResumeError, match=r"^options\.safety\.harmless_rm: its scores, computed again, leave other"):
        check_inputs_unchanged(save_info(tmp_path), other.fingerprints["inputs"], ())
    check_inputs_unchanged(save_info(tmp_path), other.fingerprints["inputs"], ("options.safety.harmless_rm",))


OWN_OPTIONS = TASK.replace("class Halves(Task):\n", "class Halves(Task):\n    ref_model: str\n    safety: dict\n")


@pytest.mark.parametrize("changed", [{"ref_model": "/new/weights"}, {"safety": {"rules": "/new/rules"}}])
def test_a_moved_path_whose_content_is_not_recorded_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(OWN_OPTIONS)
    options = {"ref_model": "/old/weights", "safety": {"rules": "/old/rules"}}
    recipe = {"task": str(tmp_path / "halves.py"), "ds_config": "zero1", "steps": 3, "batch": {"total": 2}}
    for values in (options, options | changed):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"precision": "fp32", "options": values}))
        if values is options:
            save(tmp_path)
    (key,) = changed
    with pytest.raises(ResumeError, match=rf"^options\.{key}: is .*/new/"):
        plan(tmp_path)
    plan(tmp_path, (), f"options.{key}")


def test_tokens_that_another_tokenizer_gives_are_not_a_fault_of_the_data(tmp_path: Path) -> None:
    values = begun(tmp_path, "sft")
    template = "{% for message in messages %}OPEN{{ message.role }} {{ message.content }}{{ eos_token }}{% endfor %}"
    for text in (template.replace("OPEN", "<"), template.replace("OPEN", "[")):
        (tmp_path / "chat.jinja").write_text(text)
        recipe = values | {"model": values["model"] | {"chat_template": str(tmp_path / "chat.jinja")}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        if "<" in text:
            shutil.rmtree(tmp_path / "run")
            save(tmp_path)
    with pytest.raises(ResumeError) as refused:
        plan(tmp_path)
    assert [fault.where for fault in refused.value.faults] == ["model.tokenizer"]


CLOCK = (
    "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_run_whose_template_writes_the_time_goes_on_later_without_its_cache(tmp_path: Path) -> None:
    values = begun(tmp_path, "sft")
    values["model"]["chat_template"] = CLOCK
    values["data"]["max_length"] = 200
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    shutil.rmtree(tmp_path / "run")
    first = save(tmp_path).run_info
    time = first["recipe"]["model"]["chat_template_time"]
    assert time is not None
    shutil.rmtree(tmp_path / "cache")
    later = plan(tmp_path)
    assert later.config.model.chat_template_time == time
    assert later.fingerprints["inputs"] == first["inputs"]
    assert dump_training_recipe(later.config) == first["recipe"]
    with pytest.raises(
        ResumeError, match=r"model\.chat_template_time: is '2020-01-01T00:00:00', but the run was started"
    ):
        plan(tmp_path, ["model.chat_template_time=2020-01-01"])
