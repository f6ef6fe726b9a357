"""Where answers end and what changes greedy decoding: for `dstrain generate`, and in the files of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.data.encoding.conversations import stop_token_ids

GENERATION_CONFIG_FILE = "generation_config.json"
DECODING_SETTINGS = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens",
    "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings of a model's generation config that change the tokens of greedy decoding, in any program that reads it."""


def collect_stop_ids(config: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the tokenizer's, and those of a model's generation config or None.

    Chat models often list more ends of an answer there than the tokenizer's EOS.
    """
    listed = getattr(config, "eos_token_id", None)
    values = listed if isinstance(listed, list) else [listed]
    return stop_token_ids(tokenizer) | {int(token) for token in values if token is not None}


def make_decoding_config(config: Any, tokenizer: Any, **sampling: Any) -> Any:
    """Return the GenerationConfig of `dstrain generate`; `sampling`: its own settings, greedy without any."""
    from transformers import GenerationConfig

    kept = {name: getattr(config, name, None) for name in DECODING_SETTINGS}
    return GenerationConfig(
        do_sample=bool(sampling),
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(collect_stop_ids(config, tokenizer)),
        **{name: value for name, value in kept.items() if value is not None},
        **sampling,
    )


def write_generation_config(config: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model's generation config with the ends of an answer and the pad token that `dstrain generate` uses.

    The base's other settings stay as they are, defaults for sampling too. They are not checked: transformers refuses to
    save some that published models have, such as a temperature without `do_sample`.
    """
    from transformers import GenerationConfig

    values = {} if config is None else config.to_diff_dict()
    stops = sorted(collect_stop_ids(config, tokenizer))
    written = GenerationConfig(**{name: value for name, value in values.items() if name != "transformers_version"})
    if stops:
        written.eos_token_id = stops if len(stops) > 1 else stops[0]
    written.pad_token_id = tokenizer.pad_token_id
    written.to_json_file(folder / GENERATION_CONFIG_FILE, use_diff=True, keys_to_pop=["compile_config"])
