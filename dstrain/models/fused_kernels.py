"""Fused Triton kernels of liger-kernel for norms, gated MLPs, rotary embeddings, and residuals added before a norm.

A module is recognized by what it computes. A stub of it, with random weights, runs once through the module's own
forward pass and once through the fused one; the module takes the kernel where values and gradients are equal. It keeps
its parameters, children and hooks: its class becomes a subclass that has another `forward`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from types import FunctionType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch

from dstrain.errors import Fault, RecipeError
from dstrain.models.fused_cross_entropy import compute_cross_entropy, fuse_cross_entropy
from dstrain.models.quantization import preload_bitsandbytes
from dstrain.resources import TRITON_PACKAGES, is_triton_ready, list_missing_for_triton

# Shapes: B rows, L tokens, H width, F width inside an MLP, A heads, D width of a head, R rotated part of D.

KERNELS_KEY = "model.kernels"
EXTRA = 'pip install "dstrain[kernels]"'
Kernels = Literal["auto", "liger", "none"]


def takes_fused_kernels(kernels: Kernels) -> bool:
    """Return True where models of this process run with fused kernels. `kernels`: the recipe's `model.kernels`.

    They need a GPU, liger-kernel, and what Triton compiles with. A run that was trained with liger is evaluated and
    exported without them where they are missing: the values are the same. `check_kernels` is for training.
    """
    if kernels == "none":
        return False
    is_on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()
    is_interpreted = kernels == "liger" and uses_interpreter()
    return (is_on_gpu or is_interpreted) and _find_missing_requirement() is None


def check_kernels(kernels: Kernels, device_type: str) -> None:
    """Raise RecipeError where the recipe asks for fused kernels that cannot run here. `device_type`: of the run."""
    if kernels != "liger":
        return
    missing_requirement = _find_missing_requirement()
    if missing_requirement is not None:
        raise RecipeError(Fault(KERNELS_KEY, *missing_requirement))
    if device_type != "cuda" and not uses_interpreter():
        raise RecipeError(Fault(KERNELS_KEY, "is liger, whose kernels run on GPUs", "train on a GPU, or write auto"))


def _find_missing_requirement() -> tuple[str, str] | None:
    """Return why liger's kernels cannot run on this machine, and what to do; None where they can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "needs liger-kernel, which is not installed", f"run {EXTRA}, or write auto"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which comes with torch for CUDA and is not installed", "install such a torch"
    missing = [] if uses_interpreter() else list_missing_for_triton(os.environ)
    if missing and not is_triton_ready():
        return f"is compiled by Triton, which lacks {' and '.join(missing)}", f"{TRITON_PACKAGES}, or write none"
    return None


def uses_interpreter() -> bool:
    """Return True where Triton's interpreter computes kernels, on a CPU too (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass
class FusedKernels:
    """Which classes of a model run with fused kernels, and which stay eager."""

    fused: Counter[str] = field(default_factory=Counter)
    """Number of modules by "KERNEL of CLASS"."""
    eager: dict[str, str] = field(default_factory=dict)
    """Reason by "KERNEL of CLASS"."""

    def __str__(self) -> str:
        fused = ", ".join(f"{name} ({count})" for name, count in sorted(self.fused.items()))
        eager = "; ".join(f"{name} ({reason})" for name, reason in sorted(self.eager.items()))
        return f"kernels: fused {fused or 'none'}" + (f"; eager: {eager}" if eager else "")

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the run's event."""
        return {"fused": dict(self.fused), "eager": self.eager}


NotFused = str
"""Why a module stays eager."""
OTHER: NotFused = "it computes something else"


class Kind(NamedTuple):
    """A kind of modules that have a fused kernel."""

    kernel: str
    is_candidate: Callable[[torch.nn.Module], bool]
    """True where a module looks as if it computed this."""
    make_class: Callable[[torch.nn.Module], type | NotFused | None]
    """Returns the class of the module with the kernel, None for a module of another kind. It checks values."""


def fuse_kernels(model: torch.nn.Module) -> FusedKernels:
    """Let the modules of a model run with fused kernels where these compute the same. Call it before tiles are set."""
    report, modules = FusedKernels(), [*model.modules()]
    for kind in KINDS:
        classes: dict[Hashable, type | NotFused | None] = {}
        for module in modules:
            if not kind.is_candidate(module):
                continue
            key, label = _configuration(module), f"{kind.kernel} of {type(module).__name__}"
            if key not in classes:
                classes[key] = kind.make_class(module)
            fused_class = classes[key]
            if isinstance(fused_class, NotFused):
                report.eager[label] = fused_class
            elif fused_class is not None:
                module.__class__ = fused_class
                report.fused[label] += 1
    _fuse_head(model, report)
    vars(model)[_REPORT] = report
    return report


_REPORT = "fused_kernels"
"""Attribute of a model with its `FusedKernels`."""


def find_fused_kernels(model: torch.nn.Module) -> FusedKernels | None:
    """Return what `fuse_kernels` has done to the model, or to one inside of it; None where it was not called."""
    reports = (vars(module).get(_REPORT) for module in model.modules())
    return next((report for report in reports if report is not None), None)


def _configuration(module: torch.nn.Module) -> Hashable:
    """Return what decides what a module computes: its class, settings, shapes and the classes of its children."""
    settings = [
        (name, repr(value))
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str, tuple, type(None))) or inspect.isroutine(value)
        if not name.startswith("_") and "idx" not in name and "index" not in name
    ]
    settings.append(("config", str(id(getattr(module, "config", None)))))
    shapes = [(name, _full_shape(parameter)) for name, parameter in module.named_parameters(recurse=False)]
    children = [(name, type(child)) for name, child in module.named_children()]
    return type(module), tuple(settings), tuple(shapes), tuple(children)


def _required_inputs(module: torch.nn.Module) -> list[str]:
    """Return the parameters of the forward function that have no default."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def _main_reason(reasons: Sequence[NotFused]) -> NotFused:
    """Return why no kernel was taken: where a stub ran, that its values differ."""
    return OTHER if OTHER in reasons else reasons[0]


def _full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, sharded by ZeRO-3 or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _subclass(base: type, **attributes: Any) -> type:
    """Return a class that looks like `base`, with other attributes."""
    return type(base)(
        base.__name__, (base,), {"__module__": base.__module__, "__qualname__": base.__qualname__, **attributes}
    )


def _raw_forward(module_class: type) -> Callable[..., Any]:
    """Return the class's forward function, out of decorators: of gradient checkpointing, or for renamed arguments."""
    forward: Function = inspect.unwrap(module_class.forward)  # type: ignore[attr-defined]
    return forward


def _runs_fused(*tensors: torch.Tensor) -> bool:
    """Return True where kernels accept these tensors: on a GPU, of one dtype, and not empty."""
    first = tensors[0]
    return (
        (first.device.type == "cuda" or uses_interpreter())
        and first.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(tensor.dtype == first.dtype and tensor.numel() for tensor in tensors)
    )


def _liger(name: str) -> Callable[..., Any]:
    """Return `apply` of one of liger's autograd functions, such as "rms_norm.LigerRMSNormFunction"."""
    preload_bitsandbytes()  # liger imports peft
    module, _, function = name.partition(".")
    apply: Function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
    return apply


# ---- Stubs, and the comparison of values and gradients ----

ROWS = 7
"""Tokens of a stub's input."""
INNER, OUTER = 33, 16
"""Widths inside and outside of the stub of an MLP."""
FP32_ERROR, HALF_ERROR = 1e-5, 2**-5
"""Largest difference in fp32 and in 16 bits, as a share of the largest value of a row."""

Function = Callable[..., Any]
"""Takes tensors, and returns a tensor or a tuple of tensors."""


def _make_stub(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], children: Mapping[str, Any] | None = None
) -> Any:
    """Return a copy of a module with other parameters and children. The module itself is not changed."""
    stub = copy.copy(module)
    device = _device()
    buffers = {name: None if buffer is None else buffer.to(device) for name, buffer in module._buffers.items()}
    parts = {"_parameters": {**tensors}, "_buffers": buffers, "_modules": {**module._modules, **(children or {})}}
    vars(stub).update(parts, training=True)
    return stub


def _device() -> torch.device:
    return torch.device("cpu" if uses_interpreter() or not torch.cuda.is_available() else "cuda")


def _half_dtype() -> torch.dtype:
    """Return bfloat16, or float16 on GPUs without it."""
    has_bf16 = _device().type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def _difference(eager: Function, fused: Function, *shapes: Sequence[int]) -> tuple[float, NotFused | None]:
    """Return the difference of two functions in 16 bits, and why they differ: None where they compute the same.

    Both get random tensors of these shapes, in fp32 and in 16 bits.
    """
    for dtype, limit in ((torch.float32, FP32_ERROR), (_half_dtype(), HALF_ERROR)):
        try:
            wanted = _values_and_gradients(eager, shapes, dtype)
        except Exception as error:  # of a family's code, which may need any other argument
            return float("inf"), f"its stub does not run: {type(error).__name__}"
        try:
            computed = _values_and_gradients(fused, shapes, dtype)
        except Exception as error:  # of liger, or of Triton's compiler
            return float("inf"), f"its kernel does not run: {type(error).__name__}"
        difference = max(map(_relative_error, wanted, computed))
        if not difference <= limit:
            return difference, OTHER
    return difference, None


def _values_and_gradients(
    function: Function, shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        values = torch.randn(*shape, generator=random, device="cpu", dtype=torch.float32)
        if len(shape) > 1:
            values[..., 0, :] *= 1e-3  # one row is small, so that the eps of a norm counts
        return values.to(_device(), dtype)

    inputs = [draw(shape).requires_grad_() for shape in shapes]
    with torch.enable_grad():
        result = function(*inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    grads = torch.autograd.grad(outputs, inputs, [draw(output.shape).to(output.dtype) for output in outputs])
    return [*(output.detach() for output in outputs), *grads]


def _relative_error(wanted: torch.Tensor, computed: torch.Tensor) -> float:
    """Return the largest difference in a row, as a share of the row's largest value. Rows of zeros are equal or not."""
    if wanted.shape != computed.shape or wanted.dtype != computed.dtype:
        return float("inf")
    wanted, computed = wanted.float(), computed.float()
    largest = wanted.abs().amax(-1, keepdim=True).clamp(min=float(wanted.abs().max()) * 1e-6 + 1e-30)
    return float(((wanted - computed).abs() / largest).max())


# ---- Norms ----


def is_norm(module: torch.nn.Module) -> bool:
    """Return True for a module with one weight (H,), or a norm with none, and a small number, eps; not torch's own."""
    shapes = [_full_shape(parameter) for parameter in module.parameters()]
    is_plain = not any(True for _ in module.children()) and not type(module).__module__.startswith("torch.nn")
    has_weight = [len(shape) for shape in shapes] == [1] and "weight" in module._parameters
    return is_plain and (has_weight or (not shapes and "Norm" in type(module).__name__)) and bool(_eps_names(module))


def _eps_names(module: torch.nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 1e-2]


def fused_norm_class(module: torch.nn.Module) -> type | NotFused:
    """Return the class of an RMSNorm: x / rms(x) * (offset + weight), with the casts of Llama or of Gemma."""
    module_class, names = type(module), _eps_names(module)
    if len(_required_inputs(module)) != 1:
        return "it takes more than one tensor"
    width = next((_full_shape(parameter)[0] for parameter in module.parameters()), INNER)
    shapes = [(ROWS, width), *([(width,)] if any(True for _ in module.parameters()) else [])]

    def run(some_class: type) -> Function:
        def call(hidden: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
            stub = _make_stub(module, {"weight": weight[0]} if weight else {})
            return some_class.forward(stub, hidden)  # type: ignore[attr-defined]

        return call

    classes = [
        _subclass(
            module_class, forward=_norm_forward(module_class, name, offset, casting), adds_residual=len(shapes) == 2
        )
        for name, offset, casting in product(names, (0.0, 1.0), ("llama", "gemma"))
    ]
    # In fp32 both ways to cast are the same, in 16 bits one is closer.
    tried = [(*_difference(run(module_class), run(candidate), *shapes), candidate) for candidate in classes]
    _, reason, closest = min(tried, key=lambda each: (each[1] is not None, each[0]))
    return closest if reason is None else reason


def _norm_forward(module_class: type, eps_name: str, offset: float, casting: str) -> Function:
    normalize, add_and_normalize = (
        _liger("rms_norm.LigerRMSNormFunction"),
        _liger("fused_add_rms_norm.LigerFusedAddRMSNormFunction"),
    )
    eager = module_class.forward  # type: ignore[attr-defined]

    def forward(self: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the norm of (..., H); with a residual, the norm of the sum, and the sum."""
        weight = getattr(self, "weight", None)
        settings = getattr(self, eps_name), offset, casting, False  # False: the gradient may have other readers
        tensors = [tensor for tensor in (hidden_states, weight, residual) if tensor is not None]
        is_whole = weight is None or weight.shape == hidden_states.shape[-1:]  # not broadcast
        if not is_whole or not _runs_fused(*tensors):
            summed = hidden_states if residual is None else residual + hidden_states
            normed = eager(self, summed)
            return normed if residual is None else (normed, summed)
        if residual is None:
            return normalize(hidden_states, weight, *settings)
        return add_and_normalize(hidden_states, residual, weight, *settings)

    return forward


# ---- Gated MLPs and experts ----

GATES = {
    "SwiGLU": "swiglu.LigerSiLUMulFunction",
    "GeGLU": "geglu.LigerGELUMulFunction",
}
"""act(gate) * up for two tensors; GeGLU by the tanh approximation."""


def is_gated_mlp(module: torch.nn.Module) -> bool:
    """Return True for two projections (H, F) and one (F, H), or one (H, 2 F) and one (F, H)."""
    shapes = [_full_shape(child.weight) for child in _linears(module).values()]  # (out, in)
    if len(_required_inputs(module)) != 1:
        return False
    in_linears = {parameter for child in _linears(module).values() for parameter in child.parameters()}
    is_whole = {*module.parameters()} == in_linears
    if not is_whole or len(shapes) not in (2, 3):
        return False
    down = [
        index
        for index, (height, width) in enumerate(shapes)
        if all(other == (width * (4 - len(shapes)), height) for other in [*shapes[:index], *shapes[index + 1 :]])
    ]
    return bool(down)


def _linears(module: torch.nn.Module) -> dict[str, Any]:
    """Return the children with one matrix."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(getattr(child, "weight", None), torch.Tensor) and len(_full_shape(child.weight)) == 2
    }


def fused_mlp_class(module: torch.nn.Module) -> type | NotFused | None:
    """Return the class of down(act(gate(x)) * up(x)); the projections stay modules, with their adapters and hooks.

    None for a module that computes something of other shapes, such as attention.
    """
    module_class, names = type(module), [*_linears(module)]
    reasons: list[NotFused] = []
    for roles in permutations(names):
        wide = [name for name in names if name != roles[-1]]
        heights = {name: INNER if len(wide) == 2 else 2 * INNER for name in wide} | {roles[-1]: OUTER}
        widths = dict.fromkeys(wide, OUTER) | {roles[-1]: INNER}
        shapes = [(2, ROWS, OUTER), *((heights[name], widths[name]) for name in names)]

        def run(forward: Function) -> Function:
            def call(hidden: torch.Tensor, *weights: torch.Tensor) -> Any:
                stubs = {name: _Projection(weight) for name, weight in zip(names, weights, strict=True)}
                return forward(_make_stub(module, {}, stubs), hidden)

            return call

        for forward in _mlp_forwards(module_class, roles):
            _, reason = _difference(run(_raw_forward(module_class)), run(forward), *shapes)
            if reason is None:
                return _subclass(module_class, forward=forward)
            reasons.append(reason)
    return OTHER if OTHER in reasons else None


class _Projection(SimpleNamespace):
    """A linear layer of a stub."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight=weight, bias=None, out_features=weight.shape[0], in_features=weight.shape[1])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight)


def _mlp_forwards(module_class: type, roles: Sequence[str]) -> Iterator[Function]:
    """Yield forward functions of an MLP whose projections have the roles gate, up, down or gate and up in one, down."""
    eager, *wide, down = _raw_forward(module_class), *roles

    def make(multiply: Function) -> Function:
        def forward(self: Any, hidden_states: torch.Tensor) -> Any:
            if not _runs_fused(hidden_states):
                return eager(self, hidden_states)
            return getattr(self, down)(multiply(*(getattr(self, name)(hidden_states) for name in wide)))

        return forward

    if len(wide) == 1:
        yield make(_swiglu_of_pair)
    else:
        yield from (make(_liger(name)) for name in GATES.values())


def _swiglu_of_pair(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, (..., F), for both in one tensor (..., 2 F)."""
    # liger 0.8.5 returns the gradient of rows, whatever the shape of the input.
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    result: torch.Tensor = _liger("swiglu.LigerFusedGateUpSiLUMulFunction")(rows)
    return result.view(*gate_up.shape[:-1], result.shape[-1])


def has_gated_experts(module: torch.nn.Module) -> bool:
    """Return True for experts of transformers, whose gates and other halves are computed in one product."""
    return hasattr(type(module), "_apply_gate")


def fused_experts_class(module: torch.nn.Module) -> type | NotFused:
    """Return the class of experts with silu(gate) * up."""
    eager: Any = type(module)._apply_gate

    def apply_gate(self: Any, gate_up_out: torch.Tensor) -> Any:
        """Return (N, F) for (N, 2 F)."""
        return _swiglu_of_pair(gate_up_out) if _runs_fused(gate_up_out) else eager(self, gate_up_out)

    _, reason = _difference(lambda hidden: eager(module, hidden), _swiglu_of_pair, (ROWS, 2 * INNER))
    return _subclass(type(module), _apply_gate=apply_gate) if reason is None else reason


# ---- Rotary embeddings ----


def rotates_heads(module: torch.nn.Module) -> bool:
    """Return True for a module whose forward function calls one that rotates query and key by cos and sin."""
    return bool(_rotations(type(module)))


def _rotations(module_class: type) -> dict[str, Function]:
    """Return the functions (query, key, cos, sin, ...) that a forward function calls, by name."""
    forward = _raw_forward(module_class)
    rotations: dict[str, Function] = {}
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        if ("rotary" in name or "rope" in name) and inspect.isfunction(function):
            parameters = [*inspect.signature(function).parameters]
            if parameters[2:4] == ["cos", "sin"]:
                rotations[name] = function
    return rotations


def fused_attention_class(module: torch.nn.Module) -> type | NotFused:
    """Return the class of attention with RoPE in one kernel."""
    module_class = type(module)
    forward, names = _raw_forward(module_class), {}
    for name, function in _rotations(module_class).items():
        accepted = frozenset(case for case in _rotation_cases() if _computes_rotation(function, case))
        if not accepted:
            return "its rotation is another one"
        names[name] = _make_rotation(function, accepted)
    # The same code, which finds other functions under these names.
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, **names},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return _subclass(module_class, forward=changed)


class RotationCase(NamedTuple):
    """Which of the calls of a rotation this is."""

    dims: int
    """4: query (B, A, L, D) or (B, L, A, D); 3: (L, A, D)."""
    heads_dim: int
    """That of the heads, over which cos (B, L, R) is broadcast."""
    is_partial: bool
    """True where R < D."""
    has_wide_angles: bool
    """True where cos and sin are in fp32, and query and key in 16 bits."""


def _rotation_cases() -> Iterator[RotationCase]:
    for dims, heads_dim in ((4, 1), (4, 2), (3, 1)):
        yield from (RotationCase(dims, heads_dim, *flags) for flags in product((False, True), repeat=2))


def _computes_rotation(function: Function, case: RotationCase) -> bool:
    """Return True where liger's kernel computes this rotation."""
    rotated, width, rows = (8 if case.is_partial else 16), 16, 2 if case.dims == 4 else 1
    angles = torch.randn(rows, ROWS, rotated // 2, generator=torch.Generator().manual_seed(2), device="cpu")
    angles = torch.cat([angles, angles], -1).to(_device())  # (B, L, R)
    heads = [(rows, ROWS, count, width) for count in (4, 2)]
    if case.heads_dim == 1 and case.dims == 4:
        heads = [(rows, count, ROWS, width) for count in (4, 2)]
    options = {} if case.dims == 3 or case.heads_dim == 1 else {"unsqueeze_dim": 2}

    def run(rotation: Function) -> Function:
        def call(query: torch.Tensor, key: torch.Tensor) -> Any:
            dtype = torch.float32 if case.has_wide_angles else query.dtype
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            if case.dims == 3:
                return tuple(rotation(query[0], key[0], cos[0], sin[0]))
            return tuple(rotation(query, key, cos, sin, **options))

        return call

    return _difference(run(function), run(_make_rotation(function, frozenset([case]))), *heads)[1] is None


def _make_rotation(function: Function, accepted: frozenset[RotationCase]) -> Function:
    """Return a rotation that takes liger's kernel in these cases, and the function in others."""
    rotate = _liger("rope.LigerRopeFunction")
    option = inspect.signature(function).parameters.get("unsqueeze_dim")
    default_dim = 1 if option is None else option.default

    def rotation(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        case = RotationCase(
            query.ndim,
            kwargs.get("unsqueeze_dim", default_dim),
            cos.shape[-1] < query.shape[-1],
            cos.dtype != query.dtype,
        )
        is_known = not args and kwargs.keys() <= {"unsqueeze_dim"} and case in accepted and cos.ndim == query.ndim - 1
        if not is_known or not _runs_fused(query, key) or cos.dtype not in (query.dtype, torch.float32):
            return function(query, key, cos, sin, *args, **kwargs)
        if case.dims == 3:
            pair = [heads.transpose(0, 1)[None] for heads in (query, key)]  # (1, A, L, D)
        elif case.heads_dim == 2:
            pair = [heads.transpose(1, 2) for heads in (query, key)]
        else:
            pair = [query, key]
        # The kernel writes into what it is given: copies, laid out as it reads them, (B, L, A, D).
        copies = [heads.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for heads in pair]
        pair = rotate(*copies, cos, sin)
        if case.dims == 3:
            return tuple(heads[0].transpose(0, 1) for heads in pair)
        if case.heads_dim == 2:
            return tuple(heads.transpose(1, 2) for heads in pair)
        return tuple(pair)

    return rotation


# ---- Residuals that are added before a norm ----


class LayerRoles(NamedTuple):
    """Names of the children of a decoder or encoder layer, in the order in which they run."""

    first_norm: str
    attention: str
    attention_norm: str | None
    """Of the attention's output."""
    second_norm: str
    """Of the sum of residual and attention."""
    mlp: str
    mlp_norm: str | None
    """Of the MLP's output."""

    def norms(self) -> list[str]:
        """Return the names of the norms."""
        names = [self.first_norm, self.attention_norm, self.second_norm, self.mlp_norm]
        return [name for name in names if name is not None]


LAYERS = (
    LayerRoles("input_layernorm", "self_attn", None, "post_attention_layernorm", "mlp", None),
    LayerRoles(
        "input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
        "post_feedforward_layernorm",
    ),
    LayerRoles(
        "input_layernorm", "self_attn", "post_self_attn_layernorm", "post_attention_layernorm", "mlp",
        "post_mlp_layernorm",
    ),
    LayerRoles("norm1", "attn", None, "norm2", "mlp", None),
    LayerRoles("ln1", "attn", None, "ln2", "mlp", None),
)  # fmt: skip


def _roles_of(module: torch.nn.Module) -> LayerRoles | None:
    """Return the roles of a layer's children, the largest set of them that it has."""
    known = [roles for roles in LAYERS if all(name in module._modules for name in roles if name is not None)]
    return max(known, key=lambda roles: sum(name is not None for name in roles), default=None)


def is_layer(module: torch.nn.Module) -> bool:
    """Return True for a layer of attention and MLP whose second norm has a kernel that adds the residual."""
    roles = _roles_of(module)
    if roles is None or not getattr(module._modules[roles.second_norm], "adds_residual", False):
        return False
    return all(isinstance(getattr(module._modules[name], "weight", None), torch.Tensor) for name in roles.norms())


def fused_layer_class(module: torch.nn.Module) -> type | NotFused:
    """Return the class of a layer whose second norm adds the residual too."""
    roles, module_class = _roles_of(module), type(module)
    assert roles is not None, "a candidate"
    eager = _raw_forward(module_class)
    norms: dict[str, Any] = {name: module._modules[name] for name in roles.norms()}
    shapes = [_full_shape(norm.weight) for norm in norms.values()]
    reasons: list[NotFused] = []
    for returns_tuple, mlp in product((True, False), (torch.sin, lambda hidden: (hidden.sin(), None))):
        attention = _AttentionStub(returns_tuple)

        def run(forward: Function, attention: Function = attention, mlp: Function = mlp) -> Function:
            def call(hidden: torch.Tensor, *weights: torch.Tensor) -> Any:
                children = {
                    name: _make_stub(norm, {"weight": weight})
                    for (name, norm), weight in zip(norms.items(), weights, strict=True)
                }
                children |= {roles.attention: attention, roles.mlp: mlp}
                output = forward(_make_stub(module, {}, children), hidden, **_sentinels(eager))
                if not isinstance(output, torch.Tensor):
                    raise TypeError("a layer with other outputs")
                return output

            return call

        for by_name in (True, False):
            forward = _layer_forward(eager, roles, by_name)
            attention.calls.clear()
            _, reason = _difference(run(eager), run(forward), (1, ROWS, shapes[0][0]), *shapes)
            if reason is None and attention.calls[0] == attention.calls[-1]:
                return _subclass(module_class, forward=forward)
            reasons.append(reason or OTHER)
    return _main_reason(reasons)


class _AttentionStub:
    """Attention of a stub, which records its arguments besides the input."""

    def __init__(self, returns_tuple: bool) -> None:
        self.returns_tuple = returns_tuple
        self.calls: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        self.calls.append((len(args), {name: value for name, value in kwargs.items() if name != "hidden_states"}))
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden.cos(), None) if self.returns_tuple else hidden.cos()


def _sentinels(forward: Function) -> dict[str, str]:
    """Return an argument for each parameter of a layer but its input, and one that it does not know."""
    parameters = [*inspect.signature(forward).parameters.values()][2:]
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    extra = ["unknown"] if len(named) < len(parameters) else []
    return {name: name for name in [*named, *extra]}


def _first_output(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _layer_forward(eager: Function, roles: LayerRoles, by_name: bool) -> Function:
    """Return the forward function of a layer. `by_name`: the attention gets its input by name."""
    names: list[str] = []
    defaults: dict[str, Any] = {}
    for parameter in [*inspect.signature(eager).parameters.values()][2:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        names.append(parameter.name)
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default

    def attend(self: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        normed, attention = getattr(self, roles.first_norm)(hidden_states), getattr(self, roles.attention)
        return _first_output(attention(hidden_states=normed, **kwargs) if by_name else attention(normed, **kwargs))

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        residual = hidden_states
        # No variable here holds what only the attention needs while the MLP, which takes most memory, runs.
        hidden_states = attend(self, hidden_states, defaults | dict(zip(names, args, strict=False)) | kwargs)
        if roles.attention_norm is not None:
            hidden_states = getattr(self, roles.attention_norm)(hidden_states)
        hidden_states, residual = getattr(self, roles.second_norm)(hidden_states, residual)
        hidden_states = _first_output(getattr(self, roles.mlp)(hidden_states))
        if roles.mlp_norm is not None:
            hidden_states = getattr(self, roles.mlp_norm)(hidden_states)
        return residual + hidden_states

    return forward


# ---- Cross entropy ----


def _fuse_head(model: torch.nn.Module, report: FusedKernels) -> None:
    """Let the scores of a plain linear head be computed by a kernel."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if type(head) is not torch.nn.Linear:
        return
    label, reason = "cross entropy of Linear", _compare_cross_entropy()
    if reason is not None:
        report.eager[label] = reason
        return
    fuse_cross_entropy(head)
    report.fused[label] += 1


def _compare_cross_entropy() -> NotFused | None:
    """Return why liger's kernel of cross entropy is not used; None where its losses and errors are right."""
    random = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS, INNER, generator=random, device="cpu", dtype=torch.float32)
    targets = torch.arange(ROWS, device=_device())
    for dtype, limit in ((torch.float32, FP32_ERROR), (_half_dtype(), HALF_ERROR)):
        logits = values.to(_device(), dtype)
        log_probs = logits.float().log_softmax(-1)
        wanted_losses = -log_probs.gather(1, targets[:, None]).squeeze(1)
        wanted_errors = log_probs.exp() - torch.nn.functional.one_hot(targets, INNER)
        try:
            losses, _ = compute_cross_entropy(logits, targets, with_errors=True, with_accuracy=True)
        except Exception as error:  # of liger, or of Triton's compiler
            return f"its kernel does not run: {type(error).__name__}"
        difference = max(_relative_error(wanted_losses, losses), _relative_error(wanted_errors, logits.float()))
        if not difference <= limit:
            return OTHER
    return None


KINDS = (
    Kind("RMSNorm", is_norm, fused_norm_class),
    Kind("gated MLP", is_gated_mlp, fused_mlp_class),
    Kind("gated experts", has_gated_experts, fused_experts_class),
    Kind("RoPE", rotates_heads, fused_attention_class),
    Kind("residual + norm", is_layer, fused_layer_class),
)
"""In the order in which they are looked for: a layer is checked with its fused norms."""
