"""Parameters of a recipe's model, counted on the meta device: `python -m dstrain.train.list_parameters < RECIPE`."""

from __future__ import annotations

import json
import sys

import yaml

from dstrain.config.schema import RunConfig
from dstrain.errors import DstrainError


def list_parameters(config: RunConfig) -> list[tuple[str, list[int], bool]]:
    """Return (name, size, whether it is trained) of every parameter of the model that the task builds."""
    from dstrain.models.meta_init import meta_parameters
    from dstrain.tasks import make_task
    from dstrain.train.build_model import build_model_without_init

    with meta_parameters():
        model = build_model_without_init(make_task(config))
    return [(name, [*tensor.shape], tensor.requires_grad) for name, tensor in model.named_parameters()]


def main() -> int:
    """Read a resolved recipe from stdin, print one line of JSON. Returns the exit code."""
    try:
        rows = list_parameters(RunConfig.model_validate(yaml.safe_load(sys.stdin)))
    except DstrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
