"""What a run asks of memory: its largest pass, its settings, its processes and the memory of their devices."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from dstrain.config.resolve import BatchPlan
from dstrain.config.schema import RunConfig
from dstrain.errors import Fault, RecipeError, UsageError
from dstrain.launch.topology import find_gpu, list_gpu_uuids, visible_devices
from dstrain.models.attention.layer_kinds import find_wrapper_problem, read_layer_kinds
from dstrain.models.chunk_sizes import QUERY_BLOCK, SAVED_BYTES, TILE_TOKENS
from dstrain.planner.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The largest forward pass of a step, on one process."""

    rows: int
    tokens: int
    """Tokens that the decoder computes on one process."""
    targets: int
    """Tokens in the loss; all of them where their number is not known."""
    images: int = 0
    image_tokens: int = 0
    """Tokens of all images; 0: those of `images` images of the usual size."""
    is_packed: bool = False
    has_mask: bool = False
    """True where attention gets an explicit mask, and each query head a copy of its keys."""
    is_eager: bool = False
    """True where attention keeps the logits of all pairs of tokens."""
    checkpointed: float = 1.0
    """Share of the layers that recompute their activations."""
    tile_tokens: int = 0
    """Most tokens of a tile of MLPs and norms; 0 without tiles."""
    tiles_all_layers: bool = False
    """True where layers that are not recomputed have tiles too."""
    is_scored: bool = False
    has_adapter_dropout: bool = False
    """True where each adapter drops values of its input."""
    device: str = "cuda"
    sequence: int = 1
    """Processes that share the pass (parallel.sequence)."""
    keys: float | None = None
    """Keys that attention on a CPU computes for a query, on average; None: those of sequences of `length`."""

    @property
    def length(self) -> int:
        """Return the tokens of one sequence on average."""
        return self.tokens * self.sequence // max(self.rows, 1)

    def attention_weights(self, heads: int, width: int) -> float:
        """Return the bytes per token of the attention weights that a packed batch on a CPU keeps for its gradient."""
        if not self.is_packed or self.device != "cpu":
            return 0.0
        keys = mean_block_keys(self.length) if self.keys is None else self.keys
        return min(width * heads * keys, SAVED_BYTES / max(self.tokens, 1))

    @property
    def positions(self) -> int:
        """Return the positions of one row: a packed batch has one row."""
        return self.tokens if self.is_packed else self.length


def mean_block_keys(length: int) -> float:
    """Return the keys of a query on average: each block of queries computes all keys up to its last query."""
    blocks, rest = divmod(length, QUERY_BLOCK)
    return (QUERY_BLOCK**2 * blocks * (blocks + 1) / 2 + rest * length) / max(length, 1)


def make_workload(config: RunConfig, shape: ModelShape, batch: BatchPlan, device: str) -> Workload:
    """Return the pass with as many tokens as the recipe allows: each row has data.max_length.

    Raises RecipeError where processes cannot share it as parallel.sequence says.
    """
    micro, length = batch.micro, config.data.max_length
    rows = micro * shape.task.rows_per_sample
    tokens = rows * length
    if batch.tokens is not None:
        # A longer sample is a pass of its own.
        tokens = min(tokens, max(batch.tokens, shape.task.rows_per_sample * length))
        rows = max(1, tokens // length)
    images, image_tokens = count_images(shape, length)
    lora, tiled = config.model.lora, config.model.tiled_mlp
    takes_images = shape.text_type != shape.model_type
    kinds = read_layer_kinds(shape.text_type)
    is_known = kinds.unknown is None and not (takes_images and find_wrapper_problem(shape.model_type))
    packed = bool(config.batch.packing) and shape.task.packs_batches and is_known and not config.model.trust_remote_code
    sequence = config.parallel.sequence
    if sequence > 1 and kinds.recurrent:
        problem = (
            f"is {sequence}, but {kinds.recurrent[0]} reads a sequence token by token, which processes cannot share"
        )
        raise RecipeError(Fault("parallel.sequence", problem, "write 1"))
    if sequence > 1 and (not packed or shape.heads % sequence):
        reason = "a multiple of it is not the number of attention heads, {}" if packed else "batches are not packed"
        problem = f"is {sequence}, but {reason.format(shape.heads)}"
        raise RecipeError(Fault("parallel.sequence", problem, "write 1, or a number that divides the heads"))
    tokens = ceil(tokens / sequence)
    return Workload(
        rows=rows, tokens=tokens, targets=tokens, sequence=sequence, images=rows * images, image_tokens=rows * image_tokens, is_packed=packed,
        is_eager=config.model.attn_implementation == "eager" or shape.has_softcap or shape.model_type == "gpt_oss",
        has_mask=not packed and (takes_images or not kinds.needs_no_mask),
        checkpointed=float(config.model.gradient_checkpointing), is_scored=shape.task.is_scored, device=device,
        has_adapter_dropout=lora is not None and lora.dropout > 0 and not shape.task.disables_dropout,
        tile_tokens=0 if tiled is False else TILE_TOKENS if isinstance(tiled, (bool, str)) else tiled,
        tiles_all_layers=tiled is not False and tiled != "auto",
    )  # fmt: skip


PAGE_INCHES = 8.5 * 11
"""Area of a page in US letter format."""
MAX_IMAGE_PIXELS = 12_845_056
"""Of Qwen2.5-VL's processor, which reduces larger images (preprocessor_config.json, max_pixels)."""


def count_images(shape: ModelShape, length: int) -> tuple[int, int]:
    """Return the images of a row of `length` tokens, and their tokens where these depend on the images' size."""
    vision, images = shape.vision, shape.task.images_per_row
    if vision is None:
        return 0, 0
    if not vision.pixels_per_token:
        return min(images, max(1, length // vision.tokens)), 0
    tokens = vision.tokens
    if shape.task.page_dpi is not None:
        pixels = min(PAGE_INCHES * shape.task.page_dpi**2, MAX_IMAGE_PIXELS)
        tokens = ceil(pixels / vision.pixels_per_token)
    return images, min(images * tokens, length)


ALLOCATOR_ENV_VARS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator; a run sets the first where neither is set."""


def has_expandable_segments(env: Mapping[str, str]) -> bool:
    """Return True where torch's allocator on a GPU gets segments that can grow: unless a variable says otherwise."""
    given = [env[name] for name in ALLOCATOR_ENV_VARS if name in env]
    return not given or any("expandable_segments:true" in one.lower().replace(" ", "") for one in given)


GPU_MEMORY_ENV = "DSTRAIN_GPU_MEMORY"
"""Environment variable with the memory that a run may use per GPU, or per process on a CPU: `24GiB`."""
GPU_SOURCES = ("pynvml", "nvidia-smi")
"""Where `detect_gpu_bytes` reads the GPUs of this machine."""
COMMON_GPU_BYTES = tuple(size * 2**30 for size in (8, 12, 16, 24, 40, 80))
"""Sizes of a plan on a machine without a GPU."""
MAX_NUMBER = 1e18
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processes of a run: one per GPU, the same number on each host."""

    gpus_per_node: int = 1
    nodes: int = 1
    kind: Literal["cuda", "cpu"] = "cuda"
    bf16: bool = True
    """True where the GPUs support bfloat16."""

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.gpus_per_node * self.nodes


MIN_BYTES = 2**20
"""A number without a unit below this was meant in GiB or MiB."""


def parse_bytes(text: str, option: str) -> int:
    """Return `24GiB`, `24G` or `24 GB` as bytes; units are powers of 1024. Raises UsageError naming the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text, re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < MAX_NUMBER:
        raise UsageError(f"{option}: {text!r} is not a size of memory; write it like 24GiB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < MIN_BYTES:
        what = "means bytes, less than any GPU has" if not match[2] else "is less than any GPU has"
        raise UsageError(f"{option}: {text!r} {what}; write {match[1]}GiB")
    return size


def detect_gpu_bytes(env: Mapping[str, str]) -> tuple[list[int], str]:
    """Return the free bytes of each visible GPU, and where they were read.

    DSTRAIN_GPU_MEMORY stands for any GPU. Without a driver the list is empty. Raises UsageError for a wrong variable.
    """
    if capped := env.get(GPU_MEMORY_ENV):
        return [parse_bytes(capped, GPU_MEMORY_ENV)], GPU_MEMORY_ENV
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return [], "no visible GPU"
    found, source = _ask_nvml() or (_ask_nvidia_smi(), "nvidia-smi")
    return _visible(found, env.get("CUDA_VISIBLE_DEVICES")), source


def _visible(sizes: list[int], listed: str | None) -> list[int]:
    """Return the sizes of the GPUs that CUDA_VISIBLE_DEVICES lists; all of them where it lists none that is known."""
    uuids = list_gpu_uuids(listed)
    names = visible_devices(listed, len(sizes), uuids)
    if names and names[0].startswith("MIG-"):
        return _ask_nvml_slice(names[0]) or sizes
    indices = [name if name.isdecimal() else find_gpu(name, uuids) for name in names]
    return [sizes[int(index)] for index in indices if index.isdecimal()] or sizes


def _ask_nvml_slice(uuid: str) -> list[int]:
    """Return the free bytes of a MIG slice; nothing where they are not told."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free)]
    except Exception:  # as in `_ask_nvml`
        return []


def host_bytes() -> int:
    """Return the host's available memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def _ask_nvml() -> tuple[list[int], str] | None:
    """Return the free bytes of the GPUs through pynvml; None without the package or a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles], "pynvml"
    except Exception:  # NVMLError derives from Exception, and its subclasses depend on the driver
        return None


def _ask_nvidia_smi() -> list[int]:
    return [int(line) * 2**20 for line in _query_nvidia_smi("memory.free") if line.isdecimal()]


def _query_nvidia_smi(field: str) -> list[str]:
    """Return a field of each GPU; nothing where it is not told."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def detect_gpu_name(env: Mapping[str, str]) -> str | None:
    """Return the name of this machine's first GPU; None where it is not told, and for a MIG slice."""
    if "MIG-" in env.get("CUDA_VISIBLE_DEVICES", ""):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return name.decode() if isinstance(name, bytes) else str(name)
    except Exception:  # as in `_ask_nvml`
        return next(iter(_query_nvidia_smi("name")), None)
