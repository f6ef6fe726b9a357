"""All that a task file imports, in one place: `from dstrain.task import Batch, Loss, RecordTask`.

A task is one frozen dataclass in one file (docs/tasks/own.md). Modules inside dstrain may move; these
names stay. Importing them imports no torch.

    RecordTask, Task            base classes: on the records of data.train, and on samples of any other origin
    Batch, Loss                 what `collate` and `loss` return
    BadRecord                   raised by `encode_record` for a record that cannot be used
    pad, attention_mask         sequences of different lengths as rows of a tensor
    Checks, Export              what a task may check before a run, and write into an export
    LossInputs, Reference, Scorer    outputs of frozen models, and sums over a whole step, which a loss reads
    GenerationMetrics           metrics of generated answers, of a task that derives from a packaged one on text
    resolve_image, read_image   the file or the bytes that a record names, and their image (Pillow)
    open_source, ConcatSource, prepare, policy_of, ExampleSettings, TokenColumns, TokenStore
                                records of files, and the cache of their examples, as RecordTask uses them
    RunConfig, Dataset, Split   the recipe; what `examples` returns, and its argument
    file_digest, tokenizer_fingerprint    digests of what an encoder reads, for `encode_key`
    DataError, RecipeError, TaskError     errors that end a command with one sentence and exit code 2

What the packaged tasks docqa, protein and temporal need beside these:

    RecordEncode, choose_held_out, Samples, TokenizedDataset    parsing before encoding, and a split of the task's own
    as_record, count_chains, describe_unknown    what a record holds, for `dstrain data check`
    get_or_build, ResourceLimits, SubprocessResult, run_limited    a cache, and a library in a process with limits
    make_random_state, RESIDUE_STREAM    random numbers that are the same for any number of processes
    choose_layers               the layers that recompute their activations (model.gradient_checkpointing)
    check_limits, Fault, one_line, installed_version, DATA_KEYS, NO_TRAIN_DATA    checks of options and recipe
    Source, WrappedSource, WatchedFile, cut_source    sources of records that are made from other ones
    Conversation, Message, ParsedPrompt, PromptAnswers, RecordWithImages, StoredPrompts, EncodeResult, IMAGE_PLACEHOLDER,
    PlaceholderExpansion, encode_answers, messages_to_transcript, read_system, ANSWER_METRICS, LoraConfig, DatasetConfig
                                what a task that derives from `dstrain.tasks.sft.SFT` parses, encodes and compares
    read_content, decode_image, count_frames, describe_content, UNKNOWN_CONTENT, IMAGE_STREAM    files of images
    open_regular_file, atomic_write, display_path, describe_unread, NOT_REGULAR, json_type_name    files, and messages on them
    EncodedPrompt, EncodingConfig, SOFT_TOKEN_ID, insert_soft_tokens, has_images    prompts, and inputs that are no text
    BaseSource, RowsSource, ParquetSource, SOURCE_TYPES, Columns, Record, file_extension, read_whole_file, LABEL_NAMES,
    yaml_key, try_parse, count_series    readers of other files
    ModelSource, ModelConfig, ModelValidator, read_config, resolve_base_model, is_multimodal, assign, full_shape,
    check_freeze_and_groups, check_vocab_size, check_weight_files, MISSING_MODEL, TEMPORAL_TYPE, is_temporal_folder,
    disable_transformers_logging    a transformers model of a class of its own, around the one that the recipe names
    AnswerMetric, TrainDatasetConfig, UsageError    types, and an error of a wrong call
"""

from dstrain.batch import Batch
from dstrain.cache import file_digest, get_or_build
from dstrain.config.schema import DatasetConfig, LoraConfig, ModelConfig, RunConfig, TrainDatasetConfig, check_limits
from dstrain.data.content import count_chains, count_series, describe_unknown
from dstrain.data.dataset import Dataset, Samples
from dstrain.data.encoding.chat_template import messages_to_transcript, tokenizer_fingerprint
from dstrain.data.encoding.conversations import SOFT_TOKEN_ID, EncodedPrompt, encode_answers, insert_soft_tokens
from dstrain.data.encoding.rendering import EncodingConfig, PlaceholderExpansion
from dstrain.data.formats.answers import PromptAnswers
from dstrain.data.formats.conversations import Conversation, ParsedPrompt
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message, has_images, json_type_name, read_system
from dstrain.data.limited_process import ResourceLimits, SubprocessResult, run_limited
from dstrain.data.loading.rows import attention_mask, pad
from dstrain.data.prepare import NO_TRAIN_DATA, ExampleSettings, RecordEncode, choose_held_out, prepare
from dstrain.data.records import LABEL_NAMES, EncodeResult, Record, as_record, try_parse, yaml_key
from dstrain.data.rng import IMAGE_STREAM, RESIDUE_STREAM, make_random_state
from dstrain.data.sources.base import BaseSource, Columns, ConcatSource, Source, WrappedSource, cut_source
from dstrain.data.sources.files import SOURCE_TYPES, RowsSource, file_extension, read_whole_file
from dstrain.data.sources.open import open_source
from dstrain.data.sources.parquet import ParquetSource
from dstrain.data.token_store import TokenColumns, TokenizedDataset, TokenStore
from dstrain.data.vision.images import (
    UNKNOWN_CONTENT,
    count_frames,
    decode_image,
    describe_content,
    read_content,
    read_image,
    resolve_image,
)
from dstrain.errors import BadRecord, DataError, Fault, RecipeError, TaskError, UsageError, one_line
from dstrain.files import NOT_REGULAR, WatchedFile, atomic_write, describe_unread, display_path, open_regular_file
from dstrain.models.checks import ModelValidator
from dstrain.models.folder import TEMPORAL_TYPE, is_temporal_folder, resolve_base_model
from dstrain.models.gradient_checkpointing import choose_layers
from dstrain.models.load import MISSING_MODEL, check_vocab_size, read_config
from dstrain.models.params import assign, check_freeze_and_groups, full_shape
from dstrain.models.processors import is_multimodal
from dstrain.models.weights import check_weight_files, disable_transformers_logging
from dstrain.patching import installed_version
from dstrain.tasks.common.answers import ANSWER_METRICS
from dstrain.tasks.common.generation import GenerationMetrics, StoredPrompts
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.record_task import RecordTask, policy_of
from dstrain.tasks.common.task import (
    DATA_KEYS,
    AnswerMetric,
    Checks,
    Export,
    Loss,
    LossInputs,
    Reference,
    Scorer,
    Split,
    Task,
)

__all__ = [
    "ANSWER_METRICS",
    "DATA_KEYS",
    "IMAGE_PLACEHOLDER",
    "IMAGE_STREAM",
    "LABEL_NAMES",
    "MISSING_MODEL",
    "NOT_REGULAR",
    "NO_TRAIN_DATA",
    "RESIDUE_STREAM",
    "SOFT_TOKEN_ID",
    "SOURCE_TYPES",
    "TEMPORAL_TYPE",
    "UNKNOWN_CONTENT",
    "AnswerMetric",
    "BadRecord",
    "BaseSource",
    "Batch",
    "Checks",
    "Columns",
    "ConcatSource",
    "Conversation",
    "DataError",
    "Dataset",
    "DatasetConfig",
    "EncodeResult",
    "EncodedPrompt",
    "EncodingConfig",
    "ExampleSettings",
    "Export",
    "Fault",
    "GenerationMetrics",
    "LoraConfig",
    "Loss",
    "LossInputs",
    "Message",
    "ModelConfig",
    "ModelSource",
    "ModelValidator",
    "ParquetSource",
    "ParsedPrompt",
    "PlaceholderExpansion",
    "PromptAnswers",
    "RecipeError",
    "Record",
    "RecordEncode",
    "RecordTask",
    "RecordWithImages",
    "Reference",
    "ResourceLimits",
    "RowsSource",
    "RunConfig",
    "Samples",
    "Scorer",
    "Source",
    "Split",
    "StoredPrompts",
    "SubprocessResult",
    "Task",
    "TaskError",
    "TokenColumns",
    "TokenStore",
    "TokenizedDataset",
    "TrainDatasetConfig",
    "UsageError",
    "WatchedFile",
    "WrappedSource",
    "as_record",
    "assign",
    "atomic_write",
    "attention_mask",
    "check_freeze_and_groups",
    "check_limits",
    "check_vocab_size",
    "check_weight_files",
    "choose_held_out",
    "choose_layers",
    "count_chains",
    "count_frames",
    "count_series",
    "cut_source",
    "decode_image",
    "describe_content",
    "describe_unknown",
    "describe_unread",
    "disable_transformers_logging",
    "display_path",
    "encode_answers",
    "file_digest",
    "file_extension",
    "full_shape",
    "get_or_build",
    "has_images",
    "insert_soft_tokens",
    "installed_version",
    "is_multimodal",
    "is_temporal_folder",
    "json_type_name",
    "make_random_state",
    "messages_to_transcript",
    "one_line",
    "open_regular_file",
    "open_source",
    "pad",
    "policy_of",
    "prepare",
    "read_config",
    "read_content",
    "read_image",
    "read_system",
    "read_whole_file",
    "resolve_base_model",
    "resolve_image",
    "run_limited",
    "tokenizer_fingerprint",
    "try_parse",
    "yaml_key",
]
