"""Parts of models that see: every family's names, and what is frozen or learns at its own rate by the three words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from dstrain.config.schema import LoraConfig, ModelConfig, OptimConfig
from dstrain.errors import RecipeError
from dstrain.models.adapters import add_adapters
from dstrain.models.load import read_config
from dstrain.models.params import COMPONENTS, build_param_groups, components_by_id, freeze, matches_pattern
from dstrain.training.build_run import summarize_components
from tests import model_families
from tests.adapters import SIZES
from tests.vision_recipes import GEMMA3, TEXT, llava

TOWER = {"model.vision_tower"}
LANGUAGE = {"model.language_model", "lm_head"}
TIED = {"model.language_model"}
"""The head is the embeddings."""
PROJECTOR = {"model.multi_modal_projector"}
VISUAL = {"model.visual.patch_embed", "model.visual.blocks"}
MERGER = {"model.visual.merger"}
TEXTS = {"model.text_model", "lm_head"}
FAMILIES: dict[str, tuple[set[str], set[str], set[str]]] = {
    "llava": (TOWER, PROJECTOR, LANGUAGE),
    "llava_next": (TOWER, PROJECTOR | {"model.image_newline"}, LANGUAGE),
    "llava_onevision": (TOWER, PROJECTOR | {"model.image_newline"}, LANGUAGE),
    "gemma3": (TOWER, PROJECTOR, TIED),
    "idefics2": ({"model.vision_model"}, {"model.connector"}, TEXTS),
    "idefics3": ({"model.vision_model"}, {"model.connector"}, TEXTS),
    "smolvlm": ({"model.vision_model"}, {"model.connector"}, TEXTS),
    "qwen2_vl": (VISUAL, MERGER, LANGUAGE),
    "qwen2_5_vl": (VISUAL, MERGER, LANGUAGE),
    "qwen3_vl": (VISUAL | {"model.visual.pos_embed"}, MERGER | {"model.visual.deepstack_merger_list"}, LANGUAGE),
    "paligemma": (TOWER, PROJECTOR, TIED),
    "mistral3": (TOWER, PROJECTOR, TIED),
    "internvl": (TOWER, PROJECTOR, TIED),
    "mllama": ({"model.vision_model"}, PROJECTOR, LANGUAGE),
    "aya_vision": (TOWER, PROJECTOR, TIED),
    "llama4": ({"vision_model"}, {"multi_modal_projector"}, {"language_model"}),
    "florence2": (TOWER, PROJECTOR, TIED),
    "blip-2": ({"vision_model"}, {"qformer", "language_projection", "query_tokens"}, {"language_model"}),
    "idefics": (
        {"model.vision_model"},
        set(),
        {"model.embed_tokens", "model.layers", "model.gated_cross_attn_layers", "model.norm", "lm_head"},
    ),
    "git": ({"git.image_encoder"}, {"git.visual_projection"}, {"git.embeddings", "git.encoder", "output"}),
}
LAYERS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "num_global_layers")


def shallow(kind: str) -> Any:
    """A family's default config with one layer of each kind."""
    config = AutoConfig.for_model(kind)
    subs = [getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None]
    for part in (config, *subs):
        for name in LAYERS:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 1)
        if isinstance(getattr(part, "num_attention_heads", None), int) and part.hidden_size % part.num_attention_heads:
            part.num_attention_heads = 2
        if isinstance(getattr(part, "depths", None), list):
            part.depths = [1 for _ in part.depths]
    return config


def tops(model: torch.nn.Module) -> dict[str, set[str]]:
    """Part -> beginnings of its parameters' names."""
    known = components_by_id(model)
    found: dict[str, set[str]] = {part: set() for part in (*COMPONENTS, "none")}
    for name, parameter in model.named_parameters():
        top = re.match(r"(model|git)\.visual\.\w+|(model|git)\.\w+|\w+", name)
        assert top
        found[known.get(id(parameter), "none")].add(top[0])
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_familys_parts_are_found_by_their_names(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(shallow(kind))
    found = tops(model)
    assert (found["vision"], found["projector"], found["language"]) == FAMILIES[kind]
    assert found["none"] == set()


def test_what_hears_is_no_part_of_what_sees() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(shallow("qwen2_5_omni_thinker"))
    assert tops(model)["none"] == {"model.audio_tower"}


def test_a_model_that_does_not_see_has_no_parts() -> None:
    with torch.device("meta"):
        assert components_by_id(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEXT))) == {}
    assert components_by_id(torch.nn.Linear(2, 3)) == {}


def seeing(auto: Any = AutoModelForImageTextToText, values: Any = None) -> Any:
    return auto.from_config(read_config(ModelConfig(config=values or llava())))


def test_a_new_head_is_no_part() -> None:
    assert tops(seeing(AutoModelForSequenceClassification, GEMMA3))["none"] == {"score"}


def test_adapters_belong_to_the_part_they_lie_in() -> None:
    model = add_adapters(seeing(), LoraConfig(rank=2, targets="all-linear"), (), 0)
    known = components_by_id(model)
    for name, parameter in model.named_parameters():
        part = known[id(parameter)]
        assert (part == "vision") == ("vision_tower" in name)
        assert (part == "projector") == ("multi_modal_projector" in name)
    adapted = {part for name, p in model.named_parameters() if "lora" in name for part in (known[id(p)],)}
    assert adapted >= {"vision", "language"}
    freeze(model, ["vision"])
    learning = {known[id(p)] for p in model.parameters() if p.requires_grad}
    assert learning == adapted - {"vision"}


def test_the_three_words_freeze_a_part() -> None:
    model = seeing()
    freeze(model, ["vision", "language"])
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning
    assert all(name.startswith("model.multi_modal_projector.") for name in learning)
    with pytest.raises(RecipeError, match="leaves no parameter to train"):
        freeze(model, ["projector"])


def test_a_part_learns_at_its_own_rate() -> None:
    model = seeing()
    groups = {"vision": {"lr": 2e-6}, "projector": {"lr": 1e-3, "weight_decay": 0.0}}
    optim = OptimConfig(lr=1e-5, weight_decay=0.1, groups=groups)
    rates = {id(p): group.lr_scale * optim.lr for group in build_param_groups(model, optim) for p in group.params}
    wanted = {"vision": 2e-6, "projector": 1e-3, "language": 1e-5}
    assert all(rates[key] == pytest.approx(wanted[part]) for key, part in components_by_id(model).items())


def test_a_word_that_means_nothing_names_the_words_that_do() -> None:
    wanted = r"model\.freeze 'visoin': matches no parameter; .*the model's components are vision, projector, language"
    with pytest.raises(RecipeError, match=wanted):
        freeze(seeing(), ["visoin"])
    text = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEXT))
    with pytest.raises(
        RecipeError, match=r"'vision': matches no parameter; names here begin with lm_head\.weight, [\w., ]+$"
    ):
        freeze(text, ["vision"])


def test_each_part_says_what_of_it_learns() -> None:
    model = seeing()
    freeze(model, ["vision", "embed_tokens"])
    counts = summarize_components(
        model, OptimConfig(lr=1e-4, groups={"projector": {"lr": 1e-3}, "lm_head": {"lr": 0.01}})
    )
    known = components_by_id(model)
    for count in counts:
        assert count.num_parameters == sum(p.numel() for p in model.parameters() if known[id(p)] == count.component)
        assert count.num_trainable == sum(
            p.numel() for p in model.parameters() if p.requires_grad and known[id(p)] == count.component
        )
    told = [re.sub(r"[\d.]+ k", "N k", str(count)) for count in counts]
    assert told == [
        "vision     N k parameters, frozen",
        "projector  N k parameters, all trained at lr 0.001",
        "language   N k parameters, N k of them trained at lr 0.01 and 0.0001",
    ]
    assert summarize_components(torch.nn.Linear(2, 3), OptimConfig()) == []


# Names of parameters: what is frozen and what learns at its own rate.


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("embed_tokens", "model.embed_tokens.weight", True),
        ("*.embed_tokens", "model.embed_tokens.weight", True),
        ("model.layers.1", "model.layers.1.mlp.weight", True),
        ("model.layers.1", "model.layers.11.mlp.weight", False),
        ("model.layers.*.mlp", "model.layers.3.mlp.weight", True),
        ("mlp", "model.mlps.weight", False),
        ("score.weight", "score.weight", True),
    ],
)
def test_a_pattern_is_a_word_or_a_beginning_or_a_glob(pattern: str, name: str, wanted: bool) -> None:
    assert matches_pattern(name, pattern) == wanted


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"tower": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 1)})


def test_biases_and_norms_do_not_decay_and_groups_have_their_own_rate() -> None:
    optim = OptimConfig(lr=1e-3, weight_decay=0.1, groups={"head": {"lr": 1e-2, "weight_decay": 0.0}})
    groups = build_param_groups(model(), optim)
    told = sorted(
        (round(group.lr_scale, 6), group.weight_decay, sum(p.numel() for p in group.params)) for group in groups
    )
    assert told == [(1.0, 0.0, 4), (1.0, 0.1, 12), (10.0, 0.0, 5)]


def test_the_first_group_that_matches_counts_and_its_silence_means_the_default() -> None:
    optim = OptimConfig(
        lr=1e-2, weight_decay=0.1, groups={"head.bias": {"lr": 0}, "head": {"lr": 1e-3}, "tower": {"weight_decay": 0.2}}
    )
    net = model()
    found = {
        id(p): (group.lr_scale, group.weight_decay) for group in build_param_groups(net, optim) for p in group.params
    }
    told = {name: found[id(p)] for name, p in net.named_parameters()}
    assert told == {
        "tower.weight": (1.0, 0.2),
        "tower.bias": (1.0, 0.0),
        "head.weight": (pytest.approx(0.1), 0.1),
        "head.bias": (0.0, 0.0),
    }


def test_frozen_parameters_are_in_no_group() -> None:
    net = model()
    freeze(net, ["tower.w*"])
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["tower.weight"]
    assert sum(len(group.params) for group in build_param_groups(net, OptimConfig())) == 3
    freeze(net, ["tower"])
    with pytest.raises(RecipeError, match=r"optim\.groups 'tower': matches no parameter; names here begin with head"):
        build_param_groups(net, OptimConfig(groups={"tower": {"lr": 1}}))


def test_every_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        freeze(model(), ["tower", "haed", "x.*"])
    assert [fault.where for fault in caught.value.faults] == ["model.freeze 'haed'", "model.freeze 'x.*'"]


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves no parameter to train"):
        freeze(model(), ["tower", "head"])


@pytest.mark.parametrize("dora", [False, True])
def test_the_rates_of_lora_plus_are_those_of_peft(dora: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    config = AutoConfig.for_model("llama", **SIZES)
    targets = ["q_proj", "down_proj"] if dora else ["q_proj", "embed_tokens"]  # peft has DoRA of linear layers alone
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules=targets, use_dora=dora)
    )
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1, loraplus_lr_embedding=1e-5
    )
    optim = OptimConfig(lr=1e-3, weight_decay=0.1, loraplus_lr_ratio=16.0, loraplus_lr_embedding=1e-5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def rates(groups: Any) -> dict[str, float]:
        return {names[id(parameter)]: round(rate, 12) for parameters, rate in groups for parameter in parameters}

    found = rates((one.params, one.lr_scale * 1e-3) for one in build_param_groups(model, optim))
    assert found == rates((group["params"], group["lr"]) for group in theirs.param_groups)
    assert {*found.values()} == ({1e-3, 1.6e-2} if dora else {1e-3, 1.6e-2, 1e-5})


GATED: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {**model_families.BASE, "num_hidden_layers": 3, "lru_width": 32},
    "falcon_h1": model_families.BASE,
    "minimax": {**model_families.BASE, "num_local_experts": 2},
}
"""Families with biases of gates and state matrices."""


@pytest.mark.parametrize("name", [*model_families.FAMILIES, *model_families.MORE_FAMILIES, *GATED])
def test_what_decays_is_what_hf_trainer_decays(name: str) -> None:
    """Only parameters of one dimension that are neither a bias nor a norm, such as Mamba's A, decay there alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    values = {"model_type": name, **GATED[name]} if name in GATED else model_families.family(name)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    decayed = {
        id(one)
        for group in build_param_groups(net, OptimConfig(weight_decay=0.1))
        if group.weight_decay
        for one in group.params
    }
    ours = {key for key, one in net.named_parameters() if id(one) in decayed}
    theirs = {*Trainer.get_decay_parameter_names(None, net)} & {key for key, _ in net.named_parameters()}
    assert not ours - theirs
    assert all(dict(net.named_parameters())[key].ndim < 2 for key in theirs - ours), theirs - ours
    assert not any(key.endswith("bias") for key in ours)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            {"*bias": {"weight_decay": 0.5}},
            r"'\*bias': weight_decay 0.5 has no effect: it takes biases and norms alone",
        ),
        ({"head": {"lr": 1}, "head.bias": {"lr": 0}}, r"'head\.bias': has no effect: earlier groups take all"),
        ({"head": {}}, "'head': sets nothing; give it lr or weight_decay, or remove it"),
        ({"head": {"muon": False}}, "'head': muon: false has no effect: none of its parameters"),
    ],
)
def test_a_group_without_effect_is_refused(groups: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build_param_groups(model(), OptimConfig(groups=groups))


def test_a_group_that_says_what_holds_anyway_is_taken() -> None:
    """A sweep passes the run's own rate, norms may be named with no decay, and an empty group keeps out of a later one."""
    optim = OptimConfig(lr=1e-3, groups={"*bias": {"weight_decay": 0}, "tower": {"lr": 1e-3}})
    assert {group.lr_scale for group in build_param_groups(model(), optim)} == {1.0}
    kept = OptimConfig(lr=1e-3, groups={"head": {}, "*": {"lr": 1e-4}})
    assert sorted(group.lr_scale for group in build_param_groups(model(), kept)) == [pytest.approx(0.1), 1.0]
