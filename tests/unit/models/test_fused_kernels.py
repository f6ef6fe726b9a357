"""Fused kernels: each computes what the module computed, a module of another kind stays as it is, and adapters work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.interpreted import use_interpreted_kernels

use_interpreted_kernels()

from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm  # noqa: E402
from transformers.models.phi3.modeling_phi3 import Phi3MLP  # noqa: E402

from dstrain.errors import RecipeError  # noqa: E402
from dstrain.models import fused_kernels  # noqa: E402
from dstrain.models.fused_kernels import check_kernels, find_fused_kernels, fuse_kernels  # noqa: E402
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing  # noqa: E402
from dstrain.models.tiles import TiledForward, enable_tiles  # noqa: E402
from tests.cells import SLOW  # noqa: E402
from tests.model_families import family  # noqa: E402

SHAPES = [(16, 1), (33, 5), (100, 257)]
"""Widths and numbers of rows."""
MANY_ROWS = 65537
"""liger has other norms for many narrow rows."""


def made(name: str = "llama", **changes: Any) -> Any:
    values = family(name) | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).train()
    for parameter in model.parameters():  # ones and zeros would hide what a norm's weight does
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def gradients(model: Any, rows: int = 2, length: int = 13) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a batch."""
    ids = torch.randint(0, 300, (rows, length), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same(fused: Any, eager: Any, limit: float = 1e-5) -> None:
    (loss, grads), (wanted_loss, wanted) = gradients(fused), gradients(eager)
    assert abs(loss - wanted_loss) <= limit
    assert grads.keys() == wanted.keys()
    apart = sum(float((grads[name] - wanted[name]).square().sum()) for name in wanted)
    assert (apart / sum(float(one.square().sum()) for one in wanted.values())) ** 0.5 <= limit


def assert_equal_modules(
    module: torch.nn.Module, make_class: Callable[[torch.nn.Module], Any], width: int, rows: int
) -> None:
    """Compare values and gradients of a module before and after its class is replaced.

    In fp32 they are equal. In bf16 the fused module is as near to fp32 as the eager one, up to one rounding.
    """
    for parameter in module.parameters():
        random = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        # Values that bf16 has.
        parameter.data = (random / (parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 1)).bfloat16().float()
    fused = copy.deepcopy(module)
    fused.__class__ = make_class(module)
    exact = values_and_gradients(module, width, rows, torch.float32)
    for wanted, computed in zip(exact, values_and_gradients(fused, width, rows, torch.float32), strict=True):
        assert float((wanted - computed).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))
    in_bf16 = (values_and_gradients(one, width, rows, torch.bfloat16) for one in (module, fused))
    for wanted, eager, computed in zip(exact, *in_bf16, strict=True):
        errors = [float((one - wanted).square().mean().sqrt()) for one in (eager, computed)]
        assert errors[1] <= 1.1 * errors[0] + 2**-9 * float(wanted.square().mean().sqrt())


def values_and_gradients(module: torch.nn.Module, width: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of each parameter, in fp32."""
    copied = copy.deepcopy(module).to(dtype)
    random = torch.randn(2, 1, rows, width, generator=torch.Generator().manual_seed(3)).bfloat16()
    hidden = random[0].to(dtype).requires_grad_()
    output = copied(hidden)
    output.backward(random[1].to(dtype))
    return [one.detach().float() for one in (output, hidden.grad, *(each.grad for each in copied.parameters()))]


@pytest.mark.parametrize(("width", "rows"), [*SHAPES, SLOW(16, MANY_ROWS)])
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma3RMSNorm])
def test_norms_are_equal_in_every_shape(norm: Any, width: int, rows: int) -> None:
    assert_equal_modules(norm(width), fused_kernels.fused_norm_class, width, rows)


@pytest.mark.parametrize(("width", "rows"), SHAPES)
@pytest.mark.parametrize(("mlp", "act"), [(LlamaMLP, "silu"), (LlamaMLP, "gelu_pytorch_tanh"), (Phi3MLP, "silu")])
def test_gated_mlps_are_equal_in_every_shape(mlp: Any, act: str, width: int, rows: int) -> None:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width + 1}
    module = mlp(SimpleNamespace(**sizes, hidden_act=act, mlp_bias=True))
    assert_equal_modules(module, fused_kernels.fused_mlp_class, width, rows)


@pytest.mark.parametrize("act", ["gelu", "relu", "quick_gelu"])
def test_an_mlp_with_another_activation_stays_eager(act: str) -> None:
    model = made(hidden_act=act)
    assert fuse_kernels(model).eager["gated MLP of LlamaMLP"] == "it computes something else"
    assert type(model.model.layers[0].mlp) is LlamaMLP


def test_a_norm_that_computes_something_else_stays_eager() -> None:
    class HalfNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 0.999

    model = made()
    model.model.norm.__class__ = HalfNorm
    report = fuse_kernels(model)
    assert report.eager == {"RMSNorm of HalfNorm": "it computes something else"}
    assert report.fused["RMSNorm of LlamaRMSNorm"] == 4


@pytest.mark.parametrize("name", ["llama", "gemma3_text", SLOW("qwen3"), SLOW("glm4"), SLOW("phi3"), SLOW("mixtral")])
@pytest.mark.parametrize("checkpointed", [False, SLOW(True)])
def test_a_model_computes_what_it_computed(name: str, checkpointed: bool) -> None:
    eager, fused = made(name), made(name)
    report = fuse_kernels(fused)
    assert {label.partition(" of ")[0] for label in report.fused} >= {"RMSNorm", "residual + norm"}
    assert find_fused_kernels(fused) is report
    for model in (eager, fused):
        enable_gradient_checkpointing(model) if checkpointed else None
    assert_same(fused, eager)


def test_layers_are_recomputed_once_as_before() -> None:
    model = made()
    fuse_kernels(model)
    enable_gradient_checkpointing(model)
    counts = {"calls": 0}
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: counts.update(calls=counts["calls"] + 1))
    gradients(model)
    assert counts["calls"] == 2


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_inside_fused_mlps_are_trained(dora: bool) -> None:
    def adapted(is_fused: bool) -> Any:
        model = made()
        if is_fused:
            fuse_kernels(model)
        torch.manual_seed(5)
        adapters = LoraConfig(r=2, target_modules="all-linear", use_dora=dora, init_lora_weights=False)
        return get_peft_model(model, adapters)

    assert_same(adapted(True), adapted(False))


def test_adapters_on_experts_are_trained() -> None:
    def adapted(is_fused: bool) -> Any:
        model = made("mixtral")
        if is_fused:
            assert fuse_kernels(model).fused["gated experts of MixtralExperts"] == 2
        torch.manual_seed(5)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        adapters = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
        return get_peft_model(model, adapters)

    assert_same(adapted(True), adapted(False))


def test_answers_are_the_same() -> None:
    eager, fused = made().eval(), made().eval()
    fuse_kernels(fused)
    ids = torch.randint(0, 300, (1, 5), generator=torch.Generator().manual_seed(1))
    answers = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (eager, fused)]
    assert torch.equal(*answers)


def test_a_model_in_another_dtype_than_its_norms_computes_what_it_computed() -> None:
    eager, fused = made(), made()
    fuse_kernels(fused)
    hidden = torch.randn(1, 3, 32).bfloat16()
    assert torch.equal(fused.model.norm(hidden), eager.model.norm(hidden))
    assert fused.model.norm(hidden).dtype == torch.float32


def test_frozen_norms_get_no_gradient() -> None:
    eager, fused = made(), made()
    fuse_kernels(fused)
    for model in (eager, fused):
        for layer in model.model.layers:
            layer.requires_grad_(False)
    assert_same(fused, eager)


def test_tiles_run_fused_modules() -> None:
    eager, fused = made(), made()
    fuse_kernels(fused)
    for model in (eager, fused):
        enable_gradient_checkpointing(model)
        enable_tiles(model, 16)
    assert isinstance(vars(fused.model.layers[0].mlp)["forward"], TiledForward)
    assert_same(fused, eager)


def test_a_copy_of_a_module_has_its_own_weight() -> None:
    model = made()
    fuse_kernels(model)
    norm = model.model.norm
    copied = copy.deepcopy(norm)
    copied.weight.data *= 2
    hidden = torch.randn(1, 3, 32)
    torch.testing.assert_close(copied(hidden), 2 * norm(hidden))


def test_random_numbers_are_not_drawn_from_the_runs_generator() -> None:
    model = made()
    before = torch.get_rng_state()
    fuse_kernels(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_liger_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels("liger", "cpu")  # computed by Triton's interpreter
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(fused_kernels, "is_triton_ready", lambda: True)
    with pytest.raises(RecipeError, match="kernels run on GPUs"):
        check_kernels("liger", "cpu")
    check_kernels("auto", "cpu")
