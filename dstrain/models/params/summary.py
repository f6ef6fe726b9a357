"""Summary of a vision-language model's components: size, trained share, learning rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrain.config.schema import OptimConfig
from dstrain.models.params.components import COMPONENTS, components_by_name
from dstrain.models.params.groups import find_group_and_lr
from dstrain.models.params.zero3 import full_numel
from dstrain.units import format_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ComponentSummary:
    """Size and training settings of one component."""

    component: str
    num_parameters: int
    num_trainable: int
    peak_lrs: tuple[float, ...]
    """Peak learning rates of the trainable parameters, largest first."""

    def __str__(self) -> str:
        all_trained = self.num_trainable == self.num_parameters
        share = "all" if all_trained else f"{format_count(self.num_trainable)} of them"
        lrs = " and ".join(f"{lr:.3g}" for lr in self.peak_lrs)
        state = f"{share} trained at lr {lrs}" if self.num_trainable else "frozen"
        return f"{self.component:10} {format_count(self.num_parameters)} parameters, {state}"


def summarize_components(model: torch.nn.Module, optim: OptimConfig, lr_factor: float = 1.0) -> list[ComponentSummary]:
    """Return one summary per component; an empty list for a text-only model.

    `lr_factor` multiplies every rate (optim.scale_lr).
    """
    components, parameters = components_by_name(model), dict(model.named_parameters())
    summaries = []
    for component in COMPONENTS:
        names = [name for name, own in components.items() if own == component]
        if not names:
            continue
        trainable = [name for name in names if parameters[name].requires_grad]
        own_lrs = (find_group_and_lr(name, component, optim)[1] for name in trainable)
        lrs = {(optim.peak_lr if lr is None else lr) * lr_factor for lr in own_lrs}
        total, trained = (sum(full_numel(parameters[name]) for name in some) for some in (names, trainable))
        summaries.append(ComponentSummary(component, total, trained, tuple(sorted(lrs, reverse=True))))
    return summaries
