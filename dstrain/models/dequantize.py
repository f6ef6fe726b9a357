"""Weight files in MXFP4 or FP8, read as the weights that they stand for, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._pytree import tree_map_only
from transformers.modeling_utils import str_to_torch_dtype

from dstrain.errors import MAX_NAMES, Fault, RecipeError
from dstrain.models.folder import find_quantization, read_json_object
from dstrain.models.patches import weight_files_opened_by
from dstrain.models.weights import QUANTIZED_DTYPE, LazyTensor, find_weight_files, open_tensors

# Shapes: E experts, R rows, C columns.

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""What follows the name of an FP8 weight in the name of its scales. A weight is multiplied by either kind."""
ACTIVATION_SCALES = ("input_scale", "activation_scale")
"""Scales beside an FP8 weight that do not change its values."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each code of FP4 (E2M1): OCP Microscaling Formats specification 1.0, section 5.3.3."""
EXPONENT_BIAS = 127
"""A scale of one byte (E8M0) stands for 2 ** (byte - 127), 255 for no number: section 5.4.1 there."""
CHUNK_NUMEL = 2**22
"""Values that are computed or tested at once."""
QUANTIZED_FIX = "download the model again, or name the original model in 16 bits"

Dequantized = tuple[tuple[int, ...], Callable[[], torch.Tensor]]
"""The shape of a weight, and the function that computes it."""


def read_quantization(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization_config of a model folder; None where its weights are not quantized."""
    file = folder / "config.json"
    return find_quantization(read_json_object(file, "model.path")) if file.is_file() else None


def open_dequantized(folder: Path, dtype: torch.dtype) -> dict[str, tuple[str, LazyTensor]]:
    """Return `dequantize` of all weights in a quantized model's folder. Raises RecipeError as it does, and for pickles."""
    files, settings = find_weight_files(folder, "model.path"), read_quantization(folder)
    assert settings is not None, "its weights are not quantized"
    if pickles := [file for file in files if file.suffix != ".safetensors"]:
        problem = f"{pickles[0]} holds quantized weights in a format other than safetensors"
        raise RecipeError(Fault("model.path", problem, "download the model as safetensors"))
    return dequantize(open_tensors(files), settings, dtype)


def dequantize(
    stored: Mapping[str, LazyTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, tuple[str, LazyTensor]]:
    """Return key in the files -> (key in the model, tensor that is dequantized to `dtype` when it is read); no scales.

    `settings`: the quantization_config. Raises RecipeError for quantized tensors of other kinds, and for scales that are
    missing or do not fit.
    """
    found = {name: (name, tensor) for name, tensor in stored.items()}
    faults = []
    function: Callable[..., Dequantized | None]
    for name, tensor in stored.items():
        if tensor.dtype == "U8" and name.endswith("_blocks"):
            key = name.removesuffix("_blocks")
            partners, function = [f"{key}_scales"], _dequantize_mxfp4
        elif tensor.dtype in FP8_DTYPES:
            key, partners, function = name, [f"{name}{suffix}" for suffix in SCALE_SUFFIXES], _dequantize_fp8
            for unused in ACTIVATION_SCALES:
                found.pop(f"{name.rpartition('.')[0]}.{unused}", None)
        else:
            continue
        scales = next((stored[partner] for partner in partners if partner in stored), None)
        made = None if scales is None else function(tensor, scales, settings, dtype)
        for partner in partners:
            found.pop(partner, None)
        found.pop(name)
        if made is not None:
            shape, compute = made
            read = partial(_compute_finite, name, compute)
            found[name] = key, LazyTensor(shape, str(dtype).removeprefix("torch."), is_float=True, read=read)
            continue
        problem = f"has no {' or '.join(partners)}"
        if scales is not None:
            problem = f"has the shape {tensor.shape}, and its scales {scales.shape}, which do not fit"
        faults.append(Fault("model.path", f"'{name}' ({tensor.dtype}) {problem}", QUANTIZED_FIX))
    for name, (_, tensor) in found.items():
        if len(tensor.shape) > 1 and QUANTIZED_DTYPE.fullmatch(tensor.dtype):
            problem = f"'{name}' is stored as {tensor.dtype}, and only MXFP4 and FP8 can be dequantized"
            faults.append(Fault("model.path", problem, QUANTIZED_FIX))
    if faults:
        raise RecipeError(faults[:MAX_NAMES])
    return found


def _compute_finite(name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    values = compute()
    if not all(bool(part.isfinite().all()) for part in values.view(-1).split(CHUNK_NUMEL)):
        problem = f"'{name}' or its scales hold values that are no numbers, or too large for {values.dtype}"
        raise RecipeError(Fault("model.path", problem, QUANTIZED_FIX))
    return values


def _dequantize_mxfp4(
    blocks: LazyTensor, scales: LazyTensor, settings: Mapping[str, Any], dtype: torch.dtype
) -> Dequantized | None:
    """Dequantize codes (E, R, blocks of a row, bytes of a block), two in a byte, the lower bits first, to (E, C, R).

    Scales: one byte per block. The same as transformers' `convert_moe_packed_tensors`. None for other shapes.
    """
    if len(blocks.shape) != 4 or scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
        return None
    experts, rows, columns = *blocks.shape[:2], 2 * prod(blocks.shape[2:])

    def compute() -> torch.Tensor:
        values = torch.empty(experts, columns, rows, dtype=dtype)
        table = torch.tensor([(FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]) for byte in range(256)])
        # one expert at a time: indices and fp32 values need several times the memory of the result
        for result, codes, exponents in zip(values, blocks.read(), scales.read(), strict=True):
            powers = exponents.unsqueeze(-1).int() - EXPONENT_BIAS
            result.copy_(torch.ldexp(table[codes.int()].flatten(-2), powers).flatten(-2).T)
        return values

    return (experts, columns, rows), compute


def _dequantize_fp8(
    weight: LazyTensor, scales: LazyTensor, settings: Mapping[str, Any], dtype: torch.dtype
) -> Dequantized | None:
    """Dequantize codes (..., R, C): in fp32, rounded once.

    Scales: one for each block of the size in `settings`, for each row, or for the matrix. None for other shapes. Unlike
    transformers, it takes the size of a block from `settings`: the last blocks of a matrix may be smaller.
    """
    if len(weight.shape) < 2:
        return None
    *leading, rows, columns = weight.shape
    grid = (
        scales.shape if len(scales.shape) > 1 else (*scales.shape, 1, 1)[:2]
    )  # () and (R) stand for (1, 1) and (R, 1)
    sizes = [*_block_sizes(settings), (1, columns), (rows, columns)]
    fitting = (size for size in sizes if grid == (*leading, ceil(rows / size[0]), ceil(columns / size[1])))
    block = next(fitting, None)
    if block is None:
        return None
    height, width = block

    def compute() -> torch.Tensor:
        values, factors = torch.empty(weight.shape, dtype=dtype), scales.read()
        is_exponent = factors.dtype == torch.uint8
        factors = torch.exp2(factors.float() - EXPONENT_BIAS) if is_exponent else factors.float()
        step = height * max(1, CHUNK_NUMEL // (height * columns))
        matrices = values.view(-1, rows, columns), weight.read().view(-1, rows, columns), factors.view(-1, *grid[-2:])
        for result, codes, factor in zip(*matrices, strict=True):
            for start in range(0, rows, step):
                lines = slice(start, min(start + step, rows))
                chunk = factor[start // height : ceil(lines.stop / height)]
                per_value = chunk.repeat_interleave(height, 0).repeat_interleave(width, 1)
                result[lines] = codes[lines].float() * per_value[: lines.stop - start, :columns]
        return values

    return weight.shape, compute


def _block_sizes(settings: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the (rows, columns) of blocks that a quantization_config names: of fp8, of groups of compressed-tensors."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    for size in (settings.get("weight_block_size"), *(group.get("block_structure") for group in groups)):
        if isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size):
            yield size[0], size[1]


@contextmanager
def dequantized_files(dtype: torch.dtype) -> Iterator[None]:
    """Let transformers find dequantized weights in the files of a quantized model inside. Not thread-safe.

    It learns the shape of each tensor at once, and gets its values when it copies them: a process holds the values of the
    tensors in work besides its model, at ZeRO-3 besides its shards. Raises RecipeError for values that are no numbers.
    """
    faults: list[Fault] = []

    def read(tensor: LazyTensor) -> torch.Tensor:
        try:
            return tensor.read()
        except RecipeError as error:
            faults.extend(error.faults)
            raise

    @cache
    def open_folder(folder: Path) -> dict[str, tuple[str, LazyTensor]]:
        # All files of the model, which are there by now: the scales of a weight may be in another file.
        tensors = open_dequantized(folder, dtype)
        return {name: (key, replace(one, read=partial(read, one))) for name, (key, one) in tensors.items()}

    settings_of = cache(read_quantization)

    def open_file(file: str, **settings: Any) -> Any:
        opened, folder = safe_open(file, **settings), Path(file).parent
        if settings_of(folder) is None:
            return opened
        tensors = open_folder(folder)
        return _DequantizedFile(dict(tensors[name] for name in opened.keys() if name in tensors))  # noqa: SIM118

    try:
        with weight_files_opened_by(open_file):
            yield
    except Exception:
        if not faults:
            raise
    if faults:  # transformers may have caught the error, or raised another in its place
        raise RecipeError(faults[:MAX_NAMES])


class _DequantizedFile:
    """What transformers uses of a file that safetensors' `safe_open` has opened."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> _DequantizedFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        return [*self._tensors]

    def get_tensor(self, name: str) -> _DeferredTensor:
        return _DeferredTensor(self._tensors[name])

    get_slice = get_tensor


class _DeferredTensor(torch.Tensor):
    """A tensor in a file. Each operation on it reads the values, uses them and forgets them."""

    _source: LazyTensor

    @staticmethod
    def __new__(cls, source: LazyTensor) -> _DeferredTensor:
        dtype = str_to_torch_dtype.get(source.dtype) or getattr(torch, source.dtype)
        made: Any = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=dtype)
        made._source = source
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda tensor: tensor._source.read(), (args, kwargs or {}))
        return function(*args, **kwargs)

    # of a slice of safetensors
    def get_shape(self) -> list[int]:
        return [*self.shape]

    def get_dtype(self) -> str:
        return next(name for name, dtype in str_to_torch_dtype.items() if dtype == self.dtype)
