"""Files in MXFP4 and FP8 are read as the values that they stand for, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError
from dstrain.models.dequantize import dequantize, open_dequantized
from dstrain.models.load import load_model, read_config
from dstrain.models.weights import LazyTensor, check_weight_files
from dstrain.tasks import make_task
from tests.quantized_bases import FP8, save_fp8, save_mxfp4
from tests.tiny import tiny_recipe

SAVED: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "mxfp4": save_mxfp4,
    "fp8 in blocks": save_fp8,
    "fp8 in blocks, in three files": lambda at: save_fp8(at, files=3),
    "fp8 of separate experts": lambda at: save_fp8(at, "deepseek_v3"),
    "fp8 with one scale for each matrix": lambda at: save_fp8(at, "mistral", "matrices"),
    "compressed-tensors, one scale for each row": lambda at: save_fp8(at, "llama", "rows"),
    "tied embeddings": lambda at: save_fp8(at, "llama", tie_word_embeddings=True),
}


def load(at: Path, dtype: str = "float32") -> PreTrainedModel:
    model = ModelConfig(path=str(at), dtype=dtype)
    return load_model(AutoModelForCausalLM, model, read_config(model), 0)


def lazy(values: torch.Tensor) -> LazyTensor:
    name = {torch.uint8: "U8", FP8: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}.get(values.dtype, "F32")
    return LazyTensor(tuple(values.shape), name, is_float=False, read=lambda: values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SAVED)
def test_a_model_has_the_values_that_its_files_stand_for(kind: str, dtype: str, tmp_path: Path) -> None:
    wanted = SAVED[kind](tmp_path)
    model = load(tmp_path, dtype)
    assert not hasattr(model.config, "quantization_config")
    found = revert_weight_conversion(model, model.state_dict())
    if model.config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        found.pop("lm_head.weight", None)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        # a family may keep its router in fp32
        assert found[name].dtype in {getattr(torch, dtype)} | ({torch.float32} if "gate." in name else set())
        assert torch.equal(found[name], values.to(found[name].dtype)), name


def test_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "base")
    model = load(tmp_path / "base", "bfloat16")
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(values, again[name]) for name, values in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_and_scale_of_mxfp4_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 254, 1, 1)
    scales = torch.arange(254, dtype=torch.uint8).view(1, 254, 1).repeat(2, 1, 16)
    scales[:, 250:] = 127  # 2 ** 126 times 6 is no number of fp32
    stored = {"w_blocks": lazy(blocks), "w_scales": lazy(scales)}
    ((key, tensor),) = dequantize(stored, {"quant_method": "mxfp4"}, dtype).values()
    values = tensor.read()
    assert key == "w"
    assert tensor.shape == tuple(values.shape) == (2, 512, 254)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(values, wanted)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 128), (130, 300), (3, 40, 130), (1, 1)])
def test_fp8_is_multiplied_by_the_scale_of_its_block(dtype: Any, scale_dtype: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    codes = (torch.randn(shape) * 30).to(dtype)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = torch.rand(grid).to(scale_dtype)
    stored = {"w": lazy(codes), "w_scale_inv": lazy(scales)}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    ((_, tensor),) = dequantize(stored, settings, torch.float32).values()
    values, wanted = tensor.read(), codes.float()
    for row in range(shape[-2]):
        for column in range(0, shape[-1], 128):
            wanted[..., row, column : column + 128] *= scales.float()[..., row // 128, column // 128, None]
    assert torch.equal(values, wanted)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(at: Path) -> None:
        tensors = load_file(at / "model.safetensors")
        change(tensors)
        save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})

    return apply


def truncate(at: Path) -> None:
    file = at / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def as_pickle(at: Path) -> None:
    torch.save(load_file(at / "model.safetensors"), at / "pytorch_model.bin")
    (at / "model.safetensors").unlink()


def without_shard(at: Path) -> None:
    save_fp8(at, files=2)
    (at / "model.safetensors").unlink()
    (at / "model-1.safetensors").unlink()


BLOCKS = "model.layers.0.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.0.mlp.experts.gate_up_proj_scales"
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spoil", "wanted"),
    [
        ("mxfp4", change_tensors(lambda at: at.pop(SCALES)), rf"'{BLOCKS}' \(U8\) has no {SCALES}"),
        ("mxfp4", change_tensors(lambda at: at.pop(BLOCKS)), rf"'{SCALES}' is stored as U8, and only MXFP4 and FP8 can be dequantized"),
        ("mxfp4", change_tensors(lambda at: at.update({BLOCKS: at[BLOCKS][:, :, :1].clone()})), rf"'{BLOCKS}' \(U8\) has the shape \(4, 64, 1, 16\), and its scales \(4, 64, 2\), which do not fit"),
        ("mxfp4", change_tensors(lambda at: at.update({BLOCKS: at[BLOCKS][:, :, :1].clone(), SCALES: at[SCALES][:, :, :1].clone()})), r"gate_up_proj' is \(4, 32, 64\) in its files and \(4, 64, 64\) in the model"),
        ("mxfp4", truncate, r"is damaged"),
        ("fp8", change_tensors(lambda at: at.pop(f"{WEIGHT}_scale_inv")), rf"'{WEIGHT}' \(F8_E4M3\) has no {WEIGHT}_scale_inv or {WEIGHT}_scale;"),
        ("fp8", change_tensors(lambda at: at.update({f"{WEIGHT}_scale_inv": torch.ones(2, 2)})), rf"'{WEIGHT}' \(F8_E4M3\) has the shape \(48, 32\), and its scales \(2, 2\), which do not fit"),
        ("fp8", change_tensors(lambda at: at.update({WEIGHT: torch.ones(48, 32, dtype=torch.int8)})), rf"'{WEIGHT}' is stored as I8, and only MXFP4 and FP8 can be dequantized"),
        ("fp8", change_tensors(lambda at: at.update({WEIGHT: at[WEIGHT][0].clone()})), rf"'{WEIGHT}' \(F8_E4M3\) has the shape \(32,\)"),
        ("fp8", as_pickle, r"pytorch_model\.bin holds quantized weights in a format other than safetensors"),
        ("fp8", without_shard, r"model-1\.safetensors is missing, but the shard index names it"),
    ],
)  # fmt: skip
def test_files_that_do_not_hold_their_values_are_refused(
    kind: str, spoil: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    at = tmp_path / "base"
    (save_mxfp4 if kind == "mxfp4" else save_fp8)(at)
    spoil(at)
    values = tiny_recipe("sft", tmp_path)
    tokenizer: Any = make_task(RunConfig.model_validate(values))
    tokenizer.tokenizer.save_pretrained(str(at))

    def check() -> None:
        check_weight_files(ModelConfig(path=str(at)))
        make_task(RunConfig.model_validate({**values, "model": {"path": str(at)}})).checks.run()

    with pytest.raises(RecipeError, match=rf"model\.path: .*{wanted}"):
        check()


@pytest.mark.parametrize(
    "spoil",
    [
        change_tensors(lambda at: at[f"{WEIGHT}_scale_inv"].fill_(float("inf"))),
        change_tensors(lambda at: at.update({WEIGHT: torch.full((48, 32), float("nan")).to(FP8)})),
    ],
)
def test_values_that_are_no_numbers_are_refused_on_loading(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    save_fp8(tmp_path)
    spoil(tmp_path)
    with pytest.raises(RecipeError, match=rf"model\.path: '{WEIGHT}' or its scales hold values that are no numbers"):
        load(tmp_path)


def test_modules_left_in_16_bits_are_read_as_they_are(tmp_path: Path) -> None:
    """By their dtype in the files: `modules_to_not_convert` may name them in any way."""
    wanted = save_fp8(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.self_attn.q_proj", "re:.*norm", None]
    file.write_text(json.dumps(config))
    found = open_dequantized(tmp_path, torch.float32)
    assert found["lm_head.weight"][1].dtype == "BF16"
    assert {key for key, _ in found.values()} == wanted.keys()
    assert torch.equal(load(tmp_path).state_dict()[WEIGHT], wanted[WEIGHT])
