"""The full JSON for deepspeed.initialize: a preset, and what the recipe and the device decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dstrain.errors import Fault, PresetError
from dstrain.preset.key_schema import cast_integers
from dstrain.preset.read import Preset
from dstrain.preset.rules import ZERO_BLOCK, get_nested

Precision = Literal["fp32", "bf16", "fp16"]

STEPS_PER_PRINT = 2**31 - 1
"""Steps between DeepSpeed's own log lines: dstrain writes its own."""

_DTYPE_NAMES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32", "float")}


@dataclass(frozen=True)
class Device:
    """What a process computes on."""

    kind: Literal["cuda", "cpu"]
    bf16: bool
    """Whether it computes in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the recipe and the launch decide, and DeepSpeed must be told."""

    precision: Precision
    micro: int
    """Samples of the largest forward pass."""
    accumulate: int
    """Forward passes per step and process."""
    world_size: int
    """Processes."""
    total: int | None = None
    """Samples per step; None: micro x accumulate x processes."""
    clip: float
    """Largest norm of the gradients; 0 = no clipping."""
    nvme_path: str | None = None
    """Folder for what is offloaded to disk, where the preset names none."""
    device_kind: Literal["cuda", "cpu"] = "cuda"
    uses_custom_optimizer: bool = False
    """Whether the optimizer is another than DeepSpeed's own CPU Adam."""
    uses_muon: bool = False
    """Whether the optimizer is Muon, for which DeepSpeed puts gradients together."""


def resolve_precision(preset: Preset, requested: str, device: Device) -> Precision:
    """The precision of the run: `wanted` is the recipe's auto, bf16, fp16 or fp32."""
    spoken = preset.precision
    if requested != "auto" and spoken not in (None, requested):
        problem = f"the recipe says precision: {requested}, and this file enables {spoken}"
        if spoken == "fp32":
            problem = f"the recipe says precision: {requested}, and this file switches fp16 and bf16 off"
        mend = f"write precision: auto in the recipe, or remove `fp16` and `bf16` from {preset.path.name}"
        raise PresetError(Fault(f"{preset.path.name} precision", problem, mend))
    chosen = spoken if requested == "auto" else requested
    if chosen == "bf16" and not device.bf16:
        problem = f"bf16 is asked for, and this {'GPU' if device.kind == 'cuda' else 'CPU'} does not compute in it"
        raise PresetError(Fault(f"{preset.path.name} precision", problem, "write precision: fp16 or fp32"))
    if chosen is None:
        chosen = "fp32" if device.kind == "cpu" else "bf16" if device.bf16 else "fp16"
    return {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}[chosen]  # type: ignore[return-value]


def complete_preset(preset: Preset, *, settings: RunSettings) -> dict[str, Any]:
    """The JSON deepspeed.initialize gets. The preset stays as it is. PresetError where the run cannot be had."""
    faults = _check_compatibility(preset, settings)
    if faults:
        raise PresetError(faults)
    block = cast_integers(preset.block)
    block["train_micro_batch_size_per_gpu"] = settings.micro
    block["gradient_accumulation_steps"] = settings.accumulate
    product = settings.micro * settings.accumulate * settings.world_size
    if settings.total in (
        None,
        product,
    ):  # DeepSpeed accepts no other; without, it takes the product for its own counters
        block["train_batch_size"] = product
    block["gradient_clipping"] = float(settings.clip)  # DeepSpeed clips at 1.0 where nothing is said
    for name in ("fp16", "bf16"):
        block[name] = {**block.get(name, {}), "enabled": settings.precision == name}
    block["zero_allow_untested_optimizer"] = True
    block["zero_force_ds_cpu_optimizer"] = False
    block.setdefault(ZERO_BLOCK, {"stage": 0})
    if _accumulates_in_fp32(preset, settings):
        block["data_types"] = {**block.get("data_types", {}), "grad_accum_dtype": "fp32"}
        if preset.stage == 1 and block.get("communication_data_type") is None:
            # There DeepSpeed casts the finished sum once more, to send it, also where one process is alone
            # (engine.py, allreduce_bucket; stage_1_and_2.py, allreduce_bucket).
            block["communication_data_type"] = "fp32"
    if settings.uses_muon and preset.stage == 3:
        block[ZERO_BLOCK]["reduce_scatter"] = (
            False  # DeepSpeed stops on Muon with it, and takes it where nothing is said
        )
    block.setdefault("steps_per_print", STEPS_PER_PRINT)
    block.setdefault("wall_clock_breakdown", False)
    for name in ("offload_optimizer", "offload_param"):
        if get_nested(block, ZERO_BLOCK, name, "device") == "nvme" and not block[ZERO_BLOCK][name].get("nvme_path"):
            block[ZERO_BLOCK][name]["nvme_path"] = settings.nvme_path
    return block


def _accumulates_in_fp32(preset: Preset, settings: RunSettings) -> bool:
    """Whether the gradients of bf16 micro-batches are added up in fp32: in bf16 a sum of 64 is off by 1 % (docs/memory.md).

    Not at stage 0, where DeepSpeed cannot; not where the preset keeps gradients in bf16 on purpose, or names a dtype; not
    for Muon where that would take another step (`_disturbs_muon`).
    """
    if settings.precision != "bf16" or settings.accumulate == 1 or preset.stage == 0:
        return False
    in_bf16 = get_nested(preset.block, "bf16", "bf16_master_weights_and_grads") is True
    named = get_nested(preset.block, "data_types", "grad_accum_dtype") is not None
    return not (named or in_bf16 or (settings.uses_muon and _is_muon_dtype_sensitive(preset)))


def _check_compatibility(preset: Preset, settings: RunSettings) -> list[Fault]:
    """What this preset cannot do with this precision, device and optimizer."""
    file, found = preset.path.name, []
    precision, accumulation = settings.precision, get_nested(preset.block, "data_types", "grad_accum_dtype")
    if precision == "fp16" and settings.device_kind == "cpu":
        found.append(("precision fp16", "fp16 needs a GPU", "write precision: bf16 or fp32 in the recipe"))
    if precision == "fp16" and preset.stage == 0:
        problem = "at stage 0 DeepSpeed never scales an fp16 loss but unscales its gradients, which loses them"
        found.append(("precision fp16", problem, "take the preset zero1, or write precision: bf16 or fp32"))
    if (
        preset.stage == 0
        and accumulation is not None
        and accumulation.removeprefix("torch.") not in _DTYPE_NAMES[precision]
    ):
        problem = f"stage 0 cannot sum gradients in {accumulation} while it trains in {precision}"
        found.append(("data_types.grad_accum_dtype", problem, "remove it, or take the preset zero1"))
    for name in ("offload_optimizer", "offload_param"):
        device, path = (
            get_nested(preset.block, ZERO_BLOCK, name, "device"),
            get_nested(preset.block, ZERO_BLOCK, name, "nvme_path"),
        )
        if device == "nvme" and not (path or settings.nvme_path):
            problem = "offloading to nvme needs a folder on a fast local disk"
            found.append((f"{ZERO_BLOCK}.{name}.nvme_path", problem, "write its path here"))
    if settings.uses_custom_optimizer:
        found += _find_cpu_adam_conflicts(preset)
    if settings.uses_muon:
        found += _find_muon_conflicts(preset, precision)
    return [Fault(f"{file} {where}", problem, mend) for where, problem, mend in found]


def _find_cpu_adam_conflicts(preset: Preset) -> list[tuple[str, str, str]]:
    """Keys DeepSpeed only honours with its own CPU Adam."""
    offload = f"{ZERO_BLOCK}.offload_optimizer"
    keys = {
        "fp16.fp16_master_weights_and_grads": get_nested(preset.block, "fp16", "fp16_master_weights_and_grads") is True,
        "bf16.bf16_master_weights_and_grads": preset.offload_optimizer is not None
        and get_nested(preset.block, "bf16", "bf16_master_weights_and_grads") is True,
        f"{offload}.ratio": get_nested(preset.block, *offload.split("."), "ratio", default=1.0) < 1.0,
        f"{offload}.super_offload": get_nested(preset.block, *offload.split("."), "super_offload") is True,
    }
    problem = "DeepSpeed takes this only with its own CPU Adam"
    return [(key, problem, "remove it, or write optim.name: adamw in the recipe") for key, used in keys.items() if used]


def _find_muon_conflicts(preset: Preset, precision: Precision) -> list[tuple[str, str, str]]:
    """Keys with which DeepSpeed's Muon stops, or takes another step without a word."""
    mend, found = "remove it, or write optim.name: adamw in the recipe", []
    for key in ("reduce_scatter", "zero_quantized_gradients"):
        if preset.stage == 3 and get_nested(preset.block, ZERO_BLOCK, key) is True:
            found.append(
                (f"{ZERO_BLOCK}.{key}", "DeepSpeed's Muon needs whole gradients at stage 3 and stops on this", mend)
            )
    accumulation = (get_nested(preset.block, "data_types", "grad_accum_dtype") or precision).removeprefix("torch.")
    if _is_muon_dtype_sensitive(preset) and accumulation not in _DTYPE_NAMES[precision]:
        problem = f"with gradients summed in {accumulation} DeepSpeed's Muon takes another step at stage {preset.stage}"
        found.append(("data_types.grad_accum_dtype", problem, mend))
    return found


def _is_muon_dtype_sensitive(preset: Preset) -> bool:
    """Whether DeepSpeed's Muon takes another step here where gradients are summed in another precision than the weights'."""
    return preset.stage == 2 or (preset.stage == 1 and preset.offload_optimizer is not None)
