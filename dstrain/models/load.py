"""A transformers model, loaded or made from scratch, the same at every ZeRO stage."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError, did_you_mean
from dstrain.models.adapters.folder import base_of, merge_adapter, read_adapter
from dstrain.models.checks.hub_code import hub_faults
from dstrain.models.padding import clear_padding_idx
from dstrain.models.weights.check_files import has_weights
from dstrain.models.weights.check_keys import without_report

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "tekken.json", "processor_config.json",
)  # fmt: skip
"""One of them lies in every folder that transformers reads a tokenizer from."""
NO_MODEL = Fault("model", "has neither path nor config", "set model.path, or model.config to start anew")


def read_config(model: ModelConfig) -> PretrainedConfig:
    """The model's transformers config. Raises RecipeError where it cannot be had."""
    from transformers import AutoConfig

    if model.path is not None:
        base = base_of(model).path or ""
        config = pretrained(AutoConfig, base, "model.path", model.trust_remote_code)
        if faults := hub_faults(config, base, "model.path", model.trust_remote_code):
            raise RecipeError(faults)
        return config
    if model.config is None:
        raise RecipeError(NO_MODEL)
    values = dict(model.config)
    kind = str(values.pop("model_type"))
    try:
        default = AutoConfig.for_model(kind)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        near = did_you_mean(kind, [*CONFIG_MAPPING_NAMES])  # hundreds, where none is near
        mend = near if near.startswith("did you mean") else "take the one in the config.json of a model of its kind"
        raise RecipeError(Fault("model.config.model_type", f"'{kind}' is none of transformers' models", mend)) from None
    known = {*default.to_dict(), *default.attribute_map}
    faults = [
        Fault(f"model.config.{key}", f"is no setting of a {kind} model", did_you_mean(key, sorted(known)))
        for key in values
        if key not in known
    ]
    if faults:
        raise RecipeError(faults)
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers checks some values itself, and trips over others
        raise RecipeError(Fault("model.config", _reason(error), "correct the value")) from error


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that a tokenizer may be read from."""
    named = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return named + [file for pattern in ("*.tiktoken", "*.spm", "tokenizer.model.v*") for file in folder.glob(pattern)]


def read_tokenizer(name: str, key: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder or on the hub. Raises RecipeError where it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return pretrained(AutoTokenizer, name, key, trust_remote_code)
    except RecipeError as error:
        if not Path(name).expanduser().is_dir() or "trust_remote_code" in str(error):
            raise
        cause = error.__cause__
        reason = _reason(cause) if isinstance(cause, Exception) else "unknown"
        if not tokenizer_files(Path(name).expanduser()):
            mend = "set model.tokenizer to a folder or hub id that has one"
            raise RecipeError(Fault(key, f"there is no tokenizer in '{name}'", mend)) from error
        mend = "replace its tokenizer files, or set model.tokenizer to a folder or hub id that has whole ones"
        raise RecipeError(Fault(key, f"the tokenizer in '{name}' cannot be read ({reason})", mend)) from error


def pretrained(auto: Any, name: str, key: str, trust_remote_code: bool) -> Any:
    """What one of transformers' Auto classes makes of a folder or a hub id. Raises RecipeError for the recipe's `key`."""
    place = str(Path(name).expanduser()) if require_folder(name, key) else name
    try:
        return auto.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # its own checks, and whatever a config that cannot be trips over
        reason = _reason(error)
        if "trust_remote_code" in str(error):
            mend = "add --set model.trust_remote_code=true if you trust the Python that comes with it"
        elif "torchvision" in str(error).lower():
            reason = reason.partition(". ")[0]  # what follows is where to find it for every system
            mend = "install torchvision (pip install torchvision), which a processor with a part for videos needs"
        else:
            mend = "give a folder that transformers can load, or a hub id that this machine can reach"
        raise RecipeError(Fault(key, f"'{name}' cannot be loaded ({reason})", mend)) from error


def require_folder(name: str, key: str) -> bool:
    """Whether a name means a folder of this machine. Raises RecipeError where it does, and there is none."""
    if not (name.startswith((".", "/", "~")) or name.count("/") > 1):
        return False
    if not Path(name).expanduser().is_dir():
        mend = f"give an existing folder or a hub id (we are in {Path.cwd()})"
        raise RecipeError(Fault(key, f"'{name}' is no folder", mend))
    return True


def _reason(error: Exception) -> str:
    """What a library says of a config in one line; the kind of error too where it did not mean to say anything."""
    from huggingface_hub.errors import StrictDataclassError

    if isinstance(error, (OSError, ValueError)) and str(error).strip():
        return str(error).strip().splitlines()[0]
    words = " ".join(str(error).split())
    return words if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: {words}"


def check_vocabulary(model: ModelConfig, config: PretrainedConfig, entries: int, sees: bool) -> None:
    """Raise RecipeError where the tokenizer has more entries than the model."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None or entries <= size:
        return
    inside = "text_config." if sees else ""
    where = f"model.config.{inside}vocab_size" if model.config else "model.tokenizer"
    problem = f"the tokenizer has {entries} entries, the model {size}"
    raise RecipeError(Fault(where, problem, "give the model at least as many"))


def load_model(auto: Any, model: ModelConfig, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The model with weights from `model.path`, or drawn from `seed`.

    Weights that the files lack (a new head) are drawn from the seed as well. Inside `sharded_construction`
    the parameters come in shards, with the same values as without. Collective there. Inside `no_values` no
    weights are read.
    """
    import torch

    from dstrain.models.weights.meta_init import may_draw, without_values

    settings = _settings(model)
    dtype, base = getattr(torch, model.dtype or "float32"), base_of(model).path or ""
    torch.manual_seed(seed)
    if model.path is None:
        made = _from_scratch(auto, config, dtype, settings)
    elif not without_values() and not has_weights(Path(base).expanduser()) and may_draw(base):
        made = _from_scratch(auto, config, dtype, settings)
        _read_generation_config(made, base)
    elif without_values():
        made = auto.from_config(config, dtype=dtype, **settings)
        _read_generation_config(made, base)
    else:
        made = _from_files(auto, model, config, {"dtype": dtype, **settings})
    clear_padding_idx(made)
    return made


def _from_files(
    auto: Any, model: ModelConfig, config: PretrainedConfig, settings: Mapping[str, Any]
) -> PreTrainedModel:
    """The weights of a folder or of the hub, with an adapter merged into them where the folder is one. Raises RecipeError."""
    adapter, name = read_adapter(model.path), base_of(model).path or ""
    try:
        with without_report():
            made = auto.from_pretrained(str(Path(name).expanduser()), config=config, **settings)
    except RuntimeError as error:
        if "mismatched" not in str(error):
            raise
        problem = f"weights of '{name}' have other shapes than its config says"
        raise RecipeError(Fault("model.path", problem, "download the model again")) from error
    return made if adapter is None else merge_adapter(made, adapter)


def skeleton(auto: Any, model: ModelConfig, config: PretrainedConfig) -> PreTrainedModel:
    """The model's parts and shapes, without memory for its weights. Raises RecipeError where it cannot be built."""
    import torch

    try:
        with torch.device("meta"):
            return auto.from_config(copy.deepcopy(config), **_settings(model))
    except RecipeError:
        raise
    except Exception as error:  # whatever the family's code trips over
        key, mend = ("model.path", "name another model") if model.path else ("model.config", "correct the value")
        if isinstance(error, ImportError) and model.attention != "auto":
            key, mend = "model.attention", "install what it needs, or take sdpa or eager"
        raise RecipeError(Fault(key, f"the model cannot be built ({_reason(error)})", mend)) from error


def _settings(model: ModelConfig) -> dict[str, Any]:
    """What a model is built with beside its config."""
    own = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    return {"trust_remote_code": model.trust_remote_code, **own}


def _from_scratch(auto: Any, config: PretrainedConfig, dtype: Any, settings: dict[str, Any]) -> PreTrainedModel:
    """Weights drawn module by module in one fixed order.

    transformers draws torch's default weights first and its own afterwards, but under ZeRO-3 only its own:
    leaving out the first makes the numbers equal at every stage. In 16 bits other numbers would be drawn than
    DeepSpeed has after casting: they are drawn in 32 and cast. (Under ZeRO-3 DeepSpeed draws in 16 bits itself.)
    """
    import torch
    from transformers import initialization
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return auto.from_config(config, dtype=dtype, **settings)
    with initialization.no_init_weights():
        made = auto.from_config(config, dtype=torch.float32, **settings)
    made.initialize_weights()
    made.tie_weights()
    if dtype != torch.float32:
        for tensor in made.state_dict(keep_vars=True).values():  # what is not saved (rotary frequencies) stays exact
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        made.config.dtype = dtype
    return made


def _read_generation_config(model: PreTrainedModel, name: str) -> None:
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


def switch_on_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, where the family supports it."""
    if getattr(model, "supports_gradient_checkpointing", False):
        with warnings.catch_warnings():  # transformers 6 will call it activation_checkpointing_enable
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def keep_checkpoints_on_host(model: PreTrainedModel | torch.nn.Module, pin: bool) -> int:
    """Keep what recomputation starts from, the input of each layer, in host memory. Returns how many modules do so.

    torch's checkpoint saves its inputs before its own hooks are set, so hooks around it get the inputs and nothing else
    (torch/utils/checkpoint.py, _NoopSaveInputs). Call it after `switch_on_checkpointing`. `pin`: in page-locked memory, which is
    copied beside the computation. Raises RecipeError where no module recomputes.
    """
    import torch

    def on_host(recompute: Any) -> Any:
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=pin):
                return recompute(*args, **kwargs)

        return checkpoint

    found = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    found = [module for module in found if hasattr(module, "_gradient_checkpointing_func")]
    if not found:
        problem = "the model recomputes no layer, so there is nothing to keep in host memory"
        raise RecipeError(Fault("activation_checkpointing.cpu_checkpointing", problem, "remove it from the preset"))
    for module in found:
        module._gradient_checkpointing_func = on_host(module._gradient_checkpointing_func)
    return len(found)
