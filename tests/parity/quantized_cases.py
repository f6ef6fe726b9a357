"""Worker functions of the tests of quantized weights in shards."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
from torch.distributed import barrier
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.loading import Watch, anonymous
from dstrain.config.schema import ModelConfig
from dstrain.data.loading.loader import make_batch
from dstrain.models.init_weights import load_init
from dstrain.models.load import load_model, read_config
from dstrain.models.params import build_param_groups, gathered, zero3_init
from dstrain.models.quantization import quantize_model
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from tests.parity.cases import Made, ds_config, made, tiny_task, world


def codes_and_scales(model: torch.nn.Module) -> dict[str, tuple[bytes, bytes, float]]:
    """Return layer -> its codes, its 8-bit scales and their mean. Collective."""
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "codes"):
            with gathered([layer.weight]):
                state = layer.weight.quant_state
                found[name] = layer.codes.numpy().tobytes(), state.absmax.numpy().tobytes(), float(state.offset)
    return found


def loaded(kind: str, path: str, dtype: str, precision: str, init: str | None = None) -> dict[str, Any]:
    """Return the codes of a quantized model of a folder, and its other weights in the run's precision. Collective."""
    model = _load(kind, path, dtype, precision, init)
    codes, others = codes_and_scales(model), {}
    with gathered(model.parameters()):
        for name, parameter in model.named_parameters():
            if not hasattr(parameter, "quant_state"):
                value = parameter.detach().to(torch.bfloat16 if precision == "bf16" else torch.float32)
                others[name] = value.float().numpy().copy()
    return {"codes": codes, "others": others, "tied": model.lm_head.weight is model.get_input_embeddings().weight}


def _load(kind: str, path: str, dtype: str, precision: str, init: str | None = None) -> Any:
    wanted = ModelConfig(path=path, dtype=dtype, quantize="nf4", lora={"rank": 4})
    with zero3_init(ds_config(kind, {"world_size": world().size, "precision": precision})):
        model = load_model(AutoModelForCausalLM, wanted, read_config(wanted), 3)
        if init is not None:
            load_init(model, init)
        quantize_model(model, "nf4")
    return model


def save_folder(folder: str, config: dict[str, Any], max_shard_size: str = "50GB") -> int:
    """Save a random model in bf16, in files of at most `max_shard_size`; return the bytes of its weights."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return sum(parameter.nbytes for parameter in model.parameters())


def load_peak(kind: str, first: str, path: str) -> int:
    """Return the most anonymous memory of this process while the model of `path` loads, in bytes above the start.

    `first`: a folder that is loaded before, for the memory that libraries keep. For new processes only. Blocks of malloc from 64 KiB on are
    returned to the system at once, as those of 32 MiB and more always are (man 3 mallopt). Collective.
    """
    mmap_threshold, libc = -3, ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 2**16)
    _load(kind, first, "bfloat16", "bf16")
    barrier()
    before = anonymous()
    with Watch() as watch:
        _load(kind, path, "bfloat16", "bf16")
    return watch.peak - before


def stored_bytes(run: Made) -> dict[str, int]:
    """Return the bytes of codes in this process between the steps, and those that all processes have together."""
    weights = [layer.weight for layer in run.model.modules() if hasattr(layer, "codes")]
    own = [getattr(weight, "ds_tensor", weight) for weight in weights]
    return {
        "own": sum(part.untyped_storage().nbytes() for part in own),
        "whole": sum((weight.quant_state.shape.numel() + 1) // 2 for weight in weights),
        "left": sum(weight.data.untyped_storage().nbytes() for weight in weights if hasattr(weight, "ds_tensor")),
    }


def quantized_model(
    task: str, kind: str, changes: dict[str, Any] | None = None, precision: str = "fp32"
) -> dict[str, Any]:
    """Return the quantized values of a run's model, and what this process holds of them."""
    run = made(task, kind, 1, changes, precision)
    dtypes = {str(parameter.dtype) for parameter in run.model.parameters()}
    return {"values": codes_and_scales(run.model), "bytes": stored_bytes(run), "dtypes": dtypes}


def kept_for_the_backward_pass(task: str, changes: dict[str, Any] | None = None) -> dict[str, int]:
    """Return how many gathered weights a forward pass has read, and how many of them are alive after it."""
    found = tiny_task(task, changes)
    ranks, optim = world(), found.recipe.optim
    config = ds_config("zero3", {"world_size": ranks.size})
    # No weight is small enough to be kept whole, none is gathered in advance, and none is kept for a second use.
    keys = ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    config["zero_optimization"] |= {f"stage3_{key}": 0 for key in keys}
    with zero3_init(config):
        module = build_train_module(found)
    engine = DeepSpeedEngine(module, build_param_groups(module.model, optim), optim, config, ranks)
    read: list[StorageWeakRef] = []
    for layer in module.model.modules():
        if hasattr(layer, "codes"):
            layer.register_forward_hook(
                lambda layer, *_: read.append(StorageWeakRef(layer.weight.data.untyped_storage())), prepend=True
            )
    batch = make_batch(found.examples("train"), found.collate, [ranks.rank], 0)
    engine.engine.train()
    total, _ = engine.engine(batch)
    gc.collect()
    alive = sum(not storage.expired() for storage in read)
    total.backward()
    return {"read": len(read), "alive": alive}
