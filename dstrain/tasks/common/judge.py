"""Frozen reward models of other tasks: exports of task rm, and the one that judges generated answers."""

# Shapes: R answers.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.config import RunConfig, read_recipe
from dstrain.config.schema import DataConfig, EvalConfig, ModelConfig, ParallelConfig
from dstrain.data.dataset import Dataset
from dstrain.data.formats.answers import PromptAnswers
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.preferences import Response
from dstrain.data.formats.unpaired import to_messages
from dstrain.errors import BadRecord, DataError, Fault, RecipeError, UsageError
from dstrain.models.checks import check_model
from dstrain.models.folder import has_score_head, read_json_object
from dstrain.tasks.common.generation import answer_text
from dstrain.tasks.common.registry import make_task
from dstrain.tasks.common.scoring import AnswerScores
from dstrain.tasks.common.task import EXPORT_RECIPE, FrozenModel, Task
from dstrain.tasks.common.text import TextTask
from dstrain.tasks.rm import RewardModel

if TYPE_CHECKING:
    from dstrain.data.vision.images import ImageEntry

FOLDER_FIX = "give a folder that `dstrain export` wrote from a run of task rm"
JUDGE_KEY = "eval.generate.reward_model"


@dataclass(frozen=True, kw_only=True)
class ExportedRewardModel(ABC):
    """The export of a reward model that scores samples of another task."""

    fix: ClassVar[str] = FOLDER_FIX
    """What a user can do about a folder that is none."""

    folder: str

    @property
    @abstractmethod
    def key(self) -> str:
        """Recipe key that names the folder."""

    @property
    @abstractmethod
    def task(self) -> RewardModel:
        """Task rm with the folder as its model."""

    def check_files(self) -> None:
        """Raise RecipeError where the folder is not the export of a reward model. Reads small files, without torch."""
        place = Path(self.folder).expanduser()
        if not place.is_dir():
            problem = f"'{self.folder}' is not a folder (working directory: {Path.cwd()})"
            raise RecipeError(Fault(self.key, problem, self.fix))
        if not (place / EXPORT_RECIPE).is_file():
            is_run = (place / "recipe.yaml").is_file()
            problem = "is a run folder" if is_run else f"holds no {EXPORT_RECIPE}"
            fix = f"export it: dstrain export {self.folder} --to FOLDER" if is_run else self.fix
            raise RecipeError(Fault(self.key, f"'{self.folder}' {problem}", fix))
        if (task := read_export_recipe(self.folder).task) != "rm":
            raise RecipeError(Fault(self.key, f"'{self.folder}' is the export of task {task}", self.fix))
        with named_faults(self.key):
            if faults := check_model(self.task.recipe):
                raise RecipeError(faults)
            config = place / "config.json"  # `check_model` has read it; an adapter has none
            values = read_json_object(config, self.key) if config.is_file() else {}
            if not has_score_head(self.folder, values.get("architectures")):
                raise RecipeError(self._missing_head_fault())

    def _missing_head_fault(self) -> Fault:
        return Fault("model.path", f"'{self.folder}' holds no score head", self.fix)

    def check_model(self) -> None:
        """Raise RecipeError for a folder whose model cannot be used; some of the checks need torch."""
        self.check_files()
        with named_faults(self.key):
            self.task.checks.run()
            if self.task.checks.validator.newly_initialized:
                raise RecipeError(self._missing_head_fault())


@contextmanager
def named_faults(key: str) -> Iterator[None]:
    """Name a reward model's key in faults of its own recipe, which the user has not written."""
    try:
        yield
    except RecipeError as error:
        faults = [
            replace(fault, where=key if fault.where == "model.path" else f"{key}: {fault.where}")
            for fault in error.faults
        ]
        raise RecipeError(faults or f"{key}: {error}") from error


def read_export_recipe(folder: str) -> RunConfig:
    """Return the recipe in an exported folder. Raises RecipeError."""
    try:
        return read_recipe(Path(folder).expanduser() / EXPORT_RECIPE).config
    except UsageError as error:
        raise RecipeError(f"{error}; export the reward model again") from error


@dataclass(frozen=True, kw_only=True)
class Judge(ExportedRewardModel):
    """A reward model that scores the answers which a policy generates in an evaluation.

    It reads texts in its own encoding: its tokenizer, chat template and limits on lengths are those of its folder.
    """

    fix = f"{FOLDER_FIX}, or leave it out: --set eval.generate=null"

    policy: TextTask

    @property
    def key(self) -> str:
        return JUDGE_KEY

    @cached_property
    def task(self) -> RewardModel:
        own, recipe = read_export_recipe(self.folder), self.policy.recipe
        model = ModelConfig(
            path=str(Path(self.folder).expanduser().absolute()),  # a bare name would be looked up on the hub
            dtype=recipe.model.dtype,
            attn_implementation=recipe.model.attn_implementation,
            trust_remote_code=recipe.model.trust_remote_code,
            gradient_checkpointing=False,
        )
        data = DataConfig(max_length=own.data.max_length, max_prompt_length=own.data.max_prompt_length)
        batch = recipe.batch.model_copy(update={"packing": "auto", "prefix_sharing": "auto"})
        parts = {"model": model, "data": data, "batch": batch, "eval": EvalConfig(), "parallel": ParallelConfig()}
        made = make_task(own.model_copy(update=parts))
        assert isinstance(made, RewardModel), "the recipe's task is rm"
        return made

    @cached_property
    def scores(self) -> AnswerScores:
        """The task that encodes answers and reads their scores."""
        return AnswerScores(recipe=self.task.recipe, scored=self.task)

    @property
    def frozen_model(self) -> FrozenModel:
        """The model, and its score of each answer."""
        return FrozenModel(
            config=self.task.recipe.model,
            build=self.task.build_model,
            outputs=lambda model, batch: {"score": self.scores.outputs(model, batch)["score"]},
        )

    def check_data(self, has_images: bool) -> None:
        """Raise RecipeError for a model that cannot be used, or cannot read the held-out records."""
        self.check_model()
        if has_images and not self.task.model_source.is_multimodal:
            problem = "is a text-only reward model, and the records have images"
            fix = "train one on a vision-language model with the same kind of records"
            raise RecipeError(Fault(self.key, problem, fix))

    def encode(
        self, asked: Sequence[RecordWithImages[PromptAnswers]], answers: Sequence[Response], folders: Sequence[Path]
    ) -> list[Mapping[str, Any] | None]:
        """Return the example of each answer to its prompt, as the model reads it; None for one that it cannot read.

        An empty answer is such a one. `folders`: where relative image paths start.
        """
        from dstrain.data.encoding.rendering import PlaceholderExpansion

        samples = [
            replace(one.parsed, answers=(answer,), form="answer") for one, answer in zip(asked, answers, strict=True)
        ]
        processor, expansion = self.task.model_source.vision_processor, None
        entries: list[list[ImageEntry]] = []
        if processor is not None:
            from dstrain.data.prepare import ImageRecordEncoder

            writer = ImageRecordEncoder.create(processor, 1).index_writer
            entries = [
                [writer.get_entry(image, folder) for image in one.images]
                for one, folder in zip(asked, folders, strict=True)
            ]
            texts = [[processor.get_image_text(entry.size) for entry in own] for own in entries]
            expansion = PlaceholderExpansion(processor, texts)
        found: list[Mapping[str, Any] | None] = []
        for index, examples in enumerate(self.scores.encode(samples, expansion)):
            (example,) = examples
            if isinstance(example, BadRecord) or not answer_text(answers[index]):
                found.append(None)
                continue
            found.append({**example, "sample": index, **({"images": entries[index]} if entries else {})})
        return found


def make_judge(task: Task) -> Judge | None:
    """Return the reward model that judges the answers of a task's evaluations; None where the recipe names none."""
    generate = task.recipe.eval.generate
    if generate is None or generate.reward_model is None or task.prompts is None:
        return None
    return Judge(folder=generate.reward_model, policy=task.prompts.task)


def check_judge(task: Task) -> None:
    """Raise RecipeError where the recipe names a judge that is not the export of a reward model. Needs no torch."""
    if (judge := make_judge(task)) is not None:
        judge.check_files()


def check_generation_data(task: Task, examples: Dataset | None) -> None:
    """Raise RecipeError where the judge cannot be used on held-out data, DataError where these ask nothing."""
    prompts = task.prompts
    if not examples or prompts is None or not prompts.metric_names:
        return
    if (judge := make_judge(task)) is not None:
        judge.check_data(examples.image_digest is not None)
    if all(prompts.encode(examples[index]) is None for index in range(len(examples))):
        raise DataError("data.eval: no record has a prompt and a right answer, which eval.generate needs; write some")


def to_answer(text: str, asked: PromptAnswers) -> Response:
    """Return a generated text as the answer to a prompt, as `dstrain score` reads the output of `dstrain generate`."""
    return text if isinstance(asked.prompt, str) else to_messages(text, "assistant")


def count_wins(
    rewards: Sequence[float | None], references: Sequence[float | None], are_equal: Sequence[bool]
) -> tuple[float, int]:
    """Return how many answers have a higher reward than the reference, ties one half, and how many are compared.

    None: no score. An answer without one loses, a reference without one is not compared with. `are_equal`: the texts
    are equal, a tie whatever rounding makes of their scores.
    """
    wins, count = 0.0, 0
    for reward, reference, is_equal in zip(rewards, references, are_equal, strict=True):
        if reference is None:
            continue
        count += 1
        if is_equal or reward == reference:
            wins += 0.5
        elif reward is not None:
            wins += float(reward > reference)
    return wins, count


def same_text(text: str, reference: Response) -> bool:
    """Return whether a generated text is that of the reference, apart from spaces around them."""
    return text.strip() == answer_text(reference)
