"""The head run in chunks says what the whole model's logits say, to the gradient, and never holds them all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from dstrain.batch import Batch
from dstrain.config.schema import LoraConfig, ModelConfig
from dstrain.data.loading.rows import loss_positions
from dstrain.models import heads
from dstrain.models.adapters import add_adapters
from dstrain.models.heads import MAX_CHUNK_BYTES, HeadInput, LinearHead, ScoreFields, TokenScores, capture_head_input
from dstrain.models.load import read_config
from dstrain.models.params import unwrap_peft
from dstrain.tasks.common import forward
from tests.model_families import FAMILIES, family

ROWS = 5
"""Of logits in a chunk."""


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * 320 * ROWS)


def made(name: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(read_config(ModelConfig(config={**family(name), **more})))


def batch(seed: int = 1) -> Batch:
    """Three rows with padding, of which the last 20 positions are answers with gaps."""
    draw = torch.Generator().manual_seed(seed)
    ids, mask = torch.randint(3, 320, (3, 26), generator=draw), torch.ones(3, 26, dtype=torch.long)
    mask[1, 20:] = 0
    loss_mask = torch.randint(0, 2, (3, 20), generator=draw) & mask[:, -20:]
    tensors = {"input_ids": ids.masked_fill(mask == 0, 2), "attention_mask": mask, "loss_mask": loss_mask}
    return Batch(tensors=tensors, weight=1.0, samples=())


def plainly(model: torch.nn.Module, given: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and hits, of all logits at once, without `dstrain.models.heads`."""
    ids, loss_mask = given.tensors["input_ids"], given.tensors["loss_mask"]
    logits = model(input_ids=ids, attention_mask=given.tensors["attention_mask"], use_cache=False).logits
    logits, targets = logits[:, -loss_mask.shape[1] - 1 : -1].float(), ids[:, -loss_mask.shape[1] :]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    return log_probs * loss_mask, (logits.argmax(-1) == targets) & (loss_mask != 0)


def gradients(model: torch.nn.Module, log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum in which each token has its own weight."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 3, log_probs.numel()).view_as(log_probs)
    (log_probs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    square = lambda values: sum(float(value.double().square().sum()) for value in values)  # noqa: E731
    return float((square(found[n] - wanted[n] for n in wanted) / square(wanted.values())) ** 0.5)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_say_what_all_logits_say(name: str) -> None:
    model, given = made(name), batch()
    wanted, hits = plainly(model, given)
    wanted_gradients = gradients(model, wanted)
    log_probs, right = forward.score_targets(model, given)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-6, atol=2e-6)
    assert torch.equal(right, hits)
    assert distance(gradients(model, log_probs), wanted_gradients) <= 1e-6
    assert model not in heads._IN_PLACE_MODELS


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {"targets": ["lm_head", "q_proj"]}),
        ("llama", {"targets": ["lm_head"], "dropout": 0.3}),
        ("llama", {"targets": ["lm_head"], "dora": True}),
        ("gemma2", {"targets": ["embed_tokens", "q_proj"]}),
        ("gemma2", {"targets": "all-linear"}),
    ],
)
def test_adapters_of_heads_and_of_tied_embeddings_learn_the_same(
    family: str, lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = unwrap_peft(add_adapters(made(family), LoraConfig(rank=4, **lora), (), 3)), batch()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    torch.manual_seed(7)
    log_probs, _ = forward.score_targets(model, given)
    found = gradients(model, log_probs)
    if "dropout" in lora:  # drawn chunk by chunk: the same with autograd through all chunks
        monkeypatch.setattr(heads, "_ChunkedScores", Unchunked)
    else:
        monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 2**26)
    torch.manual_seed(7)
    wanted, _ = forward.score_targets(model, given)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-6, atol=2e-6)
    assert distance(found, gradients(model, wanted)) <= 1e-6


class Unchunked:
    """Chunk after chunk, through which autograd finds the gradient itself."""

    @staticmethod
    def apply(score_chunk: Any, size: int, rows: torch.Tensor, targets: torch.Tensor, *_: Any) -> Any:
        chunks = zip(rows.split(size), targets.split(size), strict=True)
        return [torch.cat(column) for column in zip(*(score_chunk(*chunk) for chunk in chunks), strict=True)]


def with_adapter(model: PreTrainedModel) -> torch.nn.Module:
    """The model with an adapter on its head, whose gradient autograd computes."""
    return cast(torch.nn.Module, unwrap_peft(add_adapters(model, LoraConfig(rank=4, targets=["lm_head"]), (), 3)))


@pytest.mark.usefixtures("chunks")
def test_logits_of_all_rows_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    score = heads.score_logits
    monkeypatch.setattr(
        heads, "score_logits", lambda logits, *rest: (seen.append(logits.shape), score(logits, *rest))[1]
    )
    model, given = with_adapter(made("granite")), batch()
    learnt = int(given.tensors["loss_mask"].sum())
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: (kept.append(value.numel()), value)[1], lambda v: v):
        log_probs, _ = forward.score_targets(model, given)
    assert max(kept) <= max(p.numel() for p in model.parameters())
    assert sum(rows for rows, _ in seen) == learnt, "positions that are not learnt have no logits"
    log_probs.sum().backward()
    assert len(seen) == 2 * -(-learnt // ROWS)
    assert all(rows <= ROWS for rows, _ in seen)


def test_one_chunk_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    score = heads.score_logits
    monkeypatch.setattr(heads, "score_logits", lambda *given: (calls.append(1), score(*given))[1])
    log_probs, _ = forward.score_targets(with_adapter(made("llama")), batch())
    log_probs.sum().backward()
    assert len(calls) == 1


@pytest.mark.usefixtures("chunks")
def test_the_gradient_of_a_16_bit_head_is_rounded_once() -> None:
    rows, targets = torch.randn(400, 16, dtype=torch.bfloat16), torch.randint(320, (400,))
    layer = torch.nn.Linear(16, 320, bias=False, dtype=torch.bfloat16)
    HeadInput(layer, rows[None], ()).score_targets(rows, targets).log_probs.sum().backward()
    exact = torch.nn.Linear(16, 320, bias=False)
    exact.weight.data = layer.weight.data.float()
    logits = exact(rows.float()).bfloat16().float()
    (logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)).sum().backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    error = (layer.weight.grad.float() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert float(error) < 3e-3, "80 chunks, added up in bf16, are 1e-2 away"


@pytest.mark.usefixtures("chunks")
def test_a_batch_without_targets_has_no_rows_and_no_gradient() -> None:
    model, given = made("llama"), batch()
    nothing = Batch(
        tensors={**given.tensors, "loss_mask": torch.zeros_like(given.tensors["loss_mask"])}, weight=0.0, samples=()
    )
    log_probs, right = forward.score_targets(model, nothing)
    log_probs.sum().backward()
    assert not log_probs.any()
    assert not right.any()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        assert torch.allclose(forward.score_targets(model, given)[0], plainly(model, given)[0], atol=2e-6)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    model, given = made("llama"), batch()
    for parameter in model.parameters():
        parameter.requires_grad_(frozen == "head")
    model.lm_head.weight.requires_grad_(frozen != "head")
    wanted = gradients(model, plainly(model, given)[0])
    assert distance(gradients(model, forward.score_targets(model, given)[0]), wanted) <= 1e-6


def test_positions_counted_on_the_host_are_those_of_the_mask() -> None:
    given = batch()
    positions = loss_positions(given.tensors["loss_mask"], 26)
    counted = given.with_tensors({"loss_positions": positions})
    model = made("llama")
    assert torch.equal(forward.score_targets(model, given)[0], forward.score_targets(model, counted)[0])
    assert len(positions) == int(given.tensors["loss_mask"].sum())


def forbid(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 3] = -100.0
    return logits


def scale_beside(logits: torch.Tensor) -> torch.Tensor:
    logits * 3.0
    return logits


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a token is forbidden, as Chameleon does": forbid,
    "what is computed is not what is returned": scale_beside,
    "of two results, the sum": lambda logits: logits * 2.0 + logits,
    "something is added for each token": lambda logits: logits + torch.arange(320) / 100,
    "joined with others": lambda logits: torch.cat([logits, logits * 2.0])[: len(logits)],
    "a mean is taken away": lambda logits: logits - logits.mean(-1, keepdim=True),
    "scaled by a tensor": lambda logits: logits * torch.linspace(1, 2, 320),
    "in other dimensions": lambda logits: logits.flatten(0, 1).unflatten(0, (3, -1)),
    "by its values": lambda logits: logits * 2.0 if logits.max() > 0 else logits,
}


CALLED_AGAIN = ("a token is forbidden, as Chameleon does", "by its values")


class Odd(torch.nn.Module):
    """A model that does something to its logits."""

    def __init__(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.lm_head, self.calls = torch.nn.Embedding(320, 8), torch.nn.Linear(8, 320, bias=False), 0
        self.changed = changed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.calls += 1
        return SimpleNamespace(logits=self.changed(self.lm_head(self.embed(input_ids))))


@pytest.mark.parametrize("kind", ODD)
def test_a_model_that_changes_its_logits_otherwise_keeps_its_own_way(kind: str) -> None:
    model, given = Odd(ODD[kind]), batch()
    for _ in range(2):
        before = model.calls
        log_probs, right = forward.score_targets(model, given)
        calls = model.calls - before
        wanted, hits = plainly(model, given)
        assert torch.allclose(log_probs, wanted, atol=2e-6)
        assert torch.equal(right, hits)
        assert distance(gradients(model, log_probs), gradients(model, wanted)) <= 1e-6
    assert calls == 1, "its second pass at the latest"
    assert (model in heads._IN_PLACE_MODELS) == (kind in CALLED_AGAIN)


def test_other_changes_are_made_chunk_by_chunk() -> None:
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda logits: 2 * logits.float() / 3,
        lambda logits: torch.tanh(logits).mul(4.0).to(torch.float64),
        lambda logits: logits[..., :310].contiguous() if logits.shape[-1] > 310 else logits,
    ]
    for changed in changes:
        model, given = Odd(changed), batch()
        ids = given.tensors["input_ids"].clamp(max=309)
        given = given.with_tensors({"input_ids": ids})
        log_probs, _ = forward.score_targets(model, given)
        assert model.calls == 1
        assert torch.allclose(log_probs.float(), plainly(model, given)[0].float(), atol=2e-6)


def test_a_model_is_whole_again_whatever_happens() -> None:
    model = made("llama")
    layer = model.lm_head
    with pytest.raises(KeyError):
        capture_head_input(model, lambda: {}["no logits"])
    assert model.lm_head is layer
    found = capture_head_input(model, lambda: model(torch.randint(320, (1, 4))).logits)
    assert found.head is layer
    with pytest.raises(RuntimeError):
        found.score_targets(torch.randn(2, 32), torch.tensor([1, 2]).float())
    assert "forward" not in vars(layer)


def test_logits_that_no_head_made_are_taken_as_they_are() -> None:
    model = made("llama")
    logits = torch.randn(1, 4, 320)
    for one in (model, torch.nn.Linear(2, 2)):
        found = capture_head_input(one, lambda: logits)
        assert found.hidden_states is logits
        assert isinstance(found.head, torch.nn.Identity)
    assert model not in heads._IN_PLACE_MODELS


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "mamba2"])
def test_the_mean_over_the_vocabulary_is_that_of_all_logits(name: str) -> None:
    """In chunks where the head is separable (Gemma 2 caps its logits, Granite scales them), else from all logits."""
    model, given = made(name), batch()
    ids, loss_mask = given.tensors["input_ids"], given.tensors["loss_mask"]
    logits = model(input_ids=ids, attention_mask=given.tensors["attention_mask"], use_cache=False).logits
    mean = logits[:, -loss_mask.shape[1] - 1 : -1].float().log_softmax(-1).mean(-1) * loss_mask
    wanted = plainly(model, given)[0] * 0.9 + mean * 0.1
    wanted_gradients = gradients(model, wanted)
    found = forward.score_targets_with_mean(model, given)
    assert found.mean_log_probs is not None
    torch.testing.assert_close(found.mean_log_probs, mean, rtol=1e-6, atol=2e-6)
    assert torch.equal(found.is_correct, plainly(model, given)[1])
    assert distance(gradients(model, found.log_probs * 0.9 + found.mean_log_probs * 0.1), wanted_gradients) <= 1e-6


@pytest.mark.usefixtures("chunks")
def test_the_mean_alone_has_the_gradient_of_all_logits() -> None:
    model, given = made("llama").double(), batch()  # in fp32 it is lost in rounding: nearly uniform probabilities
    loss_mask = given.tensors["loss_mask"]
    inputs = {name: given.tensors[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits[:, -loss_mask.shape[1] - 1 : -1]
    wanted = gradients(model, logits.log_softmax(-1).mean(-1) * loss_mask)
    found = forward.score_targets_with_mean(model, given).mean_log_probs
    assert found is not None
    assert distance(gradients(model, found), wanted) <= 1e-6


# A linear head has the gradient of autograd, without autograd's copies of the logits.


VOCABULARY, WIDTH, TARGETS = 96, 16, 23
STEPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "none": (),
    "scaled": (lambda logits: logits / 3.0,),
    "capped": (lambda logits: logits / 2.0, torch.tanh, lambda logits: logits * 2.0),
    "cut": (lambda logits: logits[..., :90],),
    "in fp32": (lambda logits: logits.float(),),
}


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the logits that were computed. In fp32 the errors of 9 rows are kept, and a slice has one row."""
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * VOCABULARY * 3)
    return spied(monkeypatch)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    score = LinearHead.score_slice

    def score_slice(self: LinearHead, rows: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        seen.append(tuple(rows.shape))
        return score(self, rows, *rest)

    monkeypatch.setattr(LinearHead, "score_slice", score_slice)
    return seen


def made_head(
    dtype: torch.dtype = torch.float32, bias: bool = False, rows: int = TARGETS
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    return head, torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True), torch.randint(90, (rows,))


def scored(head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor, *more: Any) -> TokenScores:
    return HeadInput(head, rows[None], *more or ((),)).score_targets(rows, targets)


def gradients_of(log_probs: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Of a sum in which each target has its own weight, one of them 0."""
    weights = torch.linspace(-1, 3, log_probs.numel(), dtype=log_probs.dtype)
    weights[:1] = 0
    found = torch.autograd.grad((log_probs * weights).sum(), [one for one in leaves if one.requires_grad])
    assert [one.dtype for one in found] == [one.dtype for one in leaves if one.requires_grad]
    return [*found]


def by_autograd(head: torch.nn.Linear, rows: torch.Tensor, targets: torch.Tensor, steps: Any = ()) -> torch.Tensor:
    logits = F.linear(rows, head.weight, head.bias)
    for step in steps:
        logits = step(logits)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_and_gradients_are_those_of_autograd(dtype: torch.dtype, bias: bool, steps: str) -> None:
    if dtype == torch.float64 and steps == "in fp32":
        pytest.skip("a gradient through fp32 has the precision of fp32")
    head, rows, targets = made_head(dtype, bias)
    leaves = [rows, *head.parameters()]
    wanted = by_autograd(head, rows, targets, STEPS[steps])
    found = scored(head, rows, targets, STEPS[steps])
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    torch.testing.assert_close(found.log_probs, wanted, rtol=0, atol=tolerance)
    limit = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.5e-2}[dtype]
    for one, other in zip(gradients_of(found.log_probs, *leaves), gradients_of(wanted, *leaves), strict=True):
        assert float((one - other).norm() / other.norm()) <= limit


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("rows", [0, 1, 9, 10, 18, 19])
def test_any_number_of_rows_has_the_gradient_of_autograd(rows: int) -> None:
    """The errors of up to 9 rows are kept; of more rows, all are computed again."""
    head, inputs, targets = made_head(torch.float64, rows=rows)
    leaves = [inputs, head.weight]
    for one, other in zip(
        gradients_of(scored(head, inputs, targets).log_probs, *leaves),
        gradients_of(by_autograd(head, inputs, targets), *leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("trained", ["rows", "weight", "bias", "weight and bias"])
def test_what_is_frozen_of_a_linear_head_has_no_gradient(trained: str) -> None:
    head, rows, targets = made_head(torch.float64, bias=True)
    leaves = {"rows": rows, "weight": head.weight, "bias": head.bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in trained)
    found, wanted = (
        gradients_of(log_probs, *leaves.values())
        for log_probs in (scored(head, rows, targets).log_probs, by_autograd(head, rows, targets))
    )
    torch.testing.assert_close(found, wanted)


def test_errors_that_do_not_fit_are_recomputed_by_blocks_of_the_vocabulary(
    slices: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[tuple[int, ...]] = []
    recompute = LinearHead.recompute_errors

    def recompute_errors(self: LinearHead, rows: torch.Tensor, *rest: Any) -> None:
        blocks.append((*rows.shape, rest[-1].shape[1]))
        recompute(self, rows, *rest)

    monkeypatch.setattr(LinearHead, "recompute_errors", recompute_errors)
    head, rows, targets = made_head()
    log_probs = scored(head, rows, targets).log_probs
    assert len(slices) == TARGETS
    log_probs.sum().backward()
    assert len(slices) == TARGETS
    assert {block[:2] for block in blocks} == {(TARGETS, WIDTH)}
    assert sum(width for *_, width in blocks) == VOCABULARY


@pytest.mark.parametrize("grad", [False, True])
def test_a_frozen_head_keeps_no_logits(grad: bool, slices: list[tuple[int, ...]]) -> None:
    head, rows, targets = made_head()
    head.requires_grad_(False)
    kept: list[int] = []
    with (
        torch.set_grad_enabled(grad),
        torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.numel()), one)[1], lambda one: one),
    ):
        log_probs = scored(head, rows, targets).log_probs
    assert max(kept, default=0) <= TARGETS * WIDTH
    assert log_probs.requires_grad == grad
    if grad:
        log_probs.sum().backward()
    assert len(slices) == TARGETS, "the gradient of the rows needs no second pass"


def test_without_a_gradient_nothing_is_kept(slices: list[tuple[int, ...]]) -> None:
    head, rows, targets = made_head()
    with torch.no_grad():
        assert scored(head, rows, targets).log_probs.grad_fn is None
    assert len(slices) == TARGETS


@pytest.mark.usefixtures("slices")
def test_a_nearly_certain_target_keeps_its_gradient_in_bf16() -> None:
    """1 - p is 1e-4, and p rounded to bf16 is 1."""
    head = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[9.2], [0.0]]))
    rows = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    scored(head, rows, torch.tensor([0])).log_probs.sum().backward()
    error = 1 - torch.tensor([float(head.weight.detach()[0]), 0.0]).softmax(0)[0]
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad[0, 0].float(), error, rtol=1e-2, atol=0)


@pytest.mark.usefixtures("slices")
def test_of_equal_logits_the_first_is_the_most_probable() -> None:
    head, rows, _ = made_head()
    with torch.no_grad():
        head.weight.zero_()
    targets = torch.arange(TARGETS) % 3
    assert torch.equal(scored(head, rows, targets).is_correct, targets == 0)


def test_fields_that_were_not_requested_are_none() -> None:
    head, rows, targets = made_head()
    scores = HeadInput(head, rows[None], ()).score_targets(rows, targets, ScoreFields(is_correct=False))
    assert scores.is_correct is None
    assert scores.mean_log_probs is None


class Doubled(torch.nn.Linear):
    """A head with a forward pass of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_other_heads_keep_their_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    plain, rows, targets = made_head()
    doubled = Doubled(WIDTH, VOCABULARY)
    patched = torch.nn.Linear(WIDTH, VOCABULARY)
    forward = patched.forward
    patched.forward = lambda rows: 2 * forward(rows)  # type: ignore[method-assign]
    for head in (doubled, patched):
        wanted = (2 * F.linear(rows, head.weight, head.bias)).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
        torch.testing.assert_close(scored(head, rows, targets).log_probs, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        scored(plain, rows, targets)
    assert not seen
    scored(plain, rows, targets)
    assert seen
