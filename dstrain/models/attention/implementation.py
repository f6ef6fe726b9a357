"""Checks of model.attn_implementation: what cannot run here is refused before the model is built."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError

KEY = "model.attn_implementation"
OTHERWISE = "or use sdpa or auto"
FLASH_PACKAGES: dict[str, tuple[str, str, tuple[int, int]]] = {
    "flash_attention_2": ("flash_attn", "flash-attn", (8, 0)),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3", (8, 0)),
}
"""Implementation -> (module, its package, least compute capability)."""


def check_attn_implementation(model: ModelConfig, precision: str) -> None:
    """Raise RecipeError where the recipe's attention implementation cannot train on this machine.

    `precision`: the recipe's; whether the model's family supports it is seen when the model is built.
    """
    fault = next(_find_faults(model, precision), None)
    if fault is not None:
        raise RecipeError(Fault(KEY, *fault))


def _find_faults(model: ModelConfig, precision: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix)."""
    name = model.attn_implementation
    if name == "flex_attention":
        if not _capability():
            yield "flex_attention has no gradients on a CPU", "train on a GPU, " + OTHERWISE
        return
    is_kernel = "/" in name
    if not is_kernel and name not in FLASH_PACKAGES:
        return
    if is_kernel and not model.trust_remote_code:
        fix = "add --set model.trust_remote_code=true if you trust that code, " + OTHERWISE
        yield f"'{name}' is code on the Hub", fix
    module, package, needed = FLASH_PACKAGES.get(name, ("kernels", "kernels", (8, 0)))
    if find_spec(module) is None:
        yield f"{name} needs the package {package}, which is not installed", f"install it, {OTHERWISE}"
    capability = _capability()
    if capability is None:
        yield f"{name} needs a GPU, and torch sees none", "use sdpa or auto"
    elif not is_kernel and capability < needed:
        found, least = (".".join(map(str, one)) for one in (capability, needed))
        yield f"{name} needs compute capability {least}; this GPU has {found}", "use sdpa or auto"
    if precision == "fp32":
        yield f"{name} computes in bf16 or fp16, not in fp32", "set precision: bf16, " + OTHERWISE


def _capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU, or None without a GPU."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
