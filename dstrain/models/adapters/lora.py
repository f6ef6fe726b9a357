"""LoRA adapters on a model, through peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import LoraConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.gradient_checkpointing import limit_input_grads
from dstrain.models.quantization.library import preload_bitsandbytes

if TYPE_CHECKING:
    import torch
    from peft import PeftModel


def add_adapters(model: torch.nn.Module, lora: LoraConfig, heads: Sequence[str], seed: int) -> PeftModel:
    """Wrap the model with adapters initialized from the seed. All but them and the new `heads` is frozen.

    LoRA (Hu et al., arXiv 2106.09685, section 4.1): W x + alpha / rank * B A x, with B initially zero. DoRA (Liu et
    al., arXiv 2402.09353, eq. 5) also trains the norm of W's columns. Raises RecipeError where no module has a name in
    `lora.targets`. Collective under ZeRO-3.
    """
    import torch

    preload_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    module_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        use_dora=lora.dora,
        modules_to_save=[name for name in heads if name in module_names] or None,
    )
    # Right before peft draws the A matrices: nothing drawn earlier changes them.
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():  # transformers 6 renames is_gradient_checkpointing
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if not list(part.children())})
        problem = f"{lora.targets!r}: {str(error).split('.')[0]}"
        raise RecipeError(Fault("model.lora.targets", problem, f"known here: {', '.join(names)}")) from error
    limit_input_grads(model)
    return wrapped


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """Run the model (a PeftModel) without its adapters inside the context. Leaves `requires_grad` unchanged.

    peft's own `disable_adapter` makes every adapter trainable on exit, also those that `model.freeze` froze
    (peft/tuners/tuners_utils.py, `enable_adapters` and `set_adapter`).
    """
    saved = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with model.disable_adapter():
        yield
    for parameter, requires_grad in saved:
        parameter.requires_grad_(requires_grad)
