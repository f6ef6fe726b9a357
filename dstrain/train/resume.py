"""Where a run goes on: candidates, recorded inputs, changes of the recipe, fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from dstrain.cache import file_digest
from dstrain.config import BatchPlan, RunConfig, check_learning_changes, find_learning_changes
from dstrain.config.schema import BatchConfig, DatasetConfig
from dstrain.data.dataset import Dataset
from dstrain.data.sources.open import find_structure_files, open_source
from dstrain.data.token_store import TokenizedDataset
from dstrain.errors import CheckpointError, DataError, Fault, ResumeError
from dstrain.models.params import is_zero3
from dstrain.models.weights import BASE_CHANGED_MESSAGE, config_fingerprint, weights_fingerprint
from dstrain.schedule import LRSchedule, scale_lr
from dstrain.tasks import Task
from dstrain.tasks.common.record_task import RecordTask
from dstrain.tasks.common.registry import digest_task_files
from dstrain.train.checkpoints import CheckpointStore
from dstrain.train.state.manifest import (
    MANIFEST_FILE,
    CheckpointInfo,
    find_fault,
    find_latest_complete,
    read_checkpoint_info,
)


@dataclass(frozen=True)
class ResumeOptions:
    """The options --resume and --allow-change."""

    source: str = "auto"
    """auto, never, or the folder of a run or of a checkpoint."""
    allowed_keys: Collection[str] = ()
    """Keys that may differ from the recipe the run was started with."""

    @property
    def names_folder(self) -> bool:
        """True if --resume is a folder, not auto or never."""
        return self.source not in ("auto", "never")


def is_change_allowed(key: str, allowed_keys: Collection[str]) -> bool:
    """Return True if --allow-change names the key or a block that contains it."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed_keys)


def find_resume_candidate(run_dir: Path, options: ResumeOptions) -> CheckpointInfo | None:
    """Return the newest checkpoint that is complete by its file sizes; None if a new run begins.

    Hashes are not compared, so this is a guess for messages before the launch. The ranks decide
    with `decide_start`. Raises ResumeError if --resume names a folder without a usable checkpoint.
    """
    if options.source == "never":
        return None
    if options.names_folder:
        return find_checkpoint_at(options.source)
    return find_latest_complete(run_dir / "checkpoints")


def find_compatible_candidate(run_dir: Path, options: ResumeOptions, config: RunConfig) -> CheckpointInfo | None:
    """Return the candidate after `check_recipe_unchanged`. Raises ResumeError."""
    candidate = find_resume_candidate(run_dir, options)
    check_recipe_unchanged(candidate, config, options.allowed_keys)
    return candidate


def find_checkpoint_at(folder: str) -> CheckpointInfo:
    """Return the checkpoint that `--resume DIR` names: the folder itself, or the newest of a run folder.

    Only sizes are compared. Raises ResumeError.
    """
    path = Path(folder).expanduser().resolve()
    if (path / MANIFEST_FILE).is_file():
        fault = find_fault(path, check_hashes=False)
        if fault:
            raise ResumeError(f"--resume {folder}: the checkpoint is damaged ({fault}); choose another one")
        return read_checkpoint_info(path, None)
    newest = find_latest_complete(path / "checkpoints")
    if newest is None:
        raise ResumeError(f"--resume {folder}: holds no complete checkpoint; give a run folder or a checkpoint in it")
    return newest


def check_recipe_unchanged(checkpoint: CheckpointInfo | None, config: RunConfig, allowed_keys: Collection[str]) -> None:
    """Raise ResumeError for keys that change learning and differ from the checkpoint's recipe."""
    if checkpoint is None:
        return
    recorded = read_recorded_recipe(checkpoint)
    if recorded.batch.total is None and config.batch.total == checkpoint.read_run_info().get("batch_total"):
        # The product of micro, accumulate and processes, which a smaller micro-batch keeps.
        total = config.batch.total
        recorded = recorded.model_copy(update={"batch": recorded.batch.model_copy(update={"total": total})})
    info = checkpoint.read_run_info()
    digests = {*info, *(key for key, what in info.get("inputs", {}).items() if "digest" in what)}
    if faults := check_learning_changes(recorded, config, allowed_keys, digests):
        raise ResumeError(faults)


def read_recorded_recipe(checkpoint: CheckpointInfo) -> RunConfig:
    """Return the recipe that a checkpoint was trained with, from run.json: recipe.yaml may have been edited.

    Raises ResumeError.
    """
    try:
        return RunConfig.model_validate(checkpoint.read_run_info().get("recipe"))
    except ValidationError as error:
        at = ".".join(map(str, error.errors()[0]["loc"])) or "recipe"
        raise ResumeError(
            f"{checkpoint.path}/run.json: its recipe does not fit this version of dstrain ({at}); "
            f"resume with the version that wrote it"
        ) from None


def get_run_dir(checkpoint: CheckpointInfo) -> Path:
    """Return the run folder of a checkpoint."""
    return checkpoint.path.parent.parent


def dump_training_recipe(config: RunConfig) -> dict[str, Any]:
    """Return the recipe as a checkpoint records it: without keys about launching and logging."""
    return config.model_dump(mode="json", exclude={"launch", "log", "profile"})


def with_saved_batch_total(
    batch: BatchConfig, checkpoint: CheckpointInfo | None, allowed_keys: Collection[str]
) -> BatchConfig:
    """Return the recipe's batch with the total the run began with, whatever the world size is now."""
    total = None if checkpoint is None else checkpoint.read_run_info().get("batch_total")
    if total is None or any(key.split(".")[0] == "batch" for key in allowed_keys):
        return batch
    if batch.total is None or (batch.micro is not None and batch.accumulate is not None):
        return batch.model_copy(update={"total": batch.total or total, "accumulate": None})
    return batch


@dataclass(frozen=True, kw_only=True)
class StartDecision:
    """The checkpoint to continue from, and the newer ones that are damaged."""

    checkpoint: CheckpointInfo | None = None
    """None if a new run begins."""
    skipped: tuple[CheckpointInfo, ...] = ()
    """Damaged checkpoints that are newer, newest first."""

    @property
    def step(self) -> int:
        """Optimizer steps that were taken before this start."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def after_cleanup(self, checkpoints: CheckpointStore) -> StartDecision:
        """Return the same decision with the names that `remove_incomplete` has restored.

        A process killed between the two renames of a commit leaves `step-N.old` without `step-N`.
        The decision finds it under the first name, and the cleanup gives it the second.
        """
        return replace(
            self,
            checkpoint=None if self.checkpoint is None else _without_old_suffix(self.checkpoint, checkpoints),
            skipped=tuple(_without_old_suffix(info, checkpoints) for info in self.skipped),
        )


def decide_start(checkpoints: CheckpointStore, options: ResumeOptions) -> StartDecision:
    """Choose the checkpoint to continue from; every byte of it is verified, each rank reads a share.

    Rank 0 lists the folder, since another host may see an old listing over NFS, and the faults of all
    ranks are exchanged: every rank returns the same decision. Nothing on disk is changed. Collective.

    Raises ResumeError if --resume names a folder without a checkpoint, CheckpointError if the named
    checkpoint, or each one of the run folder, is damaged.
    """
    if options.source == "never":
        return StartDecision()
    if options.names_folder:
        path = _find_requested(checkpoints, options.source)
        if fault := checkpoints.find_fault(path):
            raise CheckpointError(f"--resume {options.source}: {path} is damaged ({fault}); choose another")
        return StartDecision(checkpoint=read_checkpoint_info(path, None))
    newest, skipped = checkpoints.find_latest_valid()
    if newest is None and skipped:
        raise CheckpointError(
            f"{checkpoints.folder}: all of its {len(skipped)} checkpoints are damaged, {skipped[0].path.name} is "
            f"{skipped[0].status}; restore an undamaged copy there, or give a new --run-dir to start a new run"
        )
    return StartDecision(checkpoint=newest, skipped=tuple(skipped))


def _find_requested(checkpoints: CheckpointStore, source: str) -> Path:
    """Return the checkpoint that rank 0 finds at `--resume DIR`. Raises its ResumeError on every rank. Collective."""
    path = fault = ""
    if checkpoints.world.rank == 0:
        try:
            path = str(_check_not_replaced(find_checkpoint_at(source).path, checkpoints, source))
        except ResumeError as error:  # raised below, where the other ranks raise it too
            fault = str(error)
    # Only rank 0's answer counts; the others take part so that all raise alike.
    path, fault = checkpoints.world.gather((path, fault))[0]
    if fault:
        raise ResumeError(fault)
    return Path(path)


def _check_not_replaced(path: Path, checkpoints: CheckpointStore, source: str) -> Path:
    """Return the path. Raises ResumeError for `step-N.old` beside its successor: the cleanup removes it."""
    successor = path.with_suffix("")
    if path.suffix == ".old" and successor.exists() and path.parent == checkpoints.folder.resolve():
        raise ResumeError(f"--resume {source}: was replaced by {successor.name}; choose that one")
    return path


def _without_old_suffix(info: CheckpointInfo, checkpoints: CheckpointStore) -> CheckpointInfo:
    if info.path.suffix != ".old" or info.path.parent.resolve() != checkpoints.folder.resolve():
        return info
    return replace(info, path=info.path.with_suffix(""))


# A path in the recipe does not show that a file has changed between two starts. Another file would change
# the samples, and a tokenizer trained on it would give every id another meaning for the trained weights.
InputDigests = Mapping[str, Mapping[str, Any]]
"""Key -> content, as run.json has it under `inputs`:

    data.train        {digest, samples, images, tokens}    data.eval    {path, digest, samples, images, tokens}
    model.tokenizer   {digest}                             task         {digest}, for a task file of the user
    model.path        {digest}: of the model's config; of its weights, where they count, see fingerprints.py
    options.safety.harmless_rm  {digest}: of the tokenizer or processor of a reward model; others likewise
                     {kept}: of the training samples that its precomputed scores leave
"""

_CHANGE_MESSAGES = {
    "digest": "its content is not what the run was trained on",
    "images": "its images are not those that the run was trained on",
    "tokens": "gives other tokens than the run was trained on",
    "kept": "its scores, computed again, leave other training samples than the run was trained on",
}
_FIX_MESSAGES = {
    "data.train": "restore the old file",
    "data.eval": "restore the old file",
    "model.tokenizer": "restore the old tokenizer and chat template",
    "model.path": "restore the old model",
    "task": "restore the old task file, and the modules beside it that it imports",
}


def digest_input_files(task: Task) -> dict[str, dict[str, Any]]:
    """Return the digests of files that the recipe names, computed without torch. Raises DataError."""
    data, found = task.recipe.data, dict[str, dict[str, Any]]()
    if data.train:
        found["data.train"] = {"digest": _digest_sources(task, data.train)}
    if data.eval:
        found["data.eval"] = {"path": str(data.eval.path), "digest": _digest_sources(task, [data.eval])}
    if (digest := digest_task_files(type(task))) is not None:
        found["task"] = {"digest": digest}
    return found


def digest_inputs(task: Task, train_dataset: Dataset, eval_dataset: Dataset | None) -> dict[str, dict[str, Any]]:
    """Return all digests, for run.json of a checkpoint."""
    found = digest_input_files(task)
    for key, examples in (("data.train", train_dataset), ("data.eval", eval_dataset)):
        if examples is not None and key in found:
            found[key] |= {"samples": len(examples)}
            found[key] |= {"images": examples.image_digest} if examples.image_digest else {}
            found[key] |= {"tokens": examples.store.digest} if isinstance(examples, TokenizedDataset) else {}
    if "data.train" not in found:
        found["data.train"] = {"samples": len(train_dataset)}
    return found | digest_model_files(task)


def digest_model_files(task: Task) -> dict[str, dict[str, Any]]:
    """Return the digests of the model's config, of its tokenizer and of those of reward models."""
    found = {}
    if task.recipe.model.path and (digest := config_fingerprint(task.recipe.model.path)):
        found["model.path"] = {"digest": digest}
    tasks = {"model.tokenizer": task} | {scorer.recipe_key: scorer.task for scorer in task.loss_inputs.scorers}
    for key, one in tasks.items():
        if (digest := one.tokenizer_digest) is not None:
            found[key] = {"digest": digest}
    return found


def with_selected_samples(inputs: InputDigests, task: Task, dataset: Dataset) -> InputDigests:
    """Return the digests with that of the training samples that precomputed scores leave.

    Scores that are computed again, on another device or in another precision, differ by rounding, and a score at a
    threshold then gives the run other samples.
    """
    scorers = [scorer for scorer in task.loss_inputs.scorers if scorer.is_cached]
    if task.loss_inputs.select is None or not scorers or not isinstance(dataset, TokenizedDataset):
        return inputs
    key = scorers[-1].recipe_key
    digest = hashlib.sha256(dataset.store.record_indices[dataset.rows].tobytes()).hexdigest()
    return {**inputs, key: {**inputs.get(key, {}), "kept": digest}}


def check_inputs_unchanged(checkpoint: CheckpointInfo, current: InputDigests, allowed_keys: Collection[str]) -> None:
    """Raise ResumeError for every input that differs from the checkpoint's, unless `allowed_keys` permits it."""
    recorded = checkpoint.read_run_info().get("inputs")
    if recorded is None:
        raise ResumeError(f"{checkpoint.path}/run.json: it does not record the run's inputs; choose another checkpoint")
    faults, tokens = [], _CHANGE_MESSAGES["tokens"]
    # A key that is allowed to change may change the number of samples, and the tokens.
    changes = [
        (key, what)
        for key, what in iter_input_changes(recorded, current)
        if not is_change_allowed(key, allowed_keys) and not (what.startswith("gives") and allowed_keys)
    ]
    # Other tokens follow from whatever else differs.
    for key, what in [change for change in changes if change[1] != tokens] or changes:
        fix = _FIX_MESSAGES.get(key, "restore the old folder")
        if what == tokens:
            fix = "use the library versions of the run's environment.json"
        fix = f"{fix}, choose another --run-dir, or pass --allow-change {key}"
        faults.append(Fault(key, f"{what} (step {checkpoint.step})", fix))
    if faults:
        raise ResumeError(faults)


def iter_input_changes(previous: InputDigests, current: InputDigests) -> Iterator[tuple[str, str]]:
    """Yield (key, difference) for inputs that both have and that differ."""
    for key, was in previous.items():
        has = current.get(key, {})
        if was.get("path") != has.get("path"):
            continue  # another evaluation file was chosen in the recipe: nothing to refuse
        for part, what in _CHANGE_MESSAGES.items():
            if part in was and part in has and was[part] != has[part]:
                yield key, what
                break
        else:
            if key != "data.eval" and "samples" in was and "samples" in has and was["samples"] != has["samples"]:
                yield key, f"gives {has['samples']} samples, but the run is trained on {was['samples']}"


def _digest_sources(task: Task, sources: Sequence[DatasetConfig]) -> str:
    if isinstance(task, RecordTask):
        return task.open_sources(sources).digest
    return hashlib.sha256(" ".join(_digest_source(item) for item in sources).encode()).hexdigest()


def _digest_source(source: DatasetConfig) -> str:
    """Return a digest of a file's bytes, of a folder of structures, or of the names and sizes of a folder's files.

    Reading all files of any folder could take as long as training.
    """
    path = Path(source.path).expanduser()
    try:
        if path.is_file():
            return file_digest(path)
        if path.is_dir() and not find_structure_files(path):
            files = sorted(one for one in path.rglob("*") if one.is_file())
            return " ".join(f"{one.relative_to(path)} {one.stat().st_size}" for one in files)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    return open_source(source).digest


_SCHEDULE_KEYS = ("steps", "epochs", "optim")


class RunPlanValues(Protocol):
    """The values of a run plan that are compared with a checkpoint."""

    @property
    def config(self) -> RunConfig:
        """The recipe."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    def batch(self) -> BatchPlan:
        """Sizes of the batches."""


@dataclass(frozen=True)
class ResumeChange:
    """A difference that was allowed, or a warning."""

    event_name: str
    """`changed`, or `warning` for a difference that is not an allowed change."""
    event_fields: Mapping[str, Any]
    message: str
    """A line for the terminal."""


def iter_resume_changes(
    checkpoint: CheckpointInfo, run: RunPlanValues, inputs: Mapping[str, Any]
) -> Iterator[ResumeChange]:
    """Yield the allowed differences between the checkpoint's run and the planned one.

    `inputs` are the present digests, from `digest_inputs`.
    """
    before, at = read_recorded_recipe(checkpoint), f"from step {checkpoint.step} on"
    if get_run_dir(checkpoint) == run.run_dir and not (run.run_dir / "recipe.yaml").is_file():
        line = f"recipe.yaml is missing in {run.run_dir}; it is written again after a comparison with the checkpoint's recipe"
        yield ResumeChange("warning", {"what": line}, f"warning: {line}")
    found = find_learning_changes(before, run.config)
    for key, (old, new) in found.items():
        yield ResumeChange("changed", {"key": key, "before": old, "now": new}, f"{key}: {new!r} {at}, {old!r} before")
    recorded = checkpoint.read_run_info().get("inputs", {})
    for key, what in iter_input_changes(recorded, inputs):
        yield ResumeChange("changed", {"key": key, "what": what}, f"{key}: {at} {what}")
    old, new = (digests.get("data.eval", {}).get("path") for digests in (recorded, inputs))
    before_digest, now_digest = (digests.get("data.eval", {}).get("digest") for digests in (recorded, inputs))
    if recorded and old != new and before_digest != now_digest:
        line = (
            f"data.eval: {new} {at}, {old} before; "
            f"evaluation metrics before and after are not comparable, nor is `best`"
        )
        yield ResumeChange("changed", {"key": "data.eval", "before": old, "now": new}, line)
    if any(key.split(".")[0] in _SCHEDULE_KEYS for key in found):
        yield from _iter_lr_changes(checkpoint, before, run)


def _iter_lr_changes(checkpoint: CheckpointInfo, old_config: RunConfig, run: RunPlanValues) -> Iterator[ResumeChange]:
    """Yield the learning rate of the next step by the old schedule and by the new one."""
    steps = checkpoint.read_run_info().get("steps", run.steps)
    old, new = (
        LRSchedule(
            scale_lr(config.optim.peak_lr, config.optim.scale_lr, run.batch.total, config.optim.scale_lr_base),
            config.optim.schedule, total, config.optim.warmup,
        )(checkpoint.step)
        for config, total in ((old_config, steps), (run.config, run.steps))
    )  # fmt: skip
    line = (
        f"the learning rate follows the schedule of a run of {run.steps} steps from here on: "
        f"{new:.3g} at the next step, {old:.3g} by the old schedule"
    )
    yield ResumeChange("changed", {"key": "learning rate", "before": old, "now": new}, line)


def fingerprint_weights(task: Task, ds_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints for run.json: `base` with LoRA, `reference` for a separate copy of the model as
    reference, and one under the recipe key of each other model: another reference, a reward model.

    Reads every byte of files whose hash is not cached, so it runs before any process group starts. A
    precomputed reference counts too, since its log-probs depend on it. With LoRA the reference is the base.
    """
    model, seed = task.recipe.model, task.recipe.seed
    coarse = is_half_precision_init(ds_config)
    found = {} if model.lora is None else {"base": weights_fingerprint(model, seed, coarse)}
    reference = task.loss_inputs.reference
    if reference.kind in ("model", "cached"):
        found[reference.recipe_key or "reference"] = weights_fingerprint(reference.config, seed, coarse)
    for scorer in task.loss_inputs.scorers:
        found[scorer.recipe_key] = weights_fingerprint(scorer.config, seed)
    return found


def is_half_precision_init(ds_config: Mapping[str, Any]) -> bool:
    """Return True if new weights are initialized in 16 bits, as DeepSpeed does under ZeRO-3."""
    return is_zero3(ds_config) and any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))


def check_fingerprints(
    checkpoint: CheckpointInfo, current: Mapping[str, Any], task: Task, allowed_keys: Collection[str]
) -> None:
    """Raise ResumeError if the checkpoint's run had other weights or data, unless `allowed_keys` permits it.

    Adapters do not fit another base, so that is never allowed. A reference that the run did not have before, by an
    allowed change of its options, is accepted.
    """
    check_inputs_unchanged(checkpoint, current.get("inputs", {}), allowed_keys)
    before = checkpoint.read_run_info()
    if before.get("base") != current.get("base"):
        raise ResumeError(f"{checkpoint.path}: {BASE_CHANGED_MESSAGE}")
    reference_key = get_reference_key(task)
    frozen = {task.loss_inputs.reference.recipe_key or "reference": ("reference", reference_key)}
    frozen |= {scorer.recipe_key: (f"{scorer.name} reward", scorer.recipe_key) for scorer in task.loss_inputs.scorers}
    for name, (what, key) in frozen.items():
        known = before.get(name)
        if known is None or name not in current or known == current[name] or is_change_allowed(key, allowed_keys):
            continue
        raise ResumeError(
            f"{checkpoint.path}: the weights of the run's {what} model are not those that {key} names now; "
            f"restore the old ones, choose another --run-dir, or pass --allow-change {key}"
        )


def get_reference_key(task: Task) -> str:
    """Return the recipe key that names the weights of the reference."""
    model, reference = task.recipe.model, task.loss_inputs.reference
    if reference.recipe_key is not None:
        return reference.recipe_key
    wanted = reference.config
    if wanted.init is not None and wanted.init == model.init:
        return "model.init"
    return "model.config" if wanted.path is None else "model.path"
