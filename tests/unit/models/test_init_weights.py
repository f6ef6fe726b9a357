"""Weights to start from: out of old files of any shape, by name, and never by running what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from dstrain.config.schema import ModelConfig
from dstrain.errors import RecipeError
from dstrain.models.init_weights import InitReport, check_init, load_init
from dstrain.models.load import build_meta_model, load_model, read_config
from dstrain.models.weights import find_init_files, open_tensors

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
KINDS = {"lm": AutoModelForCausalLM, "rm": AutoModelForSequenceClassification, "bare": AutoModel}
State = dict[str, torch.Tensor]


def build(kind: str = "lm", seed: int = 1, bones: bool = False, **changes: Any) -> PreTrainedModel:
    """A tiny model; seed 0 is the old one's."""
    dtype = changes.pop("dtype", None)
    model = ModelConfig(config=LLAMA | changes, dtype=dtype)
    config = read_config(model)
    if kind == "rm":
        config.num_labels = 1
    return build_meta_model(KINDS[kind], model, config) if bones else load_model(KINDS[kind], model, config, seed)


def old(kind: str = "lm", **changes: Any) -> State:
    return {name: value.clone() for name, value in build(kind, 0, **changes).state_dict().items()}


def holds(model: PreTrainedModel, wanted: State) -> bool:
    """Whether every weight is the wanted one, to the bit."""
    own = model.state_dict()
    return own.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in own.items())


def prefixed(state: State, *prefixes: str) -> State:
    """Each name behind one of the prefixes, taken in turn."""
    return {prefixes[index % len(prefixes)] + name: value for index, (name, value) in enumerate(state.items())}


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., str]:
    def save(values: Any, name: str = "old.pt", **how: Any) -> str:
        if name.endswith(".safetensors"):
            save_file(values, tmp_path / name)
        else:
            torch.save(values, tmp_path / name, **how)
        return str(tmp_path / name)

    return save


def both(model: PreTrainedModel, path: str, **bones: Any) -> InitReport:
    """Load, after the check on the skeleton has passed."""
    check_init(build(bones=True, **bones), path)
    return load_init(model, path)


@pytest.mark.parametrize(
    "prefixes",
    [
        ("",),
        ("module.",),
        ("_orig_mod.",),
        ("module._orig_mod.",),
        ("_orig_mod.module.",),
        ("module.module._orig_mod.module.",),
        ("module.", ""),
    ],
)
def test_what_ddp_and_compile_put_before_names_changes_nothing(
    prefixes: tuple[str, ...], put: Callable[..., str]
) -> None:
    model, wanted = build(), old()
    assert not holds(model, wanted)
    report = both(model, put(prefixed(wanted, *prefixes)))
    assert holds(model, wanted)
    assert (report.matched, report.total) == (len(wanted), len(wanted))
    assert not report.missing
    assert not report.unexpected
    if len(prefixes) == 1:
        assert report.removed_prefix == prefixes[0]
        assert str(report).startswith(f"model.init: {len(wanted)} of {len(wanted)} weights from old.pt")
        assert (f"('{prefixes[0]}' removed from its keys)" in str(report)) == bool(prefixes[0])


def test_a_part_compiled_alone_is_recognised(put: Callable[..., str]) -> None:
    model, wanted = build(), old()
    report = load_init(
        model, put({name.replace("model.", "model._orig_mod."): value for name, value in wanted.items()})
    )
    assert holds(model, wanted)
    assert (report.removed_prefix, report.added_prefix) == ("_orig_mod.", "")


class Inner(torch.nn.Module):
    """A model whose own names begin with `module.`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_a_wrapper_that_belongs_to_the_model_stays(prefix: str, put: Callable[..., str]) -> None:
    model, wanted = Inner(), {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}
    assert load_init(model, put(prefixed(wanted, prefix))).removed_prefix == prefix
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_is_found_beside_an_optimizer(key: str, zipped: bool, put: Callable[..., str]) -> None:
    model, wanted = build(), old()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    optimizer.step()
    whole = {"epoch": 3, "best": 0.5, "optimizer": optimizer.state_dict(), key: prefixed(wanted, "module.")}
    load_init(model, put(whole, _use_new_zipfile_serialization=zipped))
    assert holds(model, wanted)


def test_a_state_dict_in_a_dict_in_a_dict_is_found(put: Callable[..., str]) -> None:
    model, wanted = build(), old()
    load_init(model, put({"step": torch.tensor(4), "model": {"state_dict": wanted}, "state_dict": {}}))
    assert holds(model, wanted)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_every_kind_of_file_brings_the_same(suffix: str, put: Callable[..., str]) -> None:
    model, wanted = build(), old()
    assert load_init(model, put(wanted, f"w{suffix}")).matched == len(wanted)
    assert holds(model, wanted)


@pytest.mark.parametrize("form", ["one", "indexed", "shards", "bin", "bins"])
def test_a_folder_is_read_as_transformers_reads_it(form: str, tmp_path: Path, put: Callable[..., str]) -> None:
    source, model = build(seed=0), build()
    if form in ("one", "bin"):
        source.save_pretrained(str(tmp_path))
        if form == "bin":
            torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
            (tmp_path / "model.safetensors").unlink()
        else:
            put({"wte.weight": torch.zeros(1)}, "consolidated.safetensors")
    else:
        source.save_pretrained(str(tmp_path), max_shard_size="4KB")
        shards = sorted(tmp_path.glob("*.safetensors"))
        assert len(shards) > 2
        if form != "indexed":
            (tmp_path / "model.safetensors.index.json").unlink()
        for index, shard in enumerate(shards if form == "bins" else ()):
            torch.save(load_file(shard), tmp_path / f"pytorch_model-{index}.bin")
            shard.unlink()
        if form == "indexed":
            put({"something.else": torch.zeros(1)}, "more.safetensors")
    report = both(model, str(tmp_path))
    assert holds(model, source.state_dict())
    assert not report.unexpected


def test_a_bare_backbone_goes_into_a_reward_model(put: Callable[..., str]) -> None:
    model, wanted = build("rm"), old("bare")
    head = model.score.weight.clone()
    report = both(model, put(prefixed(wanted, "module.")), kind="rm")
    assert holds(model.model, wanted)
    assert torch.equal(model.score.weight, head), "as it was drawn"
    assert (report.missing, report.unexpected) == (("score.weight",), ())
    assert (report.removed_prefix, report.added_prefix) == ("module.", "model.")
    assert "('module.' removed from its keys, 'model.' added to its keys); missing keys: score.weight" in str(report)


def test_a_backbone_with_a_head_beside_it_goes_in_whole(put: Callable[..., str]) -> None:
    model, wanted = build("rm"), old("rm")
    load_init(model, put({name.removeprefix("model."): value for name, value in wanted.items()}))
    assert holds(model, wanted)


def test_a_language_model_goes_into_a_reward_model(put: Callable[..., str]) -> None:
    model, wanted = build("rm"), old("lm")
    report = both(model, put(wanted), kind="rm")
    assert all(torch.equal(value, wanted[f"model.{name}"]) for name, value in model.model.state_dict().items())
    assert str(report) == (
        f"model.init: {len(wanted) - 1} of {len(wanted)} weights from old.pt; missing keys: score.weight; "
        "unexpected keys: lm_head.weight"
    )


def test_a_language_model_goes_into_a_bare_backbone(put: Callable[..., str]) -> None:
    model = build("bare")
    report = load_init(model, put(old("lm")))
    assert holds(model, old("bare"))
    assert (report.removed_prefix, report.unexpected) == ("model.", ("lm_head.weight",))


def test_a_model_inside_a_module_of_a_training_framework_is_recognised(put: Callable[..., str]) -> None:
    model, wanted = build(), old()
    assert load_init(model, put({"state_dict": prefixed(wanted, "model.")})).removed_prefix == "model."
    assert holds(model, wanted)


def test_what_is_missing_and_unexpected_is_told(put: Callable[..., str]) -> None:
    model, wanted = build(), old()
    gone = [name for name in wanted if "mlp" in name]
    more = {f"extra.{index}.weight": torch.zeros(1) for index in range(60)}
    kept = {name: value for name, value in build().state_dict().items() if name in gone}
    report = load_init(model, put({name: value for name, value in wanted.items() if name not in gone} | more))
    assert holds(model, wanted | kept)
    event = report.as_event()
    assert json.loads(json.dumps(event)) == event
    assert (event["matched"], event["missing"], event["unexpected"]) == (len(wanted) - len(gone), len(gone), 60)
    assert event["missing_names"] == gone
    assert event["unexpected_names"] == [*more][:50]
    assert "unexpected keys: extra.0.weight, extra.1.weight, extra.2.weight and 57 more" in str(report)


@pytest.mark.parametrize("names", [("model.embed_tokens.weight",), ("lm_head.weight",), ("both",)])
def test_tied_weights_are_one(names: tuple[str, ...], put: Callable[..., str]) -> None:
    model, wanted = build(tie_word_embeddings=True), old(tie_word_embeddings=True)
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    values = {name: value for name, value in wanted.items() if name not in ends or names == ("both",) or name in names}
    report = both(model, put(values), tie_word_embeddings=True)
    assert holds(model, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (report.missing, report.unexpected) == ((), ())
    assert report.matched == report.total == len(wanted) - 1


def test_two_values_for_tied_weights_are_refused(put: Callable[..., str]) -> None:
    with pytest.raises(
        RecipeError, match=r"'model\.embed_tokens\.weight' and 'lm_head\.weight' differ.*are tied in the model; set tie"
    ):
        check_init(build(bones=True, tie_word_embeddings=True), put(old()))


def test_saved_buffers_come_along(put: Callable[..., str]) -> None:
    model, wanted = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    wanted(torch.rand(5, 3))
    assert load_init(model, put(wanted.state_dict())).matched == 5
    assert torch.equal(model.running_mean, wanted.running_mean)
    assert model.num_batches_tracked == 1


def test_values_are_cast_to_the_models_dtype(put: Callable[..., str]) -> None:
    wanted = {name: value.bfloat16() for name, value in old().items()}
    model = build()
    load_init(model, put(wanted))
    assert holds(model, {name: value.float() for name, value in wanted.items()})
    half = build(dtype="bfloat16")
    load_init(half, put(old(), "w.safetensors"))
    assert holds(half, wanted)


def test_gradients_and_freezing_are_left_alone(put: Callable[..., str]) -> None:
    model = build()
    model.lm_head.weight.requires_grad_(False)
    load_init(model, put(old()))
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert [name for name, value in learns.items() if not value] == ["lm_head.weight"]
    assert all(parameter.is_leaf and parameter.grad_fn is None for parameter in model.parameters())


class Planted:
    """Unpickled by Python's own pickle, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_is_ever_run(
    zipped: bool, tmp_path: Path, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = put({"model": old(), "args": Planted(tmp_path / "trap")}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        RecipeError, match=r"holds more than tensors.*reading it would run 'posix\.system'.*save only its weights"
    ):
        load_init(build(), path)
    assert not (tmp_path / "trap").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "trap").exists(), "the trap was a trap"


class Settings:
    """What scripts put beside the weights."""


def test_an_object_beside_the_weights_is_named(put: Callable[..., str]) -> None:
    with pytest.raises(RecipeError, match=r"reading it would run 'tests\.unit\.models\.test_init_weights\.Settings'"):
        check_init(build(bones=True), put({"model": old(), "args": Settings()}))


def cut(path: str) -> str:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])
    return path


def text(folder: Path, name: str, content: str | bytes) -> str:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder / name)


Make = Callable[[Path, Callable[..., str]], str]
WRONG: dict[str, tuple[Make, str]] = {
    "nothing there": (lambda f, p: str(f / "nowhere.pt"), r"nowhere\.pt' is neither a file nor a folder .*; give a \.safetensors file, a \.pt.*Hub ids are for model\.path"),
    "a hub id": (lambda f, p: "org/name", r"'org/name' is neither a file nor a folder"),
    "a name without end": (lambda f, p: "x" * 5000, r"is neither a file nor a folder"),
    "another kind": (lambda f, p: text(f, "w.yaml", "a: 1"), r"w\.yaml' ends in '\.yaml'; give a \.safetensors"),
    "an empty folder": (lambda f, p: str(f), r"holds no weights; give"),
    "garbage": (lambda f, p: text(f, "w.pt", "garbage"), r"w\.pt cannot be read \(UnpicklingError: .*\); give"),
    "random bytes": (lambda f, p: text(f, "w.pt", bytes(range(256))), r"w\.pt cannot be read"),
    "nothing in it": (lambda f, p: text(f, "w.pt", ""), r"w\.pt cannot be read \(EOFError: it is truncated\)"),
    "half a file": (lambda f, p: cut(p(old())), r"old\.pt cannot be read"),
    "half an old file": (lambda f, p: cut(p(old(), _use_new_zipfile_serialization=False)), r"old\.pt cannot be read"),
    "half a safetensors": (lambda f, p: cut(p(old(), "w.safetensors")), r"w\.safetensors is damaged \(.*\); download or save it again"),
    "garbage in safetensors": (lambda f, p: text(f, "w.safetensors", "garbage"), r"w\.safetensors is damaged"),
    "a missing shard": (lambda f, p: str(Path(text(f, "model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}')).parent), r"b\.safetensors is missing, but the shard index"),
    "a bad index": (lambda f, p: str(Path(text(f, "model.safetensors.index.json", "[]")).parent), r"index\.json cannot be read"),
    "the same weights twice": (lambda f, p: str(Path(p(old(), "a.safetensors")).parent if p(old(), "b.safetensors") else f), r"b\.safetensors and another file in its folder both hold 'lm_head\.weight'; name one"),
    "a tensor": (lambda f, p: p(torch.zeros(2)), r"holds Tensor, not a state dict; give a state dict, bare or under"),
    "an optimizer alone": (lambda f, p: p({"optimizer": {"state": {}}, "epoch": 1}), r"holds a dict of optimizer, epoch, not a state dict;.*model, state_dict, model_state_dict, module"),
    "numbers for names": (lambda f, p: p({0: torch.zeros(2)}), r"holds a dict of 0, not a state dict"),
    "another model": (lambda f, p: p({f"h.{i}.w": torch.zeros(1) for i in range(9)}), r"no key in .*old\.pt matches the model \(keys of the file: h\.0\.w, h\.1\.w, h\.2\.w and 6 more; keys of the model: model\.embed_tokens\.weight, .* and \d+ more\); give weights"),
    "no tensor at all": (lambda f, p: p({}, "w.safetensors"), r"no key in .*w\.safetensors matches the model \(keys of the file: none; keys of the model: model\.embed"),
    "another vocabulary": (lambda f, p: p(old(vocab_size=80)), r"'model\.embed_tokens\.weight' is \(80, 16\) in .*old\.pt and \(64, 16\) in the model, and 1 more do not fit; set the model's vocab_size to 80 instead of 64, or remove"),
    "another number of heads": (lambda f, p: p(old(num_key_value_heads=2)), r"layers\.0\.self_attn\.k_proj\.weight' is \(16, 16\).*\(8, 16\).*give weights of a model of this size"),
    "another rank": (lambda f, p: p(old() | {"model.norm.weight": torch.zeros(4, 4)}), r"^model\.init: 'model\.norm\.weight' is \(4, 4\) in \S+old\.pt and \(16,\) in the model; give"),
    "quantized weights": (lambda f, p: p(old() | {"lm_head.weight": torch.zeros(64, 16, dtype=torch.int8)}), r"'lm_head\.weight' is int8 in .* cannot be cast to the model's float32; give weights that are not quantized"),
    "float8 without its scales": (lambda f, p: p({n: v.to(torch.float8_e4m3fn) for n, v in old().items()}, "w.safetensors"), r"is F8_E4M3 in .*and \d+ more do not fit; give weights that are not quantized"),
    "one weight twice": (lambda f, p: p({"module.lm_head.weight": torch.zeros(64, 16), "_orig_mod.module.lm_head.weight": torch.zeros(64, 16)}), r"'module\.lm_head\.weight' and '_orig_mod\.module\.lm_head\.weight' in .* would both become"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused_with_its_mend(wrong: str, tmp_path: Path, put: Callable[..., str]) -> None:
    make, wanted = WRONG[wrong]
    path, before, model = make(tmp_path, put), build().state_dict(), build()
    for go in (lambda: check_init(build(bones=True), path), lambda: load_init(model, path)):
        with pytest.raises(RecipeError, match=f"(?s){wanted}"):
            go()
    assert holds(model, before), "a refusal changes nothing"


def resident() -> int:
    """MiB of this process in memory, mapped files as far as they were read."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_values_stay_on_the_disk_until_they_are_asked_for(name: str, put: Callable[..., str]) -> None:
    path = put({"big": torch.ones(50_000_000), "small": torch.ones(1)}, name)
    before = resident()
    found = open_tensors(find_init_files(path))
    assert found["small"].read().sum() == 1
    assert resident() - before < 20
    big = found["big"].read()
    assert big.sum() == 50_000_000
    assert resident() - before > 150, "the measure sees what is read"
