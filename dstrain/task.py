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
    RecordEncode, choose_held_out, Samples, TokenizedDataset    parsing before encoding, and a split of the task's own
    as_record, count_chains, describe_unknown    what a record holds, for `dstrain data check`
    get_or_build, ResourceLimits, SubprocessResult, run_limited    a cache, and a library in a process with limits
    make_random_state, RESIDUE_STREAM    random numbers that are the same for any number of processes
    choose_layers               the layers that recompute their activations (model.gradient_checkpointing)
    check_limits, Fault, one_line, installed_version, DATA_KEYS, NO_TRAIN_DATA    checks of options and recipe
    file_digest, tokenizer_fingerprint    digests of what an encoder reads, for `encode_key`
    DataError, RecipeError, TaskError     errors that end a command with one sentence and exit code 2
"""

from dstrain.batch import Batch
from dstrain.cache import file_digest, get_or_build
from dstrain.config.schema import RunConfig, check_limits
from dstrain.data.content import count_chains, describe_unknown
from dstrain.data.dataset import Dataset, Samples
from dstrain.data.encoding.chat_template import tokenizer_fingerprint
from dstrain.data.limited_process import ResourceLimits, SubprocessResult, run_limited
from dstrain.data.loading.rows import attention_mask, pad
from dstrain.data.prepare import NO_TRAIN_DATA, ExampleSettings, RecordEncode, choose_held_out, prepare
from dstrain.data.records import BadRecord, as_record
from dstrain.data.rng import RESIDUE_STREAM, make_random_state
from dstrain.data.sources.base import ConcatSource
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import TokenColumns, TokenizedDataset, TokenStore
from dstrain.data.vision.image_io import read_image, resolve_image
from dstrain.errors import DataError, Fault, RecipeError, TaskError, one_line
from dstrain.models.gradient_checkpointing import choose_layers
from dstrain.patching import installed_version
from dstrain.tasks.common.generation import GenerationMetrics
from dstrain.tasks.common.record_task import RecordTask, policy_of
from dstrain.tasks.common.task import (
    DATA_KEYS,
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
    "DATA_KEYS",
    "NO_TRAIN_DATA",
    "RESIDUE_STREAM",
    "BadRecord",
    "Batch",
    "Checks",
    "ConcatSource",
    "DataError",
    "Dataset",
    "ExampleSettings",
    "Export",
    "Fault",
    "GenerationMetrics",
    "Loss",
    "LossInputs",
    "RecipeError",
    "RecordEncode",
    "RecordTask",
    "Reference",
    "ResourceLimits",
    "RunConfig",
    "Samples",
    "Scorer",
    "Split",
    "SubprocessResult",
    "Task",
    "TaskError",
    "TokenColumns",
    "TokenStore",
    "TokenizedDataset",
    "as_record",
    "attention_mask",
    "check_limits",
    "choose_held_out",
    "choose_layers",
    "count_chains",
    "describe_unknown",
    "file_digest",
    "get_or_build",
    "installed_version",
    "make_random_state",
    "one_line",
    "open_source",
    "pad",
    "policy_of",
    "prepare",
    "read_image",
    "resolve_image",
    "run_limited",
    "tokenizer_fingerprint",
]
