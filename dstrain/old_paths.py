"""Old import paths of modules and names, served for one version."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_RECORDS, _SOURCES = "dstrain.data.records", "dstrain.data.sources.open"
_WRAPPERS, _TOKENIZATION = "dstrain.data.sources.base", "dstrain.data.encoding.tokenization"
_BUILD, _FINGERPRINT = "dstrain.data.cache.build", "dstrain.data.fingerprint"
_COLLATE, _TASK = "dstrain.data.loading.collate", "dstrain.tasks.common.task"
_PREFERENCES, _FORWARD = "dstrain.data.formats.preferences", "dstrain.tasks.common.forward"
_REGISTRY = "dstrain.tasks.common.registry"
_MESSAGES = "dstrain.data.formats.messages"
_RENAMED_IN_REGISTRY = {
    "packaged_tasks": f"{_REGISTRY}.builtin_tasks",
    "options": "dstrain.tasks.common.options.task_options",
    "learning_rate": f"{_REGISTRY}.default_learning_rate",
    "with_learning_rate": f"{_REGISTRY}.fill_learning_rate",
}


def _names_in(module: str, *names: str) -> dict[str, str]:
    """Return the new places of names that moved to one module unchanged."""
    return {name: f"{module}.{name}" for name in names}


_LOSSES = {
    "bradley_terry": "dstrain.tasks.rm.bradley_terry",
    **_names_in("dstrain.tasks.dpo", "dpo_sigmoid", "robust_dpo", "ipo", "hinge", "simpo", "orpo"),
    "kto": "dstrain.tasks.kto.kto",
    "focal_cross_entropy": "dstrain.tasks.docqa.focal_cross_entropy",
}
MOVED: Mapping[str, Mapping[str, str]] = {
    "dstrain.data.source": {
        "open_source": f"{_SOURCES}.open_source",
        "Joined": f"{_WRAPPERS}.ConcatSource",
        "First": f"{_WRAPPERS}.HeadSource",
        "Source": f"{_WRAPPERS}.Source",
        "BadRow": f"{_RECORDS}.BadRow",
        "show_path": "dstrain.files.display_path",
    },
    "dstrain.data.formats": {
        "BadRecord": f"{_RECORDS}.BadRecord",
        "Preference": f"{_PREFERENCES}.Preference",
        "Response": f"{_PREFERENCES}.Response",
        "read_preference": f"{_PREFERENCES}.read_preference",
        "ROLES": f"{_MESSAGES}.ROLE_ALIASES",
        **_names_in(_MESSAGES, "Message", "read_messages", "read_system", "read_text"),
    },
    "dstrain.data.formats.transcripts": _names_in(
        _MESSAGES,
        *("Message", "Turn", "HUMAN_PREFIX", "IMAGE_PLACEHOLDER", "is_transcript", "parse_transcript"),
        *("parse_prompt_transcript", "turns_to_messages", "common_proper_prefix_length", "common_word_prefix_length"),
    ),
    "dstrain.data.sources.open": _names_in(_WRAPPERS, "ConcatSource", "HeadSource"),
    "dstrain.data.sources.decode": _names_in(
        "dstrain.data.sources.files", "check_record", "decode_record", "decode_text", "parse_json"
    ),
    "dstrain.data.encoding.special_tokens": _names_in(
        _TOKENIZATION, "SpecialTokens", "get_special_tokens", "split_bos", "has_suffix"
    ),
    "dstrain.data.encoding.truncation": _names_in(
        _TOKENIZATION,
        *("CUT_COLUMNS", "LastTurnFinder", "TokenBudget", "TruncationResult", "describe_cuts", "describe_limits"),
    ),
    "dstrain.data.encoding.chat_template": _names_in(
        "dstrain.data.encoding.rendering", "has_chat_template", "describe_missing_template"
    ),
    "dstrain.data.cache.columns": _names_in("dstrain.data.cache.token_store", "ColumnFile", "ColumnWriter"),
    "dstrain.data.sources.watched_file": _names_in("dstrain.files", "WatchedFile", "stat_or_none"),
    "dstrain.data.cache.build_images": {
        "ImageRecordEncoder": f"{_BUILD}.ImageRecordEncoder",
        "encode_image_prompts": "dstrain.data.encoding.prompts.encode_image_prompts",
    },
    "dstrain.data.vision.downscale": _names_in("dstrain.data.vision.image_index_writer", "downscale_if_equivalent"),
    "dstrain.data.vision.patches": _names_in("dstrain.data.vision.image_io", "raise_on_truncated_images"),
    "dstrain.data.vision.expansion": _names_in(
        "dstrain.data.encoding.rendering", "PlaceholderExpansion", "shift_offset", "shift_spans"
    ),
    "dstrain.data.paths": _names_in(
        "dstrain.files", "display_path", "open_regular_file", "not_file_reason", "NOT_REGULAR"
    ),
    "dstrain.data.loading.sampler": {
        **_names_in("dstrain.data.rng", "make_random_state", "IMAGE_STREAM", "RESIDUE_STREAM"),
        **_names_in("dstrain.data.loading.loader", "StepSampler", "eval_micro_batches"),
    },
    "dstrain.models.attention_mask": _names_in(_FORWARD, "needs_attention_mask", "NO_MASK_MODEL_TYPES"),
    "dstrain.train.engine.step": _names_in(
        "dstrain.train.engine.module", "scale_loss_or_nan", "set_lr", "step_outcome", "total_step_weight"
    ),
    "dstrain.data.messages": {"BadRecord": f"{_RECORDS}.BadRecord"},
    "dstrain.data.prepare": {
        "prepare": f"{_BUILD}.prepare",
        "Policy": f"{_BUILD}.PreparePolicy",
        "read_each": f"{_BUILD}.RecordEncode",
        "tokenizer_fingerprint": f"{_FINGERPRINT}.tokenizer_fingerprint",
        "BadRecord": f"{_RECORDS}.BadRecord",
        "Encode": f"{_RECORDS}.Encode",
        "attempt": f"{_RECORDS}.try_parse",
    },
    "dstrain.data.store": {
        "TokenStore": "dstrain.data.cache.token_store.TokenStore",
        "cache_root": "dstrain.cache.cache_root",
    },
    "dstrain.data.collate": {
        "pad": f"{_COLLATE}.pad",
        "attention_mask": f"{_COLLATE}.attention_mask",
        "padded_length": f"{_COLLATE}.padded_length",
        "learnt_tail": f"{_COLLATE}.loss_mask_tail",
        "answers_tail": f"{_COLLATE}.answer_mask_tail",
        "loss_positions": f"{_COLLATE}.loss_positions",
    },
    "dstrain.data.loading.packing": _names_in(_COLLATE, "PackedRows", "pack_rows", "shared_prefix_length"),
    "dstrain.models.attention.settings": _names_in("dstrain.models.attention.layout", "AttentionSettings"),
    "dstrain.models.heads.scores": _names_in(
        "dstrain.models.heads.linear_head",
        *("DEFAULT_FIELDS", "MAX_CHUNK_BYTES", "ScoreFields", "TokenScores"),
        *("is_argmax", "rows_per_chunk", "score_logits"),
    ),
    "dstrain.tasks.base": {
        "Task": f"{_TASK}.Task",
        "Loss": f"{_TASK}.Loss",
        "Split": f"{_TASK}.Split",
        "ReferenceKind": f"{_TASK}.ReferenceKind",
    },
    "dstrain.tasks.preparing": {"policy_of": "dstrain.tasks.common.store_builder.policy_of"},
    "dstrain.tasks.common.bad_record_policy": {"policy_of": "dstrain.tasks.common.store_builder.policy_of"},
    "dstrain.tasks.common.losses": _LOSSES,
    "dstrain.tasks.text": {"TextTask": "dstrain.tasks.common.text.TextTask"},
    "dstrain.tasks.pairs": {"PairTask": "dstrain.tasks.common.pairs.PairTask"},
    "dstrain.tasks.policy": {"PolicyTask": "dstrain.tasks.common.reference.ReferenceTask"},
    "dstrain.tasks.sft": {"SupervisedFineTuning": "dstrain.tasks.sft.SFT"},
    "dstrain.tasks.vlm": {"VisionLanguage": "dstrain.tasks.vlm.VLM"},
    "dstrain.tasks.dpo": {"PreferenceOptimization": "dstrain.tasks.dpo.DPO"},
    "dstrain.tasks.kto": {"SingleAnswers": "dstrain.tasks.kto.KTO"},
    "dstrain.tasks": _RENAMED_IN_REGISTRY,
    "dstrain.tasks.find": {
        **_names_in(_REGISTRY, "find_task", "make_task"),
        "Option": "dstrain.tasks.common.options.Option",
        **_RENAMED_IN_REGISTRY,
    },
    "dstrain.tasks.ops": {
        "ask": f"{_FORWARD}.forward_logits",
        "answer_log_probs": f"{_FORWARD}.answer_log_probs",
        "score_answers": f"{_FORWARD}.score_answers",
        "unwrapped": "dstrain.models.params.components.unwrap_peft",
        "score_tokens": f"{_FORWARD}.score_tokens",
        "exact_answers": f"{_FORWARD}.count_exact_answers",
        "inputs_of_images": f"{_FORWARD}.vision_inputs",
        **_LOSSES,
        "odds_ratio": _LOSSES["orpo"],
        "switch_off_dropout": "dstrain.tasks.common.dropout.disable_dropout_in_model",
    },
    "dstrain.shipped": {"shipped": "dstrain.resources.find_resource_dir"},
}
"""Old module -> name in it -> new module and name."""
_reported: set[str] = set()


def get_moved(module: str, name: str) -> Any:
    """Return what an old module had under a name, with a notice on stderr. Raises AttributeError."""
    target = MOVED.get(module, {}).get(name)
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    path, _, attribute = target.rpartition(".")
    if target not in _reported and not is_other_process_logging(os.environ):
        _reported.add(target)
        new = f"from {path} import {attribute}"
        line = f"deprecated: `from {module} import {name}` is now `{new}`; this version accepts both"
        print(line, file=sys.stderr)
    return getattr(import_module(path), attribute)


def is_other_process_logging(env: Mapping[str, str]) -> bool:
    """Return true in a rank that `dstrain train` started, which has reported it, and in all ranks but the first."""
    return "DSTRAIN_LAUNCH_ID" in env or env.get("RANK", "0") != "0"


def moved_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that still exists and has lost names."""
    return lambda name: get_moved(module, name)


class OldPathFinder:
    """Makes modules for old paths, whose names are looked up in the new ones. Both finder and loader.

    Without the base classes of importlib.abc, whose import takes every command ten milliseconds.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None  # type: ignore[arg-type]  # no base class

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # as usual

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = moved_names(module.__name__)  # type: ignore[method-assign]


def install() -> None:
    """Serve old paths from now on. The finder is asked last: modules that exist are found first."""
    if not any(isinstance(finder, OldPathFinder) for finder in sys.meta_path):
        sys.meta_path.append(OldPathFinder())
