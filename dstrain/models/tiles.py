"""Tiles over the tokens of a pass: a decoder's MLPs and norms run, and are recomputed, for some thousand tokens at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

import torch

from dstrain.errors import Fault, RecipeError
from dstrain.models.attention.recurrent import PackedRecurrence
from dstrain.models.chunk_sizes import TILE_TOKENS
from dstrain.models.recompute import chunk_gradients, save_forward_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Shapes: B rows, L tokens of a row, T = B L tokens, n tokens of a tile, H width.

TiledMlp = bool | int | Literal["auto"]


def enable_tiles(model: PreTrainedModel, tiled_mlp: TiledMlp) -> None:
    """Let the MLPs and norms of the decoder run in tiles of tokens: ALST, arXiv 2506.13996, section 3.1.

    `tiled_mlp`: the recipe's. true and a number of tokens are for all layers, auto for passes that do not keep the
    intermediate activations: those of recomputed layers, and passes without gradients. A tile of any other layer is
    computed once more. Raises RecipeError where the recipe asks for tiles, and nothing in the model can run in them.
    """
    check_tiles(model, tiled_mlp)
    size, width = tile_tokens(tiled_mlp), model.config.get_text_config().hidden_size
    for owner, module in find_token_functions(model):
        # DeepSpeed reduces the gradients of a leaf module once its input has one (`use_leaf_modules`).
        module.register_forward_pre_hook(_require_input_gradient)
        module.forward = TiledForward(module, module.forward, size * width, None if tiled_mlp != "auto" else owner)


def can_need_tiles(tiled_mlp: TiledMlp, most_tokens: int | None) -> bool:
    """Return True where a pass may have more tokens than one tile. `most_tokens`: of a pass; None without a limit."""
    return tiled_mlp is not False and (most_tokens is None or most_tokens > tile_tokens(tiled_mlp))


def tile_tokens(tiled_mlp: TiledMlp) -> int:
    """Return the most tokens of a tile."""
    return TILE_TOKENS if isinstance(tiled_mlp, (bool, str)) else tiled_mlp


def check_tiles(model: PreTrainedModel, tiled_mlp: TiledMlp) -> None:
    """Raise RecipeError where the recipe asks for tiles, and nothing in the model can run in them."""
    if tiled_mlp not in (False, "auto") and not any(True for _ in find_token_functions(model)):
        what = f"{type(model).__name__} has no MLP or norm that is known to treat each token alike"
        problem = f"is {str(tiled_mlp).lower()}, but {what}"
        raise RecipeError(Fault("model.tiled_mlp", problem, "write auto or false"))


def find_token_functions(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield (recomputed layer, or the decoder; module) of the decoder's dense MLPs and norms of transformers.

    Not of mixtures of experts, whose routers have a loss of all tokens, and not torch's own norms, which keep nothing
    but their input anyway.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder: torch.nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    for owner in decoder.modules():
        if isinstance(owner, GradientCheckpointingLayer):
            yield from ((owner, child) for child in owner.children() if _is_dense_mlp(child))
            yield from ((owner, module) for module in owner.modules() if _is_function_of_tokens(module, "Norm"))
    yield from ((decoder, child) for child in decoder.children() if _is_function_of_tokens(child, "Norm"))


def _is_dense_mlp(module: torch.nn.Module) -> bool:
    has_experts = any("expert" in name or "router" in name for name, _ in module.named_modules())
    return not has_experts and _is_function_of_tokens(module, "MLP")


def _is_function_of_tokens(module: torch.nn.Module, suffix: str) -> bool:
    kind = type(module)
    if not (kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(suffix)):
        return False
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]
    return sum(one.default is one.empty for one in parameters) == 1


def use_leaf_modules(model: torch.nn.Module) -> None:
    """Let ZeRO-3 gather the weights of a module once for all of its tiles or sequences, before `deepspeed.initialize`.

    ZeRO-3 has hooks in each linear layer, which would gather its weights for each tile; ranks whose passes have other
    numbers of tiles would wait for each other. A leaf module has hooks for all of its weights.
    """
    from deepspeed.utils import set_z3_leaf_module

    for owner in [*model.modules()]:
        for name, module in owner.named_children():
            runs_in_parts = isinstance(vars(module).get("forward"), TiledForward | PackedRecurrence)
            if runs_in_parts and any(True for _ in module.children()):
                set_z3_leaf_module(module, True)
                if type(module).__name__ in ADDED_IN_PLACE:
                    # An attribute of the object comes before a module of that name.
                    vars(owner)[name] = _CopiedOutput(module)


ADDED_IN_PLACE = ("FalconMLP",)
"""MLPs to whose output the decoder adds in place: that of a leaf module is a view of its backward hook, where torch
forbids it."""


@dataclass(frozen=True, eq=False)
class _CopiedOutput:
    """A module as its owner calls it, whose output is a copy."""

    module: torch.nn.Module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a copy of the module's output."""
        output: torch.Tensor = self.module(hidden)
        return output.clone()


def _require_input_gradient(module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    """Let the gradient of the input be computed, also where only weights of the module are trained."""
    is_plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and not args[0].requires_grad
    if not (is_plain and torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())):
        return None
    return (args[0].detach().requires_grad_(),)


@dataclass(frozen=True, eq=False)
class TiledForward:
    """The forward pass of a module that treats each token alike, in tiles."""

    module: torch.nn.Module
    forward: Callable[..., Any]
    """That of the module's class."""
    tile_values: int
    """Values of the input in one tile, at most."""
    owner: Any
    """The layer that has to recompute its activations where a pass has gradients; None: any may have tiles."""

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for (B, L, H), or (..., D) for heads of width D."""
        tiles = ceil(hidden.numel() / self.tile_values)
        needs_grad = torch.is_grad_enabled() and hidden.requires_grad
        trained = [one for one in self.module.parameters() if one.requires_grad] if needs_grad else []
        # With gradients of several weights a short pass is one tile, so that every pass has them in the same order: ZeRO
        # adds what the processes have at the same place of a bucket, and one of them may have a long pass.
        if (tiles <= 1 and len(trained) <= 1) or args or kwargs or not self._may_recompute():
            return self.forward(hidden, *args, **kwargs)
        size = ceil(hidden.shape[:-1].numel() / tiles)  # equal tiles
        if not needs_grad:
            return _run(self.forward, size, hidden)
        # The input is saved before the tiles run: where the layer is recomputed, torch's checkpoint stops as soon as it
        # has the layer's last saved tensor, and an MLP at the end of the layer does not run a third time. A Function
        # packs its saved tensors after its forward pass.
        kept = _CheckpointedInput.apply(hidden)
        # Views: autograd runs their nodes in the reverse order of their making. Gradients that one node hands to several
        # weights would come in an order that depends on what else waits.
        return _Tiles.apply(self.forward, size, kept, trained, *(one.view_as(one) for one in trained))

    def _may_recompute(self) -> bool:
        if self.owner is None or not torch.is_grad_enabled():
            return True
        return self.owner.training and getattr(self.owner, "gradient_checkpointing", False)


def _run(forward: Callable[..., torch.Tensor], size: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output for (..., H), `size` rows at a time."""
    output, start = None, 0
    for tile in hidden.reshape(1, -1, hidden.shape[-1]).split(size, dim=1):  # (1, n, H)
        found = forward(tile)
        if output is None:
            output = found.new_empty(*hidden.shape[:-1], found.shape[-1])
            rows = output.view(1, -1, found.shape[-1])
        rows[:, start : start + tile.shape[1]] = found
        start += tile.shape[1]
    assert output is not None
    return output


class _CheckpointedInput(torch.autograd.Function):
    """The identity, which saves its input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Tiles(torch.autograd.Function):
    """A function of single tokens, tile by tile; the backward pass recomputes each tile.

    Like torch.utils.checkpoint around each tile, except that each weight gets one gradient: ZeRO reduces it once, and
    in 16 bits it is summed in fp32 and rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., torch.Tensor],
        size: int,
        kept: torch.Tensor,
        parameters: list[torch.Tensor],
        *_views: torch.Tensor,
    ) -> torch.Tensor:
        ctx.run, ctx.size = forward, size
        ctx.input = kept.grad_fn  # whose saved tensor is the input
        ctx.parameters = parameters  # not saved tensors: ZeRO-3 frees and gathers them in between
        ctx.restored = save_forward_state(kept)  # of dropout in adapters
        return _run(forward, size, kept)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (hidden,) = ctx.input.saved_tensors
        rows, grad_rows = hidden.reshape(-1, hidden.shape[-1]), grad.reshape(-1, grad.shape[-1])  # (T, H) each

        def run_tile(tile: torch.Tensor, _at: slice) -> tuple[torch.Tensor]:
            return (ctx.run(tile[None])[0],)

        with ctx.restored():
            hidden_grad, grads = chunk_gradients(run_tile, rows, ctx.size, [grad_rows], ctx.parameters)
        assert hidden_grad is not None
        # For each argument of `forward`: forward, size, kept, parameters, views of them.
        return None, None, hidden_grad.view_as(hidden), None, *grads
