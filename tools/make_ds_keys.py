"""Write dstrain/ds_keys.json: every key that DeepSpeed accepts in its JSON, with its type.

    python tools/make_ds_keys.py

If DeepSpeed parses a block with a pydantic model, the model is read. If it parses by hand, the parser is run on a dict that
records which keys are looked up and with which default. So the table describes what DeepSpeed does, not its documentation.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import types
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

TABLE = Path(__file__).parents[1] / "dstrain" / "ds_keys.json"
_NAMES: dict[Any, str] = {kind: kind.__name__ for kind in (bool, int, float, str, list)}
_NAMES |= {tuple: "list", dict: "object", Path: "str"}


class Spy(dict):
    """A dict that records which keys are looked up, and with which default."""

    asked: ClassVar[dict[str, Any]] = {}

    def get(self, key: str, default: Any = None) -> Any:
        Spy.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        Spy.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def items(self) -> Any:
        return dict(self).items()


def asked_by(parse: Callable[[Spy], Any], **given: Any) -> dict[str, Any]:
    """Return key -> default, as a hand-written parser looks them up."""
    Spy.asked = {}
    parse(Spy(given))
    return dict(Spy.asked)


def of_value(default: Any) -> dict[str, Any]:
    """Return the spec of a key derived from its default."""
    if default is None:
        return {"type": "any"}
    return {"type": _NAMES.get(type(default), "any"), "default": plain(default)}


def of_annotation(annotation: Any) -> dict[str, Any]:
    """Return the spec of a key derived from its type annotation."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [of_annotation(arg) for arg in args if arg is not type(None)]
        merged = {key: value for kind in kinds for key, value in kind.items()}
        merged["type"] = "|".join(dict.fromkeys(kind["type"] for kind in kinds))
        return merged | ({"null": True} if type(None) in args else {})
    if origin is typing.Literal:
        return {"type": _NAMES[type(args[0])], "values": list(args)}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        values = list(dict.fromkeys(member.value for member in annotation))
        return {"type": _NAMES.get(type(values[0]), "any"), "values": values}
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return {"type": "object", "keys": of_model(annotation)}
    return {"type": _NAMES.get(origin or annotation, "any")}


def of_field(field: Any) -> dict[str, Any]:
    """Return type, bounds, default and successor of a pydantic field."""
    key = of_annotation(field.annotation)
    for bound in field.metadata:
        for attribute, name in (("ge", "min"), ("gt", "above"), ("le", "max"), ("lt", "below")):
            if getattr(bound, attribute, None) is not None:
                key[name] = getattr(bound, attribute)
    if key["type"] != "object" and not field.is_required() and field.default_factory is None:
        key["default"] = plain(field.default)
    extra = field.json_schema_extra or {}
    if extra.get("deprecated"):
        key["deprecated"] = extra["new_param"]
    return key


def of_model(model: Any) -> dict[str, Any]:
    """Return key -> spec of a pydantic model. A field's name is accepted in addition to its alias."""
    keys = {}
    for name, field in model.model_fields.items():
        key = of_field(field)
        if str(key.get("deprecated", "")) == "gather_16bit_weights_on_model_save":
            key["deprecated"] = "stage3_gather_16bit_weights_on_model_save"
        if field.alias:
            keys[name] = key | {"deprecated": field.alias}
        keys[field.alias or name] = key
    return keys


def plain(value: Any) -> Any:
    """Return a default as JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (bool, float, str, list, dict, type(None))) else str(value)


def block(defaults: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
    """Return a block that is parsed by hand: recorded keys, and additions that the parser does not reveal."""
    keys = {name: of_value(default) for name, default in defaults.items()}
    return {"type": "object", "keys": keys | {name: keys.get(name, {}) | key for name, key in more.items()}}


def hand_parsed() -> dict[str, Any]:
    """Return the blocks that DeepSpeed parses without a model; none of them is strict in DeepSpeed."""
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import config as ds
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig

    dtypes = {"type": "str", "null": True, "values": words(ds.DtypeEnum)}
    strings = {"type": "list", "of": "str"}
    autocast = asked_by(lambda spy: ds.get_torch_autocast_enabled({"torch_autocast": spy}))
    autocast |= asked_by(lambda spy: ds.get_torch_autocast_dtype({"torch_autocast": spy}))
    autocast |= asked_by(lambda spy: ds.get_lower_precision_safe_modules({"torch_autocast": spy}))
    activations = asked_by(lambda spy: DeepSpeedActivationCheckpointingConfig({"activation_checkpointing": spy}))
    return {
        "activation_checkpointing": block(activations, number_checkpoints={"type": "int", "null": True, "above": 0}),
        "aio": block(
            asked_by(lambda spy: ds.get_aio_config({"aio": spy})),
            **{key: {"above": 0} for key in ("block_size", "queue_depth", "intra_op_parallelism")},
        ),
        "checkpoint": checkpoint_block(),
        "data_types": {
            "type": "object",
            "keys": {
                "grad_accum_dtype": dtypes,
                "param_dtype": dtypes,
                "buffer_dtype": dtypes,
                "keep_in_fp32_modules": {"type": "list", "of": "str", "default": "auto"},
            },
        },
        "flops_profiler": block(
            asked_by(lambda spy: DeepSpeedFlopsProfilerConfig({"flops_profiler": spy})),
            output_file={"type": "str", "null": True},
        ),
        "torch_autocast": block(autocast, dtype=dtypes | {"null": False}, lower_precision_safe_modules=strings),
    } | refused_blocks()


def checkpoint_block() -> dict[str, Any]:
    """Return `checkpoint`, which two parsers read; their key names are in two constants files."""
    from deepspeed.runtime import config as ds
    from deepspeed.runtime import constants as names
    from deepspeed.runtime.model_checkpointing import config as writer
    from deepspeed.runtime.model_checkpointing import constants as units

    asked = asked_by(lambda spy: writer.get_checkpoint_config({"checkpoint": spy}))
    asked |= asked_by(ds.get_checkpoint_tag_validation_mode) | asked_by(ds.get_checkpoint_parallel_write_pipeline)
    asked |= {names.LOAD_UNIVERSAL_CHECKPOINT: False, names.USE_NODE_LOCAL_STORAGE_CHECKPOINT: False}
    inner = block(
        asked_by(lambda spy: writer.get_checkpoint_writer_config({"writer": spy})),
        type={"type": "str", "any_case": True, "values": list(units.CHECKPOINT_WRITER_TYPES)},
        data_parallel={
            "type": "str",
            "null": True,
            "any_case": True,
            "values": list(units.CHECKPOINT_DATA_PARALLEL_UNITS),
        },
    )
    return block(
        asked,
        tag_validation={"any_case": True, "values": list(names.CHECKPOINT_TAG_VALIDATION_MODES)},
        parallel_write=block({names.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE: False}),
        writer=inner | {"null": True},
    )


def refused_blocks() -> dict[str, Any]:
    """Return the blocks that DeepSpeed supports and dstrain refuses, so that the refusal can give a reason."""
    from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
    from deepspeed.runtime import config as ds

    pipeline = {name: of_value(default) for name, default in ds.get_pipeline_config({}).items()}
    hints = typing.get_type_hints(AutoEPConfig)
    experts = {f.name: of_annotation(hints[f.name]) for f in dataclasses.fields(AutoEPConfig) if f.init}
    free = {"type": "object"}
    return {
        "autotuning": block(asked_by(lambda spy: DeepSpeedAutotuningConfig({"autotuning": spy}))),
        "data_efficiency": {"type": "object", "keys": nested(ds.get_data_efficiency_config({"data_efficiency": {}}))},
        "datastates_ckpt": {"type": "any"},
        "expert_parallel": {"type": "object", "keys": experts},
        "optimizer": {
            "type": "object",
            "keys": {"type": {"type": "str"}, "params": free, "legacy_fusion": {"type": "bool", "default": False}},
        },
        "pipeline": {"type": "object", "keys": pipeline},
        "scheduler": {"type": "object", "keys": {"type": {"type": "str"}, "params": free}},
        "sequence_parallel_size": {"type": "int", "above": 0},  # read only after torch.distributed is initialized
    }


def nested(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of defaults as a tree of keys."""
    return {
        name: {"type": "object", "keys": nested(value)} if isinstance(value, dict) and value else of_value(value)
        for name, value in defaults.items()
    }


def words(enum: Iterable[Any]) -> list[str]:
    """Return the spellings of DeepSpeed's DtypeEnum that name a floating-point type."""
    return [word for member in enum for word in member._all_values if isinstance(word, str) and "int" not in word]


def modelled() -> dict[str, Any]:
    """Return the blocks that DeepSpeed parses with a pydantic model."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
    }
    blocks: dict[str, Any] = {name: {"type": "object", "keys": of_model(model)} for name, model in models.items()}
    for name, bound in (("loss_scale", "min"), ("loss_scale_window", "above"), ("min_loss_scale", "above")):
        blocks["fp16"]["keys"][name][bound] = 0  # checked by validators, not by the field
    blocks["bfloat16"] = blocks["bf16"] | {"deprecated": "bf16"}
    timers = {"throughput": {"type": "object", "keys": of_model(DeepSpeedThroughputTimerConfig)}}
    return blocks | of_model(DeepSpeedMonitorConfig) | {"timers": {"type": "object", "keys": timers}}


def scalars() -> dict[str, Any]:
    """Return top-level keys whose default does not reveal their type."""
    from deepspeed.utils.logging import log_levels

    count = {"type": "int", "null": True, "above": 0}
    dtype = {"type": "str", "null": True, "any_case": True, "values": ["fp32", "fp16", "bf16"]}
    return {
        "communication_data_type": dtype,
        "seq_parallel_communication_data_type": dtype,
        "gradient_accumulation_steps": count,
        "train_batch_size": count,
        "train_micro_batch_size_per_gpu": count,
        "steps_per_print": count,
        "vocabulary_size": count,
        "log_level": {"type": "str", "null": True, "any_case": True, "values": list(log_levels)},
        "gradient_allreduce_op": {"type": "str", "any_case": True, "values": ["mean", "sum"], "default": "mean"},
        "gradient_clipping": {"type": "float", "min": 0, "default": 1.0},
        "gradient_predivide_factor": {"type": "float", "above": 0, "default": 1.0},
    }


def make() -> dict[str, Any]:
    """Return the complete table."""
    import deepspeed
    from deepspeed.runtime import config as ds

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    asked = asked_by(ds.DeepSpeedConfig, train_micro_batch_size_per_gpu=1)
    removed = {*ds._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    keys = {name: of_value(default) for name, default in asked.items() if name not in removed}
    keys |= modelled() | hand_parsed() | scalars()
    removed |= {f"zero_optimization.{name}" for name in ds._REMOVED_ZERO_CONFIG_KEYS}
    version = ".".join(deepspeed.__version__.split(".")[:2])
    return {"deepspeed": version, "removed": sorted(removed), "keys": keys}


def main() -> None:
    text = json.dumps(make(), indent=1, sort_keys=True) + "\n"
    TABLE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{TABLE}: {text.count(chr(10))} lines\n")


if __name__ == "__main__":
    main()
