"""Models: the same weights from the same seed, and nothing else that decides them."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import dstrain
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError, UsageError
from dstrain.models.load import (
    build_meta_model,
    clear_padding_idx,
    load_model,
    load_pretrained,
    read_config,
    set_pad_token,
)
from dstrain.models.weights import check_weight_files, config_fingerprint, weights_fingerprint
from dstrain.planner.shapes import read_base_shape
from dstrain.tasks import make_task
from dstrain.training.run_dir import write_run_config
from tests.tiny import tiny_recipe

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def build(seed: int = 0, **settings: Any) -> PreTrainedModel:
    model = ModelConfig(**({"config": LLAMA} | settings))
    config = read_config(model)
    config.num_labels = 1
    return load_model(AutoModelForSequenceClassification, model, config, seed)


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def test_weights_from_a_config_depend_on_the_seed_alone() -> None:
    first = build(3)
    torch.rand(17)
    assert same(first, build(3, attn_implementation="eager"))
    assert not same(first, build(4))
    assert first.config.use_cache, "as transformers has it: an export that says no would be slow"
    drawn = first.state_dict()
    assert float(drawn["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert drawn["score.weight"].any()
    assert torch.equal(drawn["model.norm.weight"], torch.ones(16))


@pytest.mark.parametrize("start", ["config", "path"])
def test_what_is_saved_generates_with_one_token_a_pass(start: str, tmp_path: Path) -> None:
    values = {name: value for name, value in LLAMA.items() if name != "model_type"}
    config = AutoConfig.for_model("llama", **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path / "base"))
    (tmp_path / "base" / "generation_config.json").unlink()
    model = ModelConfig(config=LLAMA) if start == "config" else ModelConfig(path=str(tmp_path / "base"))
    made = load_model(AutoModelForCausalLM, model, read_config(model), 0)
    made.save_pretrained(str(tmp_path / "out"))
    again: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    read: list[int] = []
    again.model.register_forward_pre_hook(
        lambda module, _, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    again.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert read == [3, 1, 1, 1]


def test_a_head_the_files_lack_is_drawn_from_the_seed(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(read_config(ModelConfig(config=LLAMA)))
    base.save_pretrained(str(tmp_path))
    made = [build(seed, config=None, path=str(tmp_path)) for seed in (1, 1, 2)]
    torch.rand(5)
    assert same(made[0], made[1])
    heads = [model.score.weight for model in made]
    assert heads[0].any()
    assert not torch.equal(heads[0], heads[2])
    bodies = [model.model.state_dict() for model in made]
    for name, value in base.model.state_dict().items():
        assert torch.equal(value, bodies[0][name])
        assert torch.equal(value, bodies[2][name])


def test_loaded_weights_are_float32_unless_asked_otherwise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build(dtype="bfloat16").save_pretrained(str(tmp_path))
    capfd.readouterr()
    assert build(config=None, path=str(tmp_path)).dtype == torch.float32
    assert "Loading weights" not in capfd.readouterr().err, "no progress bar in a file"
    assert build(config=None, path=str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16


def test_a_skeleton_has_every_name_and_no_memory() -> None:
    model = ModelConfig(config=LLAMA)
    config = read_config(model)
    config.num_labels = 1
    bones = build_meta_model(AutoModelForSequenceClassification, model, config)
    assert {name: p.shape for name, p in bones.named_parameters()} == {
        name: p.shape for name, p in build().named_parameters()
    }
    assert all(p.is_meta for p in bones.parameters())


def test_names_of_a_family_that_mean_the_same_are_known() -> None:
    assert read_config(ModelConfig(config={"model_type": "gpt2", "hidden_size": 8, "n_head": 2})).n_embd == 8


def test_whole_weights_pass_and_cut_ones_do_not(tmp_path: Path) -> None:
    build().save_pretrained(str(tmp_path), max_shard_size="4KB")
    model = ModelConfig(path=str(tmp_path))
    check_weight_files(model)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(RecipeError, match=rf"{shards[0].name} is damaged"):
        check_weight_files(model)


def test_a_pickle_with_code_as_weights_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "PWNED",)

    build().config.save_pretrained(str(tmp_path))
    torch.save({"weight": torch.ones(1), "evil": Evil()}, tmp_path / "pytorch_model.bin")
    wanted = r"model\.path: .*pytorch_model.bin holds more than tensors: .*so it was not read; if you trust the file"
    with pytest.raises(RecipeError, match=wanted):
        check_weight_files(ModelConfig(path=str(tmp_path)))
    assert not (tmp_path / "PWNED").exists()
    torch.save(build().state_dict(), tmp_path / "pytorch_model.bin")
    check_weight_files(ModelConfig(path=str(tmp_path)))


def test_what_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, who may run the tests."""
    build().save_pretrained(str(tmp_path))
    model, refused, closed = ModelConfig(path=str(tmp_path)), PermissionError(13, "Permission denied"), Path.open

    def no_weights(path: Path, *rest: Any) -> Any:
        if path.suffix == ".safetensors":
            raise refused
        return closed(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", no_weights)
        wanted = r"model.safetensors cannot be read \(Permission denied\); check the permissions of the file"
        with pytest.raises(RecipeError, match=wanted):
            check_weight_files(model)

    def no_folder(path: Any) -> Any:
        raise refused

    with monkeypatch.context() as patch:
        patch.setattr("dstrain.models.weights.os.listdir", no_folder)
        with pytest.raises(
            RecipeError, match=r"cannot be read \(Permission denied\); check the permissions of the fol"
        ):
            check_weight_files(model)


def test_weights_drawn_for_16_bits_are_the_cast_ones() -> None:
    exact, halved = build(3), build(3, dtype="bfloat16")
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
    assert halved.config.dtype == torch.bfloat16
    pairs = zip(exact.parameters(), halved.parameters(), strict=True)
    assert all(torch.equal(whole.bfloat16(), half) for whole, half in pairs)
    frequencies = {name: value for name, value in halved.named_buffers() if "inv_freq" in name}
    assert frequencies
    assert all(torch.equal(value, dict(exact.named_buffers())[name]) for name, value in frequencies.items())


@pytest.mark.parametrize(
    "values",
    [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": {"": "paged|evil/kernel@main:attention"}},
        {"experts_implementation": "evil/kernel"},
        {"attribute_map": {"mine": "_attn_implementation"}, "mine": "evil/kernel"},
        {"attribute_map": {"_attn_implementation_internal": "mine"}, "mine": "evil/kernel"},
    ],
)
def test_a_folders_config_fetches_no_code_from_the_hub(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | values))
    with pytest.raises(RecipeError, match=r"model.path: in the config of '.*' .*; remove the key from config.json, or"):
        read_config(ModelConfig(path=str(tmp_path)))
    with pytest.raises(UsageError, match=r"remove the key from config\.json"):
        dstrain.load_reward_model(tmp_path)


def test_kernels_of_a_part_of_the_model_are_found(tmp_path: Path) -> None:
    kernels = {"": "sdpa", "text_config": "evil/kernel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "_attn_implementation": kernels}))
    with pytest.raises(RecipeError, match=r"_attn_implementation.* names code on the Hub \('evil/kernel'\)"):
        read_config(ModelConfig(path=str(tmp_path)))


def test_code_from_the_hub_takes_the_users_word(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"_attn_implementation": "mine/kernel"}))
    read = read_config(ModelConfig(path=str(tmp_path), trust_remote_code=True))
    assert read._attn_implementation == "mine/kernel"


def test_weights_that_an_initialization_leaves_unset_are_refused() -> None:
    """formats.md B2: openai-gpt trained on uninitialized memory, with values up to 1e16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dstrain.models.load import _init_from_scratch

    def build(model_type: str, **sizes: int) -> Any:
        return _init_from_scratch(AutoModelForCausalLM, AutoConfig.for_model(model_type, **sizes), torch.float32, {})

    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RecipeError, match=r"gives no first values to .* of a openai-gpt model"):
        build("openai-gpt", vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    build("gpt2", vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    assert torch.are_deterministic_algorithms_enabled() == before


# What the files of a model hold is compared with its class before any value is read.


SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip


def saved(at: Path, auto: Any = AutoModelForCausalLM, **settings: Any) -> Path:
    config = AutoConfig.for_model("llama", **SIZES, **settings)
    auto.from_config(config).save_pretrained(str(at))
    return at


def task_on(task: str, at: Path, tmp_path: Path, **more: Any) -> Any:
    values = tiny_recipe(task, tmp_path)
    made: Any = make_task(RunConfig.model_validate(values))
    made.tokenizer.save_pretrained(str(at))
    return make_task(RunConfig.model_validate({**values, "model": {"path": str(at), **more}}))


def told(config: dict[str, Any]) -> Callable[[Path], None]:
    def change(at: Path) -> None:
        file = at / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))

    return change


def stored_as(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(at: Path) -> None:
        tensors = load_file(at / "model.safetensors")
        cast = {name: value.to(dtype) if value.dim() == 2 else value for name, value in tensors.items()}
        save_file(cast, at / "model.safetensors", metadata={"format": "pt"})

    return change


def renamed(at: Path) -> None:
    tensors = load_file(at / "model.safetensors")
    save_file({f"module.{name}": value for name, value in tensors.items()}, at / "model.safetensors")


@pytest.mark.parametrize(
    ("task", "auto", "spoil", "wanted"),
    [
        ("sft", AutoModelForCausalLM, told({"hidden_size": 32, "head_dim": 16}), r"'lm_head\.weight' is \(320, 16\) in its files and \(320, 32\) in the model"),
        ("sft", AutoModelForCausalLM, told({"num_hidden_layers": 3}), r"all weights of a LlamaForCausalLM \(missing keys: model\.layers\.2\.input_layernorm\.weight, .* and 6 more"),
        ("rm", AutoModelForCausalLM, told({"num_hidden_layers": 3}), r"missing keys: model\.layers\.2"),
        ("sft", AutoModelForSequenceClassification, told({}), r"all weights of a LlamaForCausalLM \(missing keys: lm_head\.weight\); .*LlamaForSequenceClassification"),
        ("sft", AutoModel, told({}), r"LlamaForCausalLM \(missing keys: lm_head\.weight\)"),
        ("rm", AutoModelForSequenceClassification, told({}), r"'score\.weight' is \(2, 16\) in its files, but the task needs \(1, 16\)"),
        ("rm", AutoModelForCausalLM, renamed, r"missing keys: model\.embed_tokens\.weight"),
        ("rm", AutoModelForCausalLM, stored_as(torch.float8_e4m3fn), r"is stored as F8_E4M3, but its config\.json has no quantization_config"),
        ("sft", AutoModelForCausalLM, stored_as(torch.int8), r"is stored as I8"),
    ],
)  # fmt: skip
def test_files_that_do_not_hold_the_model_are_refused_by_name(
    task: str, auto: Any, spoil: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    at = saved(tmp_path / "model", auto)
    spoil(at)
    with pytest.raises(RecipeError, match=rf"model\.path: .*{wanted}"):
        task_on(task, at, tmp_path).checks.run()


def test_what_is_allowed_is_said_in_sentences(tmp_path: Path) -> None:
    at = saved(tmp_path / "model", tie_word_embeddings=True)
    plain = task_on("sft", at, tmp_path)
    plain.checks.run()
    assert not plain.checks.warnings()
    scored = task_on("rm", at, tmp_path)
    scored.checks.run()
    assert not scored.checks.warnings()
    assert (
        f"newly initialized from seed 0: score.weight (the files of {at} have no such head)"
        in scored.checks.info_messages()
    )
    shutil.rmtree(at)
    tied = saved(at, AutoModelForSequenceClassification, tie_word_embeddings=True, num_labels=1)
    writer = task_on("sft", tied, tmp_path)
    writer.checks.run()
    assert writer.checks.warnings() == [f"unexpected keys in the files of {at}: score.weight; ignored"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    at = saved(tmp_path / "model")
    stored_as(dtype)(at)
    task = task_on("sft", at, tmp_path)
    task.checks.run()
    assert {p.dtype for p in task.build_model().parameters()} == {torch.float32}


def test_no_load_report_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = task_on("rm", saved(tmp_path / "model"), tmp_path)
    task.checks.run()
    task.build_model()
    seen = "".join(capfd.readouterr())
    assert "LOAD REPORT" not in seen
    assert "MISSING" not in seen


def test_the_way_dialogs_are_written_is_said_where_no_template_decides(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path)))
    [line] = task.checks.info_messages()
    assert line.startswith("the tokenizer has no chat template: dialogs are written as ")
    assert "the last answer ends with <|endoftext|>" in line or "the last answer ends with </s>" in line
    task.tokenizer.eos_token = None  # type: ignore[attr-defined]
    [line] = task.checks.info_messages()
    assert "nothing ends an answer" in line
    task.tokenizer.chat_template = "{{ messages }}"  # type: ignore[attr-defined]
    assert not task.checks.info_messages()


def test_a_broken_tokenizer_is_called_so(tmp_path: Path) -> None:
    at = saved(tmp_path / "model")
    task_on("sft", at, tmp_path)
    (at / "tokenizer.json").write_text('{"model": 1}')
    task = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path) | {"model": {"path": str(at)}}))
    with pytest.raises(RecipeError, match=r"the tokenizer in '.*' cannot be read \(.*\); replace its tokenizer files"):
        task.checks.run()


# A Hub id that cannot be read ends in an error after one request.


@pytest.fixture
def requests() -> Iterator[tuple[int, list[int]]]:
    """(port, requests so far) of a server that closes every connection without an answer."""
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    seen.append(len(connection.recv(4096)))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], seen
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_id_is_asked_for_once_and_the_error_names_the_local_folder(
    offline: bool, requests: tuple[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    port, seen = requests
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(RecipeError, match=r"'some-org/none'.*HF_HUB_OFFLINE.*local folder"):
        load_pretrained(AutoConfig, "some-org/none", "model.path", False)
    assert len(seen) == (0 if offline else 1)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Hub id in the cache, with one layer on its branch main and two on its tag v2."""
    from huggingface_hub import constants

    place = tmp_path / "hub/models--org--tiny"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (place / "refs").mkdir(parents=True)
    for name, commit, layers in (("main", "a" * 40, 1), ("v2", "b" * 40, 2)):
        (place / "refs" / name).write_text(commit)
        values = tiny_recipe("sft", tmp_path)
        values["model"]["config"]["num_hidden_layers"] = layers
        made: Any = make_task(RunConfig.model_validate(values | {"seed": layers}))
        made.build_model().save_pretrained(place / "snapshots" / commit)
        made.tokenizer.chat_template = name
        made.tokenizer.save_pretrained(place / "snapshots" / commit)
    return "org/tiny"


def test_a_revision_is_that_of_config_weights_and_tokenizer(hub_cache: str, tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    models, prints = {}, {}
    for revision, layers in (("v2", 2), ("b" * 40, 2), (None, 1)):
        recipe = RunConfig.model_validate(values | {"model": {"path": hub_cache, "revision": revision}})
        made: Any = make_task(recipe)
        made.checks.required_keys()
        made.checks.run()
        models[revision] = made.build_model()
        assert len(models[revision].model.layers) == layers
        assert made.tokenizer.chat_template == ("main" if revision is None else "v2")
        assert read_base_shape(recipe.model).layers == layers  # type: ignore[union-attr]
        prints[revision] = config_fingerprint(hub_cache, revision), weights_fingerprint(recipe.model, 0)
        write_run_config(tmp_path / "run", recipe, {}, {})
        commit = json.loads((tmp_path / "run/environment.json").read_text())["model_commit"]
        assert commit == ("a" if revision is None else "b") * 40
    assert prints["v2"] == prints["b" * 40]
    assert prints["v2"][0] != prints[None][0]
    assert prints["v2"][1] != prints[None][1]


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"revision": "v2"}, r"^model.revision: is 'v2', but '.*' is a local folder; remove it"),
        ({"path": None, "config": {"model_type": "llama"}, "revision": "v2"}, "but model.path is not set"),
    ],
)
def test_a_revision_of_what_has_none_is_refused(model: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    recipe = RunConfig.model_validate(tiny_recipe("sft", tmp_path) | {"model": {"path": str(tmp_path), **model}})
    with pytest.raises(RecipeError, match=wanted):
        make_task(recipe).checks.required_keys()


def test_an_unknown_revision_is_named(hub_cache: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^model\.path: .* its revision v3 is not in the cache"):
        read_config(ModelConfig(path=hub_cache, revision="v3"))


# Rows are filled up with a token that no text becomes, where the tokenizer has one.


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(special: Sequence[str], **named: str) -> Any:
    """As Llama 3's and GPT-2's: every text is written with bytes."""
    tokenizer = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def falling_back(fall_back: bool) -> Any:
    """As Llama 2's, with bytes for what has no piece, or without."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if fall_back), *"abc"]
    vocab = {text: at for at, text in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=fall_back))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_2|>")
CASES: dict[str, tuple[Any, str]] = {
    "Llama 3": (byte_level(LLAMA3, bos_token=LLAMA3[0], eos_token=LLAMA3[1]), "<|reserved_special_token_0|>"),
    "Llama 3.1": (
        byte_level((*LLAMA3, "<|finetune_right_pad_id|>"), bos_token=LLAMA3[0], eos_token=LLAMA3[1]),
        "<|finetune_right_pad_id|>",
    ),
    "GPT-NeoX": (byte_level(("<|endoftext|>", "<|padding|>"), eos_token="<|endoftext|>"), "<|padding|>"),
    "GPT-2": (byte_level(("<|endoftext|>",), unk_token="<|endoftext|>", eos_token="<|endoftext|>"), "<|endoftext|>"),
    "images": (byte_level(("<s>", "<image>", "<|vision_pad|>"), eos_token="<s>"), "<s>"),
    "Llama 2": (falling_back(True), "<unk>"),
    "an unknown token that texts become": (falling_back(False), "</s>"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_token_that_no_text_becomes_is_taken_first(case: str) -> None:
    tokenizer, wanted = CASES[case]
    tokenizer.pad_token = None
    before = tokenizer("a c\U0001f40d")["input_ids"]
    set_pad_token(tokenizer, "model.path")
    assert tokenizer.pad_token == wanted
    assert tokenizer.pad_token_id not in before
    assert tokenizer("a c\U0001f40d")["input_ids"] == before
    assert len(tokenizer) == tokenizer.backend_tokenizer.get_vocab_size(), "nothing was added"


def test_what_the_template_or_the_processor_writes_is_used() -> None:
    tokenizer = byte_level(LLAMA3, bos_token=LLAMA3[0], eos_token=LLAMA3[1])
    tokenizer.chat_template = "{{ messages[0].content }}<|reserved_special_token_0|>"
    set_pad_token(tokenizer, "model.path")
    assert tokenizer.pad_token == "<|reserved_special_token_2|>"
    tokenizer.pad_token = None
    set_pad_token(tokenizer, "model.path", {"<|reserved_special_token_2|>"})
    assert tokenizer.pad_token == "<|end_of_text|>"


def test_a_pad_token_that_is_named_stays() -> None:
    tokenizer = byte_level(LLAMA3, pad_token=LLAMA3[1], eos_token=LLAMA3[1])
    set_pad_token(tokenizer, "model.path")
    assert tokenizer.pad_token == LLAMA3[1]


def test_a_tokenizer_without_pad_and_eos_is_refused() -> None:
    with pytest.raises(RecipeError, match="neither a pad nor an EOS token"):
        set_pad_token(byte_level(()), "model.path")


def test_every_row_of_the_embedding_learns() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=2, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    assert model.get_input_embeddings().padding_idx == 2
    clear_padding_idx(model)
    torch.manual_seed(0)
    model(input_ids=torch.tensor([[3, 2, 5, 2]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[2].any()
