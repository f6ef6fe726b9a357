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
    open_source, Source, ConcatSource, prepare, policy_of, ExampleSettings, TokenColumns, TokenStore
                                records of files, and the cache of their examples, as RecordTask uses them
    RunConfig, DatasetConfig, Dataset, Split    the recipe, a file in it; what `examples` returns, and its argument
    file_digest, tokenizer_fingerprint    digests of what an encoder reads, for `encode_key`
    check_limits, Fault         a number between limits; a key, what is wrong with it, and the fix
    DataError, RecipeError, TaskError     errors that end a command with one sentence and exit code 2

A task with readers or a model of its own imports more: docs/tasks/own.md names the modules.
"""

from dstrain.batch import Batch
from dstrain.cache import file_digest
from dstrain.config.schema import DatasetConfig, RunConfig, check_limits
from dstrain.data.dataset import Dataset
from dstrain.data.encoding.chat_template import tokenizer_fingerprint
from dstrain.data.loading.rows import attention_mask, pad
from dstrain.data.prepare import ExampleSettings, prepare
from dstrain.data.sources.base import ConcatSource, Source
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import TokenColumns, TokenStore
from dstrain.data.vision.images import read_image, resolve_image
from dstrain.errors import BadRecord, DataError, Fault, RecipeError, TaskError
from dstrain.tasks.common.generation import GenerationMetrics
from dstrain.tasks.common.record_task import RecordTask, policy_of
from dstrain.tasks.common.task import Checks, Export, Loss, LossInputs, Reference, Scorer, Split, Task

__all__ = [
    "BadRecord",
    "Batch",
    "Checks",
    "ConcatSource",
    "DataError",
    "Dataset",
    "DatasetConfig",
    "ExampleSettings",
    "Export",
    "Fault",
    "GenerationMetrics",
    "Loss",
    "LossInputs",
    "RecipeError",
    "RecordTask",
    "Reference",
    "RunConfig",
    "Scorer",
    "Source",
    "Split",
    "Task",
    "TaskError",
    "TokenColumns",
    "TokenStore",
    "attention_mask",
    "check_limits",
    "file_digest",
    "open_source",
    "pad",
    "policy_of",
    "prepare",
    "read_image",
    "resolve_image",
    "tokenizer_fingerprint",
]
