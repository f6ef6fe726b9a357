"""The committed table of keys is DeepSpeed's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from dstrain.preset.keys import find_key, load_key_schema

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "make_ds_keys.py"


def _tool() -> ModuleType:
    """tools/make_ds_keys.py, which is a script and in no package."""
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("deepspeed is not installed")
    if not installed.startswith(f"{load_key_schema()['deepspeed']}."):
        pytest.skip(f"the table is of DeepSpeed {load_key_schema()['deepspeed']}, and {installed} is installed")
    spec = importlib.util.spec_from_file_location("make_ds_keys", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.filterwarnings("ignore")
def test_the_committed_table_is_what_deepspeed_accepts() -> None:
    made = json.loads(json.dumps(_tool().make()))
    mend = f"run: python {TOOL.relative_to(ROOT)}"
    assert made["removed"] == load_key_schema()["removed"], mend
    assert sorted(made["keys"]) == sorted(load_key_schema()["keys"]), mend
    for name, key in made["keys"].items():
        assert key == load_key_schema()["keys"][name], f"{name}; {mend}"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("zero_optimization.stage", "int"),
        ("zero_optimization.offload_optimizer.device", "str"),
        ("zero_optimization.stage3_max_live_parameters", "int"),
        ("bf16.enabled", "bool"),
        ("fp16.loss_scale", "float"),
        ("activation_checkpointing.cpu_checkpointing", "bool"),
        ("aio.block_size", "int"),
        ("checkpoint.writer.type", "str"),
        ("data_types.grad_accum_dtype", "str"),
        ("flops_profiler.module_depth", "int"),
        ("comms_logger.prof_ops", "list"),
        ("compile.deepcompile", "bool"),
        ("timers.throughput.enabled", "bool"),
    ],
)
def test_keys_of_every_block_have_their_type(path: str, kind: str) -> None:
    key = find_key(tuple(path.split(".")))
    assert key is not None
    assert key["type"] == kind


def test_old_names_point_to_the_new_ones() -> None:
    assert find_key(("bfloat16",))["deprecated"] == "bf16"  # type: ignore[index]
    assert find_key(("zero_optimization", "cpu_offload"))["deprecated"] == "offload_optimizer"  # type: ignore[index]
    assert find_key(("zero_optimization", "max_live_parameters"))["deprecated"] == "stage3_max_live_parameters"  # type: ignore[index]


def test_an_unknown_path_is_none() -> None:
    assert find_key(("zero_optimisation",)) is None
    assert find_key(("zero_optimization", "offload_optimizer", "devise")) is None
