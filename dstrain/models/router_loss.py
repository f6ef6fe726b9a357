"""The auxiliary loss of a mixture of experts' router, which balances the load of the experts, as part of a task's loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRIC = "aux_loss"
_PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")


def router_loss_coefficient(config: Any, coefficient: float | None = None) -> float:
    """Return the factor of the router's loss; 0 where the model has none, or does not ask for it.

    `coefficient`: model.router_aux_loss_coef of the recipe; None: the model config's, where its `output_router_logits` is true.
    """
    text = config.get_text_config()
    if coefficient is not None:
        return coefficient
    return (
        float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
        if getattr(text, "output_router_logits", False)
        else 0.0
    )


def check_router_loss(model: PreTrainedModel, coefficient: float | None) -> None:
    """Raise RecipeError where the router's loss is asked for and the model's family does not compute one."""
    text = model.config.get_text_config()
    wanted = bool(coefficient) or (coefficient is None and getattr(text, "output_router_logits", False))
    if not wanted or _has_router_loss(model, coefficient):
        return
    key = "model.router_aux_loss_coef" if coefficient is not None else "model.config.output_router_logits"
    problem = f"asks for the loss of a router, and transformers computes none for a {text.model_type} model"
    fix = (
        "leave it out"
        if coefficient is not None
        else "set it to false in the model's config, or model.router_aux_loss_coef: 0"
    )
    raise RecipeError(Fault(key, problem, fix))


def _has_router_loss(model: torch.nn.Module, coefficient: float | None) -> bool:
    """Return whether the loss can be computed: a function of the usual form, a decoder that it reads, and its factor."""
    config: Any = model.config
    text, function = config.get_text_config(), _find_loss_function(model)
    if function is None or _count_experts(text) is None:
        return False
    if coefficient is None and getattr(text, "router_aux_loss_coef", None) is None:  # JetMoE's has another name
        return False
    return any(_is_decoder(module, text.model_type) for module in model.modules())


def find_router_loss(model: torch.nn.Module) -> tuple[Callable[..., Any], tuple[int, int]]:
    """Return transformers' function of the model's family, and its numbers of experts of a layer and of a token."""
    config: Any = model.config
    found, counts = _find_loss_function(model), _count_experts(config.get_text_config())
    assert found is not None, "check_router_loss"
    assert counts is not None, "check_router_loss"
    return found, counts


def _find_loss_function(model: torch.nn.Module) -> Callable[..., Any] | None:
    """Return transformers' function of the model's family: Fedus et al. (arXiv 2101.03961), equations 4 to 6."""
    for module in model.modules():
        found = getattr(sys.modules.get(type(module).__module__), "load_balancing_loss_func", None)
        # Doge's has a further parameter.
        if found is not None and tuple(inspect.signature(found).parameters) == _PARAMETERS:
            return found
    return None


def _count_experts(text_config: Any) -> tuple[int, int] | None:
    """Return the numbers of experts of a layer and of a token."""
    experts = getattr(text_config, "num_local_experts", None) or getattr(text_config, "num_experts", None)
    used = getattr(text_config, "num_experts_per_tok", None)
    return (int(experts), int(used)) if experts and used else None


class RouterLoss:
    """Computes the router's loss of the forward passes that a task's loss makes.

    It is a mean over the tokens of the sequences of a forward pass, without padding, as in transformers and TRL: this
    term of the loss, alone, depends on how a step is split into micro-batches; not on packing and shared prefixes.
    """

    def __init__(self, model: torch.nn.Module, coefficient: float) -> None:
        """Ask the model's decoder for the router's logits, and read them after each of its forward passes."""
        config: Any = model.config
        text = config.get_text_config()
        self.coefficient = coefficient
        self._function, self._counts = find_router_loss(model)
        self._model = model
        self._losses: list[torch.Tensor] | None = None
        self._dummy_rows = 0
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
        mask, hidden, layout = kwargs.get("attention_mask"), output.last_hidden_state, kwargs.get("packed_groups")
        if layout is not None:
            # Packed rows have a placeholder as their mask. The function takes weights too: a token of a shared prefix
            # counts as often as in rows that share nothing.
            mask = layout.sequence_counts(hidden.device).unsqueeze(0)
        usable = isinstance(mask, torch.Tensor) and mask.shape == hidden.shape[:2]
        if isinstance(mask, torch.Tensor) and usable and self._dummy_rows:  # they come last
            mask = torch.cat([mask[: -self._dummy_rows], torch.zeros_like(mask[-self._dummy_rows :])])
        self._losses.append(self._function(tuple(logits), *self._counts, mask if usable else None))

    @contextmanager
    def collect(self, dummy_rows: int = 0) -> Iterator[list[torch.Tensor]]:
        """Context that collects the router's loss of each forward pass inside, without dummy rows, as scalars."""
        losses: list[torch.Tensor] = []
        self._losses, self._dummy_rows = losses, dummy_rows
        try:
            with router_logits_disabled(self._model):
                yield losses
        finally:
            self._losses = None


@contextmanager
def router_logits_disabled(model: torch.nn.Module) -> Iterator[None]:
    """Set `output_router_logits` of the model's config to false inside.

    The model around the decoder would compute the loss itself, from the mask of its arguments: that of a packed row is
    a placeholder, and that of a step of generation has more tokens than the logits. Both would fail.
    """
    config = getattr(model, "config", None)
    both = (config, getattr(config, "text_config", None))
    asking: list[Any] = [one for one in both if getattr(one, "output_router_logits", None) is True]
    for one in asking:
        one.output_router_logits = False
    try:
        yield
    finally:
        for one in asking:
            one.output_router_logits = True


def _is_decoder(module: torch.nn.Module, model_type: str) -> bool:
    """Return whether the module is the text model without a head, which gives the last hidden states."""
    config: Any = getattr(module, "config", None)
    has_layers = isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
    return has_layers and getattr(config, "model_type", None) == model_type and hasattr(config, "output_router_logits")
