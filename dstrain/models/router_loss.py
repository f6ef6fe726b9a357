"""The auxiliary loss of a mixture of experts' router, which balances the load of the experts, as part of a task's loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRIC = "aux_loss"


def router_loss_coefficient(config: Any, asked: float | None = None) -> float:
    """Return the factor of the router's loss; 0 where the model has none, or does not ask for it.

    `asked`: model.router_aux_loss_coef of the recipe; None: the model config's, where its `output_router_logits` is true.
    """
    text = config.get_text_config()
    if asked is not None:
        return asked
    return (
        float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
        if getattr(text, "output_router_logits", False)
        else 0.0
    )


def check_router_loss(model: PreTrainedModel, asked: float | None) -> None:
    """Raise RecipeError where the router's loss is asked for and the model's family does not compute one."""
    text = model.config.get_text_config()
    wanted = asked is not None or getattr(text, "output_router_logits", False)
    if not wanted or (_find_loss_function(model) is not None and _count_experts(text) is not None):
        return
    key = "model.router_aux_loss_coef" if asked is not None else "model.config.output_router_logits"
    problem = f"asks for the loss of a router, and transformers computes none for a {text.model_type} model"
    fix = "leave it out" if asked is not None else "set it to false in the model's config.json, or in model.config"
    raise RecipeError(Fault(key, problem, fix))


def _find_loss_function(model: torch.nn.Module) -> Callable[..., Any] | None:
    """Return transformers' function of the model's family: Fedus et al. (arXiv 2101.03961), equations 4 to 6."""
    for module in model.modules():
        found = getattr(sys.modules.get(type(module).__module__), "load_balancing_loss_func", None)
        if found is not None:
            return found
    return None


def _count_experts(text_config: Any) -> tuple[int, int] | None:
    """Return the numbers of experts of a layer and of a token."""
    experts = getattr(text_config, "num_local_experts", None) or getattr(text_config, "num_experts", None)
    used = getattr(text_config, "num_experts_per_tok", None)
    return (int(experts), int(used)) if experts and used else None


class RouterLoss:
    """Computes the router's loss of the forward passes that a task's loss makes.

    It is a mean over the tokens of a forward pass, without padding, as in transformers and TRL: this term of the loss,
    alone, depends on how a step is split into micro-batches.
    """

    def __init__(self, model: torch.nn.Module, coefficient: float) -> None:
        """Ask the model's decoder for the router's logits, and read them after each of its forward passes."""
        config: Any = model.config
        text = config.get_text_config()
        found, counts = _find_loss_function(model), _count_experts(text)
        assert found is not None, "check_router_loss"
        assert counts is not None, "check_router_loss"
        self.coefficient, self._function, self._counts = coefficient, found, counts
        self._losses: list[torch.Tensor] | None = None
        model.needs_padding_mask = True  # read by `needs_attention_mask`
        self._decoders = [module for module in model.modules() if _is_decoder(module, text.model_type)]
        for module in self._decoders:
            module.register_forward_pre_hook(self._ask_for_logits, with_kwargs=True)
            module.register_forward_hook(self._read_logits, with_kwargs=True)

    def _ask_for_logits(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        return None if self._losses is None else (args, {**kwargs, "output_router_logits": True})

    def _read_logits(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        if self._losses is None or not logits or not torch.is_grad_enabled():
            return
        mask, hidden = kwargs.get("attention_mask"), output.last_hidden_state
        # Packed rows have no padding, and a mask of another form or none.
        usable = isinstance(mask, torch.Tensor) and mask.shape == hidden.shape[:2]
        self._losses.append(self._function(tuple(logits), *self._counts, mask if usable else None))

    @contextmanager
    def collect(self) -> Iterator[list[torch.Tensor]]:
        """Context that collects the router's loss of each forward pass inside, as scalars."""
        losses: list[torch.Tensor] = []
        self._losses = losses
        # The model around the decoder would compute it too, from a mask that packed rows do not have.
        asked = [(module.config, module.config.output_router_logits) for module in self._decoders]
        for config, _ in asked:
            config.output_router_logits = False
        try:
            yield losses
        finally:
            self._losses = None
            for config, value in asked:
                config.output_router_logits = value


def _is_decoder(module: torch.nn.Module, model_type: str) -> bool:
    """Return whether the module is the text model without a head, which gives the last hidden states."""
    config: Any = getattr(module, "config", None)
    has_layers = isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
    return has_layers and getattr(config, "model_type", None) == model_type and hasattr(config, "output_router_logits")
