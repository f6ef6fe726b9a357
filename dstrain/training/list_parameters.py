"""Parameters of a recipe's model, counted on the meta device: `python -m dstrain.training.list_parameters [--base] < RECIPE`."""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import DstrainError


def list_parameters(config: RunConfig) -> list[tuple[str, list[int], bool]]:
    """Return (name, size, whether it is trained) of every parameter of the model that the task builds."""
    from dstrain.models.meta_init import meta_parameters
    from dstrain.tasks import make_task
    from dstrain.training.build_model import build_model_without_init

    with meta_parameters():
        model = build_model_without_init(make_task(config))
    return [(name, [*tensor.shape], tensor.requires_grad) for name, tensor in model.named_parameters()]


def list_base_parameters(model: ModelConfig) -> list[tuple[str, list[int], bool]]:
    """Return (name, size, whether it is trained) of every parameter of the model with its adapters, without its task.

    Needs neither tokenizer nor data.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    from dstrain.models.adapters import add_adapters
    from dstrain.models.load import read_config
    from dstrain.models.params import unwrap_peft

    config = read_config(model)
    classes: list[Any] = [AutoModelForImageTextToText] if hasattr(config, "vision_config") else []
    classes += [AutoModelForCausalLM, AutoModel]
    auto_class = next((one for one in classes if type(config) in one._model_mapping), classes[0])
    with torch.device("meta"):
        built = auto_class.from_config(config, trust_remote_code=model.trust_remote_code)
        if model.lora is not None:
            built = add_adapters(built, model.lora, (), seed=0)
    parameters = unwrap_peft(built).named_parameters()
    return [(name, [*tensor.shape], tensor.requires_grad) for name, tensor in parameters]


def main() -> int:
    """Read a resolved recipe from stdin, print one line of JSON. Returns the exit code. `--base`: without the task."""
    try:
        config = RunConfig.model_validate(yaml.safe_load(sys.stdin))
        rows = list_base_parameters(config.model) if "--base" in sys.argv[1:] else list_parameters(config)
    except DstrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
