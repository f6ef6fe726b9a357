"""Distillation: a student trained on the probabilities that a teacher gives to the tokens of answers."""

# Shapes: B rows, K targets, n targets of a chunk, V vocabulary, k of its tokens.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dstrain.batch import Batch
from dstrain.config.schema import check_limits
from dstrain.errors import Fault, RecipeError
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.reference import cached_target_outputs, make_reference
from dstrain.tasks.common.task import Loss, LossInputs, Reference, ReferenceKind
from dstrain.tasks.common.text import TextChecks
from dstrain.tasks.sft import SFT

if TYPE_CHECKING:
    import torch

TEACHER_KEY = "options.teacher"


@dataclass(frozen=True, kw_only=True)
class DistillChecks(TextChecks):
    """The checks of a text task, and of the teacher and its vocabulary."""

    task: Distill

    def required_keys(self) -> None:
        if not self.task.teacher:
            raise RecipeError(Fault(TEACHER_KEY, "is missing", "give the folder or hub id of the teacher"))
        super().required_keys()

    def run(self) -> None:
        super().run()
        student, teacher = self.task.model_source, self.task.teacher_source
        kinds = [one.config.model_type if one.is_multimodal else "text-only" for one in (teacher, student)]
        if kinds[0] != kinds[1]:
            problem = f"is {kinds[0]}, and the model that is trained is {kinds[1]}: they read images in different ways"
            raise RecipeError(Fault(TEACHER_KEY, problem, "give a teacher of the same family"))
        own, other = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
        if own != other:
            token = min(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
            ids = f"its token {token!r} has the id {other.get(token)}, the model's {own.get(token)}"
            problem = f"'{self.task.teacher}' has another vocabulary than the model that is trained ({ids})"
            fix = "give a teacher of the same family, or train a model from model.config with the teacher's model.tokenizer"
            raise RecipeError(Fault(TEACHER_KEY, problem, fix))


@dataclass(frozen=True, kw_only=True)
class Distill(SFT):
    """Students trained on the probabilities of a teacher's most probable tokens, and on the answers themselves.

    Hinton et al. (arXiv 1503.02531), section 2, summed over the tokens that are trained on. The teacher's outputs are
    computed once, before training.
    """

    path_options = ("teacher",)
    packs_batches = True
    metric_names = ("kl", "token_accuracy")
    ref_columns: ClassVar[tuple[str, ...]] = ("teacher_log_probs", "teacher_ids")
    """Names of the teacher's outputs."""

    teacher: str | None = None
    """Folder or hub id of the teacher, a model with the same vocabulary."""
    precompute_ref_log_probs: bool = True
    """Compute the teacher's outputs once, before training, and cache them; false: hold the teacher in memory."""
    top_k: int = 64
    """Tokens whose probabilities are learnt, the teacher's most probable ones; the others are one class, the tail."""
    temperature: float = 1.0
    """Divides the logits of both models in the divergence."""
    ce_weight: float = 0.5
    """Weight of the cross-entropy with the answers, from 0 to 1; the divergence has the rest."""
    loss_type: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """forward_kl: KL(teacher, student); reverse_kl: KL(student, teacher), which leaves out what the student cannot do."""

    def __post_init__(self) -> None:
        check_limits(self, "top_k", least=1)
        check_limits(self, "ce_weight", below=1)
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature:g}, but it must be above 0")

    @property
    def reference(self) -> Reference:
        kind: ReferenceKind = "cached" if self.precompute_ref_log_probs else "model"
        return make_reference(self, kind, self.reference_outputs, self.teacher, "teacher")

    @property
    def loss_inputs(self) -> LossInputs:
        # Only here: the key reads the tokenizer, and checks ask for the reference before anything is read.
        return replace(super().loss_inputs, reference=replace(self.reference, key=self.reference_key))

    @cached_property
    def checks(self) -> DistillChecks:
        return DistillChecks(parse_record=self.parse_record, task=self)

    @cached_property
    def teacher_source(self) -> ModelSource:
        """The teacher's config and tokenizer."""
        model = self.reference.config.model_copy(update={"tokenizer": None, "processor": None, "chat_template": None})
        return replace(self, recipe=self.recipe.model_copy(update={"model": model})).model_source

    @property
    def reference_key(self) -> Mapping[str, Any]:
        """What the teacher's outputs depend on besides data, model and precision."""
        return {"top_k": self._num_tokens, "temperature": self.temperature, "tokens": len(self.tokenizer)}

    @property
    def _num_tokens(self) -> int:
        """Tokens of the teacher that are a class each; at least one other token is in the tail."""
        return min(self.top_k, len(self.tokenizer) - 1)

    def collate(self, examples: Sequence[Mapping[str, Any]], positions: Sequence[int] | None = None) -> Batch:
        batch = super().collate(examples, positions)
        return batch.with_tensors(cached_target_outputs(examples, self.ref_columns, batch.tensors["loss_mask"]))

    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the log-probs of the teacher's k tokens and of its tail, (B, K, k + 1), and their ids, (B, K, k)."""
        from dstrain.tasks.common.forward import map_target_logits

        top = partial(top_classes, top_k=self._num_tokens, vocab_size=len(self.tokenizer), temperature=self.temperature)
        found = map_target_logits(model, batch, lambda logits, _: top(logits))
        return dict(zip(self.ref_columns, found, strict=True))

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        from dstrain.models.heads import score_logits
        from dstrain.tasks.common.forward import map_target_logits

        def score(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = score_logits(logits, ids[:, 0])
            assert own.is_correct is not None, "requested"
            return own.log_probs, own.is_correct, class_log_probs(logits, ids[:, 1:], self.temperature)

        teacher, ids = (batch.tensors[name] for name in self.ref_columns)  # (B, K, k + 1), (B, K, k)
        log_probs, right, student = map_target_logits(model, batch, score, ids.long())
        kl = divergence(student, teacher.to(student.dtype), self.loss_type).sum()
        # Gradients of soft targets are smaller by T^2: Hinton et al., section 2.
        total = (1 - self.ce_weight) * self.temperature**2 * kl - self.ce_weight * log_probs.sum()
        return Loss(total, {"kl": kl.detach(), "token_accuracy": right.sum()})


def class_log_probs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probs of the tokens `ids` and, last, of all others together; (n, V), (n, k) -> (n, k + 1), k < V."""
    import torch

    exact = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = (exact / temperature).log_softmax(-1)  # (n, V)
    # Not log(1 - sum of the k): the difference has no digits left where the k have nearly all the mass.
    tail = log_probs.scatter(-1, ids, torch.finfo(exact.dtype).min).logsumexp(-1, keepdim=True)  # (n, 1)
    return torch.cat([log_probs.gather(-1, ids), tail], -1)


def top_classes(
    logits: torch.Tensor, top_k: int, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `class_log_probs` of the k most probable tokens, and their ids; (n, k + 1), (n, k).

    The embeddings of a model may have more rows than its tokenizer has tokens, and a teacher other ones than its
    student: probability of a row without a token is nothing to learn.
    """
    logits = logits[:, :vocab_size]
    ids = logits.topk(top_k).indices
    return class_log_probs(logits, ids, temperature), ids


def divergence(student: torch.Tensor, teacher: torch.Tensor, loss_type: str) -> torch.Tensor:
    """Return sum of p (log p - log q) over the classes; p: the teacher, or the student with reverse_kl; (…, C) -> (…).

    Forward: Hinton et al. (arXiv 1503.02531), section 2, whose cross-entropy differs by the teacher's entropy. Reverse:
    MiniLLM, Gu et al. (arXiv 2306.08543), eq. 1, here of each token of the data instead of the student's own answers.
    """
    import torch.nn.functional as F

    p, q = (teacher, student) if loss_type == "forward_kl" else (student, teacher)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
