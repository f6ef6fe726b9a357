"""Which modules of transformers' families run with fused kernels, and the difference that this makes.

    TRITON_INTERPRET=1 python -m benchmarks.kernel_families --to docs/measurements/kernels.md [--families llama,qwen3]

Every family of causal language models of which a tiny model can be built from common settings, and the vision-language
models of the tests, in fp32, computed by Triton's interpreter: a forward and a backward pass, eager and fused.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import format_certificate, table, write_table
from tests.model_families import BASE, FAMILIES, MORE_FAMILIES, family
from tools.triton_interpreter import use_interpreter

SETTINGS: dict[str, Any] = {
    **BASE, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "n_layer": 2,
    "n_head": 4, "n_embd": 32, "n_positions": 64, "max_position_embeddings": 64, "d_model": 32, "ffn_dim": 48,
    "n_inner": 48, "num_layers": 2, "rotary_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "sliding_window": 16,
}  # fmt: skip
"""Settings of tiny models; a family gets those that it knows."""
MOST_PARAMETERS = 4e6
"""Larger models have parts that these settings do not make small."""
SECONDS = 240


def build_config(model_type: str) -> Any:
    """Return the config of a tiny model. Raises any error of a family whose settings are others."""
    from transformers import AutoConfig

    if model_type in FAMILIES or model_type in MORE_FAMILIES:
        values = family(model_type)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    values = {name: value for name, value in SETTINGS.items() if name in known}
    if "kv_lora_rank" in values:  # whose heads have a width of their own
        values |= {"num_key_value_heads": 4}
        values.pop("head_dim", None)
    return AutoConfig.for_model(model_type, **values)


def build_text_model(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model and its inputs."""
    import torch
    from transformers import AutoModelForCausalLM

    config = build_config(model_type)
    with torch.device("meta"):
        size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:g} parameters")
    torch.manual_seed(0)
    ids = torch.randint(0, 300, (1, 11))
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def build_vision_model(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a tiny vision-language model and its inputs, with images."""
    import torch

    from dstrain.tasks.common.forward import vision_inputs
    from tests.unit.models.attention.packed_images import config_and_processor, forms, made

    config, processor = config_and_processor(kind)
    batch = forms(processor, ["what is 0 it? a fox", "a dog 1"], [[0], [1]]).padded
    torch.manual_seed(0)
    model = made(config)
    ids = batch.tensors["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": batch.tensors["attention_mask"], "labels": ids, "use_cache": False}
    return model, inputs | vision_inputs(model, batch)


def compare(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what of the model is fused, and how far loss and gradients are from the eager ones."""
    import torch

    from dstrain.models.fused_kernels import fuse_kernels

    random = torch.Generator().manual_seed(2)
    model.train()
    for parameter in model.parameters():  # ones and zeros would hide what a norm's weight does
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=random)

    def run() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        torch.manual_seed(3)  # of dropout
        loss = model(**inputs).loss
        loss.backward()
        return float(loss.detach()), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    wanted_loss, wanted = run()
    wanted = {name: grad.clone() for name, grad in wanted.items()}
    report = fuse_kernels(model)
    loss, grads = run()
    assert grads.keys() == wanted.keys()
    apart = sum(float((grads[name] - wanted[name]).double().square().sum()) for name in wanted) ** 0.5
    size = sum(float(grad.double().square().sum()) for grad in wanted.values()) ** 0.5
    return {
        "fused": "; ".join(f"{name} ({count})" for name, count in sorted(report.fused.items())),
        "eager": "; ".join(f"{name}: {reason}" for name, reason in sorted(report.eager.items())),
        "loss": f"{abs(loss - wanted_loss):.0e}",
        "gradients": f"{apart / size:.0e}",
    }


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside after this time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def iter_families() -> Iterator[tuple[str, Any]]:
    """Yield the name of each family, and the function that builds its tiny model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.unit.models.attention.packed_images import KINDS

    for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}):
        yield name, build_text_model
    for name in KINDS:
        yield name, build_vision_model


def try_family(name: str, build: Any) -> dict[str, Any]:
    """Return the row of a family, {} where its tiny model cannot be built or run."""
    try:
        with time_limit(SECONDS):
            model, inputs = build(name)
            model(**inputs).loss.backward()
    except Exception:  # of the family's code, with settings that are not its own
        return {}
    try:
        with time_limit(SECONDS):
            return {"family": name, **compare(model, inputs)}
    except Exception as error:
        failure = f"FAILED: {type(error).__name__}: {error}"[:200]
        return {"family": name, "fused": failure, "eager": "", "loss": "", "gradients": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    parser.add_argument("--families", default=None, help="only these, separated by commas")
    options = parser.parse_args()
    use_interpreter()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = None if options.families is None else options.families.split(",")
    rows: list[dict[str, Any]] = []
    others: dict[str, list[str]] = {"Nothing to fuse": [], "Not built": [], "Not reached": []}
    families = [(name, build) for name, build in iter_families() if wanted is None or name in wanted]
    is_stopped = False
    for name, build in families:
        try:
            row = {} if is_stopped else try_family(name, build)
        except KeyboardInterrupt:  # the table has what was reached
            is_stopped, row = True, {}
        print(row or name, flush=True)
        if is_stopped:
            others["Not reached"].append(name)
        elif not row:
            others["Not built"].append(name)
        elif row["fused"] or row["eager"]:
            rows.append(row)
        else:
            others["Nothing to fuse"].append(name)
    record = format_certificate()
    lists = [f"{title} ({len(names)}): {', '.join(names)}." for title, names in others.items() if names]
    listed = "\n\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in lists)
    page = f"{record}\n\n{len(rows)} families:\n\n{table(rows)}\n\n{listed}"
    write_table(page, "benchmarks.kernel_families", options.to)


if __name__ == "__main__":
    main()
