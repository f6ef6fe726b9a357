"""Load models from folders or configs; padding of their vocabulary."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError, first_names, suggest_name
from dstrain.models.adapters import merge_adapter
from dstrain.models.folder import (
    check_hub_code,
    check_local_folder,
    find_tokenizer_files,
    quantized_fault,
    read_adapter,
    resolve_base_model,
)
from dstrain.models.shard import built_on_rank_0
from dstrain.models.weights import disable_transformers_logging, has_weights, load_report_disabled
from dstrain.process_setup import log_if_slow
from dstrain.torchvision_fit import find_missing_package, make_torchvision_fix

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


VISION_CONFIG_KEYS = ("vision_config", "vq_config")
"""Config settings that hold the vision tower's config."""
PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
"""Pad tokens that are in a vocabulary but not set as `pad_token`; the last is Llama 3.1's."""
RESERVED_TOKEN = re.compile(r"\W*(reserved|unused|dummy|placeholder|control|special)\D*\d+\W*", re.IGNORECASE)
"""Special tokens reserved for users: <|reserved_special_token_0|> (Llama 3), <unused7> (Gemma), [control_8] (Mistral
v3), <|placeholder1|> (Phi 3), <|dummy_85|> (Phi 4, whose pad token it is)."""
PRIVATE_CHARACTER = "\U0010fffd"
"""Private-use character: a tokenizer that maps anything to its unknown token maps this to it."""


def set_pad_token(tokenizer: Any, key: str, used_tokens: Collection[str] = ()) -> None:
    """Set the pad token of a tokenizer without one. A pad token that is set stays, even if it is EOS.

    The first available one is used: a known pad token in the vocabulary, a reserved special token, an unknown token
    that no text is encoded to, EOS. EOS is the last choice because reward models of transformers read the score at the
    last non-pad token, which then cannot be the EOS of an answer. `used_tokens`: special tokens with a meaning.
    Raises RecipeError for a tokenizer without EOS.
    """
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise RecipeError(Fault(key, "the tokenizer has neither a pad nor an EOS token", "add one and save it again"))
    tokenizer.pad_token = next(_unused_tokens(tokenizer, used_tokens), tokenizer.eos_token)


def replace_eos_pad_token(tokenizer: Any) -> None:
    """Replace a pad token that equals EOS by an unused token, if there is one. For a new score head.

    Fine-tuning scripts often save tokenizers with pad = EOS; the score would then be read before the answer's EOS.
    """
    if tokenizer.pad_token is not None and tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = next(_unused_tokens(tokenizer, ()), tokenizer.eos_token)


def _unused_tokens(tokenizer: Any, used_tokens: Collection[str]) -> Iterator[str]:
    """Yield tokens that can serve as padding, best first."""
    added = tokenizer.added_tokens_decoder  # id -> AddedToken
    special = [str(added[number].content) for number in sorted(added) if added[number].special]
    roles = {tokenizer.bos_token, tokenizer.eos_token, getattr(tokenizer, "image_token", None), *used_tokens}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    free = [text for text in special if text not in roles and text not in template]
    unknown = tokenizer.unk_token
    # Tokens meant for padding first, then those that have no meaning.
    yield from (text for text in PAD_TOKENS if text in free and text != unknown)
    yield from (text for text in free if RESERVED_TOKEN.fullmatch(text) and text != unknown)
    if (
        unknown in free
        and tokenizer.unk_token_id not in tokenizer(PRIVATE_CHARACTER, add_special_tokens=False)["input_ids"]
    ):
        yield unknown


def clear_padding_idx(model: PreTrainedModel) -> None:
    """Train every row of the embedding.

    Models pass the config's pad token to torch.nn.Embedding as `padding_idx`, whose row gets no gradient. Where EOS or
    BOS is also the pad token, it would never be trained. Padding itself gets no gradient either way, as no loss
    depends on it.
    """
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None


MISSING_MODEL = Fault(
    "model.path", "is not set, nor is model.config", "set model.path, or model.config to train from scratch"
)

HUB_TIMEOUT_SECONDS = 10
"""Limit of each step (connect, read) of the one request that finds whether the Hub answers."""


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return True for a config of a model that reads images and writes text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    known = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return known and any(getattr(config, name, None) is not None for name in VISION_CONFIG_KEYS)


def read_config(model: ModelConfig) -> PretrainedConfig:
    """Return the model's transformers config. Raises RecipeError where it cannot be read or is invalid."""
    from transformers import AutoConfig

    if model.path is not None:
        found = resolve_base_model(model)
        base = found.path or ""
        config = load_pretrained(AutoConfig, base, "model.path", model.trust_remote_code, found.revision)
        if faults := check_hub_code(config, base, "model.path", model.trust_remote_code):
            raise RecipeError(faults)
        if fault := quantized_fault(config.to_dict(), "model.path"):  # also of a Hub id, which preflight has not seen
            raise RecipeError(fault)
        for part in (config, config.get_text_config()):  # the weights are dequantized, and saved like this
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        return config
    if model.config is None:
        raise RecipeError(MISSING_MODEL)
    values = dict(model.config)
    model_type = str(values.pop("model_type"))
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        near = suggest_name(model_type, [*CONFIG_MAPPING_NAMES])  # lists hundreds of names where none is near
        fix = near if near.startswith("did you mean") else "copy it from the config.json of a model of this family"
        problem = f"transformers has no model type '{model_type}'"
        raise RecipeError(Fault("model.config.model_type", problem, fix)) from None
    known = {*default.to_dict(), *default.attribute_map, *_undeclared_settings(type(default))}
    faults = [
        Fault(f"model.config.{key}", f"is not a setting of a {model_type} model", suggest_name(key, sorted(known)))
        for key in values
        if key not in known
    ]
    if faults:
        raise RecipeError(faults)
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers validates some values, and fails with any error on others
        raise RecipeError(Fault("model.config", error_reason(error), "correct the value")) from error


def _undeclared_settings(config_class: type) -> set[str]:
    """Return the settings that the modelling file reads though the config class does not declare them.

    Such as head_dim of qwen3_moe, which every published config.json has: `getattr(config, "head_dim", ...)`.
    """
    spec = importlib.util.find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    if spec is None or spec.origin is None:
        return set()
    return {*re.findall(r'getattr\(\s*(?:self\.)?config, "(\w+)"', Path(spec.origin).read_text(encoding="utf-8"))}


def read_tokenizer(name: str, key: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Return the tokenizer in a folder or on the Hub. Raises RecipeError where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return load_pretrained(AutoTokenizer, name, key, trust_remote_code, revision)
    except RecipeError as error:
        if not Path(name).expanduser().is_dir() or "trust_remote_code" in str(error):
            raise
        cause = error.__cause__
        reason = error_reason(cause) if isinstance(cause, Exception) else "unknown"
        if not find_tokenizer_files(Path(name).expanduser()):
            fix = "set model.tokenizer to a folder or hub id that has one"
            raise RecipeError(Fault(key, f"there is no tokenizer in '{name}'", fix)) from error
        fix = "replace its tokenizer files, or set model.tokenizer to a folder or hub id with complete ones"
        raise RecipeError(Fault(key, f"the tokenizer in '{name}' cannot be read ({reason})", fix)) from error


def load_pretrained(auto_class: Any, name: str, key: str, trust_remote_code: bool, revision: str | None = None) -> Any:
    """Load a folder or Hub id with one of transformers' Auto classes. Raises RecipeError for the recipe's `key`.

    `revision`: of a Hub id; None: main.
    """
    is_local = check_local_folder(name, key)
    if not is_local:
        check_hub_reachable(name, key, revision)
    place = str(Path(name).expanduser()) if is_local else name
    try:
        # Without a network huggingface_hub tries again for over a minute.
        with log_if_slow(f"{key}: asking the Hugging Face Hub for {name}", not is_local):
            return auto_class.from_pretrained(place, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # transformers' checks, or any error that an invalid config causes
        reason, missing = error_reason(error), find_missing_package(error)
        if revision is not None and "not a valid git identifier" in str(error):
            problem, fix = f"is '{revision}', which '{name}' does not have", "name a branch, tag or commit of it"
            raise RecipeError(Fault("model.revision", problem, fix)) from error
        if "trust_remote_code" in str(error):
            fix = "add --set model.trust_remote_code=true if you trust the Python code that comes with it"
        elif missing is not None:
            reason, fix = missing, make_torchvision_fix()
        else:
            fix = "give a folder that transformers can load, or a hub id that this machine can reach"
        raise RecipeError(Fault(key, f"'{name}' cannot be loaded ({reason})", fix)) from error


def check_hub_reachable(name: str, key: str, revision: str | None = None) -> None:
    """Raise RecipeError where a Hub id is not in the cache and the Hub does not answer one request in time.

    transformers repeats its request for each file several times, which takes minutes behind a silent firewall.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import get_session

    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    if revision is None and (cached / "snapshots").is_dir():
        return
    if revision is not None and any((cached / part / revision).exists() for part in ("snapshots", "refs")):
        return
    what = "it" if revision is None else f"its revision {revision}"
    problem = f"'{name}' is not a local folder, and {what} is not in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        fix = "unset HF_HUB_OFFLINE, or give a local folder"
        raise RecipeError(Fault(key, f"{problem}; HF_HUB_OFFLINE forbids a download", fix))
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # the HTTP library differs between versions of huggingface_hub
        fix = "check the network, download it elsewhere into the cache and set HF_HUB_OFFLINE=1, or give a local folder"
        reason = f"{constants.ENDPOINT} does not answer ({error_reason(error)})"
        raise RecipeError(Fault(key, f"{problem}; {reason}", fix)) from error


def error_reason(error: Exception) -> str:
    """Return a library's error message in one line, with the error's type where the error was not raised on purpose."""
    from huggingface_hub.errors import StrictDataclassError

    if isinstance(error, (OSError, ValueError)) and str(error).strip():
        return str(error).strip().splitlines()[0]
    words = " ".join(str(error).split())
    return words if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: {words}"


def check_vocab_size(model: ModelConfig, config: PretrainedConfig, tokenizer_size: int, is_multimodal: bool) -> None:
    """Raise RecipeError where the tokenizer has more entries than the model's vocabulary."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None or tokenizer_size <= size:
        return
    inside = "text_config." if is_multimodal else ""
    where = f"model.config.{inside}vocab_size" if model.config else "model.tokenizer"
    problem = f"the tokenizer has {tokenizer_size} entries, the model's vocabulary {size}"
    raise RecipeError(Fault(where, problem, "give the model at least as many"))


def load_model(auto_class: Any, model: ModelConfig, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return the model with weights from `model.path`, or initialized from `seed`.

    Weights that are missing from the files (a new head) are initialized from the seed too. Inside `zero3_init` the
    parameters are sharded, with the same values as without; the call is then collective. There a model to quantize is
    whole on rank 0 and without values on the others, until `quantize_model` shards it. Inside `meta_parameters` no
    weights are read.
    """
    with built_on_rank_0() if model.quantize is not None else nullcontext():
        loaded = _load_model(auto_class, model, config, seed)
    clear_padding_idx(loaded)
    return loaded


def _load_model(auto_class: Any, model: ModelConfig, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    import torch

    from dstrain.models.meta_init import allow_random_init, is_meta_init

    kwargs = _model_kwargs(model)
    dtype, found = getattr(torch, model.dtype or "float32"), resolve_base_model(model)
    base = found.path or ""
    # Right before the weights are drawn, so that nothing drawn earlier changes them.
    torch.manual_seed(seed)
    if model.path is None:
        loaded = _init_from_scratch(auto_class, config, dtype, kwargs)
    elif not is_meta_init() and not has_weights(Path(base).expanduser()) and allow_random_init(base):
        loaded = _init_from_scratch(auto_class, config, dtype, kwargs)
        _load_generation_config(loaded, base, found.revision)
    elif is_meta_init():
        loaded = auto_class.from_config(config, dtype=dtype, **kwargs)
        _load_generation_config(loaded, base, found.revision)
    else:
        loaded = _load_from_files(auto_class, model, config, {"dtype": dtype, **kwargs})
    return loaded


def _load_from_files(
    auto_class: Any, model: ModelConfig, config: PretrainedConfig, model_kwargs: Mapping[str, Any]
) -> PreTrainedModel:
    """Load a model from a folder or the Hub; of an adapter folder, its base model with the adapter merged.

    It is not merged where it is trained on (model.lora.create_new_adapter: false).

    Raises RecipeError where shapes in the files differ from the config's.
    """
    from dstrain.models.dequantize import dequantized_files

    adapter, found = read_adapter(model.path), resolve_base_model(model)
    name = found.path or ""
    try:
        place = str(Path(name).expanduser())
        # In a file a progress bar is a long line.
        bars = disable_transformers_logging(progress_bar=not sys.stderr.isatty())
        with load_report_disabled(), dequantized_files(model_kwargs["dtype"]), bars:
            loaded = auto_class.from_pretrained(place, config=config, **model_kwargs, revision=found.revision)
    except RuntimeError as error:
        if "mismatched" not in str(error):
            raise
        problem = f"weights in '{name}' differ in shape from its config.json"
        raise RecipeError(Fault("model.path", problem, "download the model again")) from error
    is_trained_on = model.lora is not None and not model.lora.create_new_adapter
    return loaded if adapter is None or is_trained_on else merge_adapter(loaded, adapter)


def build_meta_model(auto_class: Any, model: ModelConfig, config: PretrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device, without memory for weights. Raises RecipeError where it cannot be built."""
    import torch

    try:
        with torch.device("meta"):
            return auto_class.from_config(copy.deepcopy(config), **_model_kwargs(model))
    except RecipeError:
        raise
    except Exception as error:  # any error of the family's code
        key, fix = ("model.path", "name another model") if model.path else ("model.config", "correct the value")
        about_attention = isinstance(error, ImportError) or re.search("attention|attn_impl", str(error), re.IGNORECASE)
        if model.attn_implementation != "auto" and about_attention:
            key, fix = "model.attn_implementation", "use another implementation; auto takes one that the family has"
        raise RecipeError(Fault(key, f"the model cannot be built ({error_reason(error)})", fix)) from error


def _model_kwargs(model: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` and `from_config`, besides config and dtype."""
    name = model.attn_implementation
    attention = {} if name == "auto" else {"attn_implementation": name}
    return {"trust_remote_code": model.trust_remote_code, **attention}


def _init_from_scratch(
    auto_class: Any, config: PretrainedConfig, dtype: Any, model_kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Initialize the weights module by module, with the same random numbers at every ZeRO stage.

    transformers runs torch's default initialization first and its own afterwards, but under ZeRO-3 only its own; so
    the first is left out everywhere. Drawing in 16 bits would give other numbers than DeepSpeed's cast from fp32, so
    the weights are drawn in fp32 and cast. (Under ZeRO-3 they are drawn in 16 bits by DeepSpeed itself.)
    """
    import torch
    from transformers import initialization
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return auto_class.from_config(config, dtype=dtype, **model_kwargs)
    with initialization.no_init_weights(), _empty_memory_is_nan():
        model = auto_class.from_config(config, dtype=torch.float32, **model_kwargs)
    model.initialize_weights()
    model.tie_weights()
    parameters = ((name, one) for name, one in model.named_parameters() if not one.is_meta)
    unset = [name for name, one in parameters if bool(one.isnan().any())]
    if unset:
        problem = f"transformers gives no first values to {first_names(unset)} of a {config.model_type} model"
        raise RecipeError(Fault("model.config", problem, "start from weights with model.path, or use another family"))
    if dtype != torch.float32:
        for tensor in model.state_dict(keep_vars=True).values():  # buffers not saved (rotary frequencies) stay fp32
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        model.config.dtype = dtype
    return model


@contextmanager
def _empty_memory_is_nan() -> Iterator[None]:
    """Fill memory that torch allocates without values with NaN inside, so that weights that nothing sets are found."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _load_generation_config(model: PreTrainedModel, name: str, revision: str | None) -> None:
    """Set the generation config of a model built by `from_config`, as `from_pretrained` does."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    folder = str(Path(name).expanduser())
    try:
        generation_config = GenerationConfig.from_pretrained(folder, revision=revision)
    except OSError:  # no generation_config.json: transformers derives it from config.json
        generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True, revision=revision
        )
    model.generation_config = generation_config
