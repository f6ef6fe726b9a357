"""A transformers model, loaded or made from scratch, the same at every ZeRO stage."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError, suggest_name
from dstrain.models.adapters.load import merge_adapter
from dstrain.models.folder.adapter_config import read_adapter, resolve_base_model
from dstrain.models.folder.hub_code import check_hub_code
from dstrain.models.folder.location import check_local_folder
from dstrain.models.folder.tokenizer_files import find_tokenizer_files
from dstrain.models.padding import clear_padding_idx
from dstrain.models.weights.check_files import has_weights
from dstrain.models.weights.load_report import load_report_disabled

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

MISSING_MODEL = Fault("model", "has neither path nor config", "set model.path, or model.config to start anew")


def read_config(model: ModelConfig) -> PretrainedConfig:
    """The model's transformers config. Raises RecipeError where it cannot be had."""
    from transformers import AutoConfig

    if model.path is not None:
        base = resolve_base_model(model).path or ""
        config = load_pretrained(AutoConfig, base, "model.path", model.trust_remote_code)
        if faults := check_hub_code(config, base, "model.path", model.trust_remote_code):
            raise RecipeError(faults)
        return config
    if model.config is None:
        raise RecipeError(MISSING_MODEL)
    values = dict(model.config)
    kind = str(values.pop("model_type"))
    try:
        default = AutoConfig.for_model(kind)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        near = suggest_name(kind, [*CONFIG_MAPPING_NAMES])  # hundreds, where none is near
        mend = near if near.startswith("did you mean") else "take the one in the config.json of a model of its kind"
        raise RecipeError(Fault("model.config.model_type", f"'{kind}' is none of transformers' models", mend)) from None
    known = {*default.to_dict(), *default.attribute_map}
    faults = [
        Fault(f"model.config.{key}", f"is no setting of a {kind} model", suggest_name(key, sorted(known)))
        for key in values
        if key not in known
    ]
    if faults:
        raise RecipeError(faults)
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers checks some values itself, and trips over others
        raise RecipeError(Fault("model.config", _error_reason(error), "correct the value")) from error


def read_tokenizer(name: str, key: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder or on the hub. Raises RecipeError where it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return load_pretrained(AutoTokenizer, name, key, trust_remote_code)
    except RecipeError as error:
        if not Path(name).expanduser().is_dir() or "trust_remote_code" in str(error):
            raise
        cause = error.__cause__
        reason = _error_reason(cause) if isinstance(cause, Exception) else "unknown"
        if not find_tokenizer_files(Path(name).expanduser()):
            mend = "set model.tokenizer to a folder or hub id that has one"
            raise RecipeError(Fault(key, f"there is no tokenizer in '{name}'", mend)) from error
        mend = "replace its tokenizer files, or set model.tokenizer to a folder or hub id that has whole ones"
        raise RecipeError(Fault(key, f"the tokenizer in '{name}' cannot be read ({reason})", mend)) from error


def load_pretrained(auto_class: Any, name: str, key: str, trust_remote_code: bool) -> Any:
    """What one of transformers' Auto classes makes of a folder or a hub id. Raises RecipeError for the recipe's `key`."""
    place = str(Path(name).expanduser()) if check_local_folder(name, key) else name
    try:
        return auto_class.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # its own checks, and whatever a config that cannot be trips over
        reason = _error_reason(error)
        if "trust_remote_code" in str(error):
            mend = "add --set model.trust_remote_code=true if you trust the Python that comes with it"
        elif "torchvision" in str(error).lower():
            reason = reason.partition(". ")[0]  # what follows is where to find it for every system
            mend = "install torchvision (pip install torchvision), which a processor with a part for videos needs"
        else:
            mend = "give a folder that transformers can load, or a hub id that this machine can reach"
        raise RecipeError(Fault(key, f"'{name}' cannot be loaded ({reason})", mend)) from error


def _error_reason(error: Exception) -> str:
    """What a library says of a config in one line; the kind of error too where it did not mean to say anything."""
    from huggingface_hub.errors import StrictDataclassError

    if isinstance(error, (OSError, ValueError)) and str(error).strip():
        return str(error).strip().splitlines()[0]
    words = " ".join(str(error).split())
    return words if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: {words}"


def check_vocab_size(model: ModelConfig, config: PretrainedConfig, tokenizer_size: int, is_multimodal: bool) -> None:
    """Raise RecipeError where the tokenizer has more entries than the model."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None or tokenizer_size <= size:
        return
    inside = "text_config." if is_multimodal else ""
    where = f"model.config.{inside}vocab_size" if model.config else "model.tokenizer"
    problem = f"the tokenizer has {tokenizer_size} entries, the model {size}"
    raise RecipeError(Fault(where, problem, "give the model at least as many"))


def load_model(auto_class: Any, model: ModelConfig, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The model with weights from `model.path`, or drawn from `seed`.

    Weights that the files lack (a new head) are drawn from the seed as well. Inside `sharded_construction`
    the parameters come in shards, with the same values as without. Collective there. Inside `no_values` no
    weights are read.
    """
    import torch

    from dstrain.models.weights.meta_init import allow_random_init, is_meta_init

    settings = _model_kwargs(model)
    dtype, base = getattr(torch, model.dtype or "float32"), resolve_base_model(model).path or ""
    torch.manual_seed(seed)
    if model.path is None:
        made = _init_from_scratch(auto_class, config, dtype, settings)
    elif not is_meta_init() and not has_weights(Path(base).expanduser()) and allow_random_init(base):
        made = _init_from_scratch(auto_class, config, dtype, settings)
        _load_generation_config(made, base)
    elif is_meta_init():
        made = auto_class.from_config(config, dtype=dtype, **settings)
        _load_generation_config(made, base)
    else:
        made = _load_from_files(auto_class, model, config, {"dtype": dtype, **settings})
    clear_padding_idx(made)
    return made


def _load_from_files(
    auto_class: Any, model: ModelConfig, config: PretrainedConfig, model_kwargs: Mapping[str, Any]
) -> PreTrainedModel:
    """The weights of a folder or of the hub, with an adapter merged into them where the folder is one. Raises RecipeError."""
    adapter, name = read_adapter(model.path), resolve_base_model(model).path or ""
    try:
        with load_report_disabled():
            made = auto_class.from_pretrained(str(Path(name).expanduser()), config=config, **model_kwargs)
    except RuntimeError as error:
        if "mismatched" not in str(error):
            raise
        problem = f"weights of '{name}' have other shapes than its config says"
        raise RecipeError(Fault("model.path", problem, "download the model again")) from error
    return made if adapter is None else merge_adapter(made, adapter)


def build_meta_model(auto_class: Any, model: ModelConfig, config: PretrainedConfig) -> PreTrainedModel:
    """The model's parts and shapes, without memory for its weights. Raises RecipeError where it cannot be built."""
    import torch

    try:
        with torch.device("meta"):
            return auto_class.from_config(copy.deepcopy(config), **_model_kwargs(model))
    except RecipeError:
        raise
    except Exception as error:  # whatever the family's code trips over
        key, mend = ("model.path", "name another model") if model.path else ("model.config", "correct the value")
        if isinstance(error, ImportError) and model.attention != "auto":
            key, mend = "model.attention", "install what it needs, or take sdpa or eager"
        raise RecipeError(Fault(key, f"the model cannot be built ({_error_reason(error)})", mend)) from error


def _model_kwargs(model: ModelConfig) -> dict[str, Any]:
    """What a model is built with beside its config."""
    own = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    return {"trust_remote_code": model.trust_remote_code, **own}


def _init_from_scratch(
    auto_class: Any, config: PretrainedConfig, dtype: Any, model_kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Weights drawn module by module in one fixed order.

    transformers draws torch's default weights first and its own afterwards, but under ZeRO-3 only its own:
    leaving out the first makes the numbers equal at every stage. In 16 bits other numbers would be drawn than
    DeepSpeed has after casting: they are drawn in 32 and cast. (Under ZeRO-3 DeepSpeed draws in 16 bits itself.)
    """
    import torch
    from transformers import initialization
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return auto_class.from_config(config, dtype=dtype, **model_kwargs)
    with initialization.no_init_weights():
        made = auto_class.from_config(config, dtype=torch.float32, **model_kwargs)
    made.initialize_weights()
    made.tie_weights()
    if dtype != torch.float32:
        for tensor in made.state_dict(keep_vars=True).values():  # what is not saved (rotary frequencies) stays exact
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        made.config.dtype = dtype
    return made


def _load_generation_config(model: PreTrainedModel, name: str) -> None:
    """Have a model that was built of its config generate as its folder says, as `from_pretrained` has it."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    folder = str(Path(name).expanduser())
    try:
        found = GenerationConfig.from_pretrained(folder)
    except OSError:  # it has none: then it follows from the model's config
        found = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
    model.generation_config = found


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, where the family supports it."""
    if getattr(model, "supports_gradient_checkpointing", False):
        with warnings.catch_warnings():  # transformers 6 will call it activation_checkpointing_enable
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def offload_activation_checkpoints(model: PreTrainedModel | torch.nn.Module, pin_memory: bool) -> int:
    """Keep what recomputation starts from, the input of each layer, in host memory. Returns how many modules do so.

    torch's checkpoint saves its inputs before its own hooks are set, so hooks around it get the inputs and nothing else
    (torch/utils/checkpoint.py, _NoopSaveInputs). Call it after `switch_on_checkpointing`. `pin`: in page-locked memory, which is
    copied beside the computation. Raises RecipeError where no module recomputes.
    """
    import torch

    def offload_inputs(checkpoint_func: Any) -> Any:
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
                return checkpoint_func(*args, **kwargs)

        return checkpoint

    found = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    found = [module for module in found if hasattr(module, "_gradient_checkpointing_func")]
    if not found:
        problem = "the model recomputes no layer, so there is nothing to keep in host memory"
        raise RecipeError(Fault("activation_checkpointing.cpu_checkpointing", problem, "remove it from the preset"))
    for module in found:
        module._gradient_checkpointing_func = offload_inputs(module._gradient_checkpointing_func)
    return len(found)
