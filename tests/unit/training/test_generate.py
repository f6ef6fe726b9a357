"""Writing answers: the cache is used, what the model's own files ask for is not, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.batch import Progress
from dstrain.config.schema import RunConfig
from dstrain.data.encoding.conversations import EncodedPrompt, encode_prompts
from dstrain.data.formats.conversations import read_prompt
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError
from dstrain.tasks import make_task
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.engine.base import ForwardEngine, remove_private_nvme_path, with_private_nvme_path
from dstrain.training.generate import SamplingParams, generate_answers
from dstrain.training.generation_config import collect_stop_ids
from dstrain.training.state.engine_state import load_weights
from dstrain.training.state.files import StateFile, write_state
from tests.tiny import tiny_recipe


@pytest.fixture
def task(tmp_path: Path) -> Any:
    return make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path)))


def engine_of(task: Any) -> ForwardEngine:
    return ForwardEngine(task.build_model(), {}, SingleProcessWorld())


def prompts(task: Any, *texts: str) -> list[EncodedPrompt]:
    asked = [read_prompt({"prompt": text}) for text in texts]
    return encode_prompts(task.tokenizer, asked)  # type: ignore[return-value]


def test_a_token_is_read_once(task: Any) -> None:
    engine, widths = engine_of(task), []
    engine.unwrapped.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    ids = prompts(task, "How do I mend the pump?", "And now?")
    generate_answers(engine, ids, SamplingParams(max_new_tokens=5), task.tokenizer)
    assert widths[0] == (2, max(len(prompt.ids) for prompt in ids))
    assert set(widths[1:]) <= {(2, 1)}


def test_a_models_own_sampling_and_limits_do_not_count(task: Any) -> None:
    plain, other = engine_of(task), engine_of(task)
    other.unwrapped.generation_config.update(do_sample=True, temperature=9.0, top_k=3, max_length=9, num_beams=3)
    ids = prompts(task, "How do I mend the pump?")
    few = SamplingParams(max_new_tokens=6)
    assert generate_answers(other, ids, few, task.tokenizer) == generate_answers(plain, ids, few, task.tokenizer)


def test_what_changes_greedy_decoding_elsewhere_does_so_here(task: Any) -> None:
    """A penalty in a model's generation config: as in transformers' own greedy decoding."""
    engine, (prompt,) = engine_of(task), prompts(task, "How do I mend the pump?")
    with torch.no_grad():
        engine.unwrapped.lm_head.weight.mul_(20)
    few = SamplingParams(max_new_tokens=12)
    (plain,) = generate_answers(engine, [prompt], few, task.tokenizer)
    engine.unwrapped.generation_config.repetition_penalty = 3.0
    (penalized,) = generate_answers(engine, [prompt], few, task.tokenizer)
    assert penalized != plain
    ids = torch.tensor([prompt.ids])
    ends = sorted(collect_stop_ids(engine.unwrapped.generation_config, task.tokenizer))
    written = engine.unwrapped.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=ends)[0, ids.shape[1] :]
    assert [token for token in written.tolist() if token not in ends] == penalized


def test_what_its_files_say_of_the_end_counts(task: Any) -> None:
    engine, ids = engine_of(task), prompts(task, "How do I mend the pump?")
    (whole,) = generate_answers(engine, ids, SamplingParams(max_new_tokens=6), task.tokenizer)
    again = engine_of(task)
    again.unwrapped.generation_config.eos_token_id = [task.tokenizer.eos_token_id, whole[3]]
    (short,) = generate_answers(again, ids, SamplingParams(max_new_tokens=6), task.tokenizer)
    assert short == whole[: whole.index(whole[3])]


def test_each_token_is_progress_for_the_watchdog(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorded = engine_of(task), []
    monkeypatch.setattr(engine.world.log, "record_progress", lambda *words: recorded.append(words))
    (answer,) = generate_answers(engine, prompts(task, "And now?"), SamplingParams(max_new_tokens=5), task.tokenizer)
    assert len(recorded) >= len(answer) + 1


@pytest.mark.parametrize("training", [True, False])
def test_mode_config_and_random_state_are_restored(training: bool, task: Any) -> None:
    engine = engine_of(task)
    model = engine.unwrapped.train(training)
    config, state, modes = model.generation_config, torch.get_rng_state(), []
    model.model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    sampled = SamplingParams(max_new_tokens=2, temperature=1.0)
    generate_answers(engine, prompts(task, "And now?"), sampled, task.tokenizer)
    assert set(modes) == {False}, "dropout is off, and gradient checkpointing does not disable the cache"
    assert all(module.training == training for module in model.modules())
    assert model.generation_config is config
    assert torch.equal(torch.get_rng_state(), state)


def test_no_prompts_give_no_answers(task: Any) -> None:
    assert generate_answers(engine_of(task), [], SamplingParams(), task.tokenizer) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("lm_head.weight"), r"missing keys: lm_head\.weight; unexpected keys: none"),
        (lambda found: found.update(other=torch.zeros(1)), "missing keys: none; unexpected keys: other"),
        (lambda found: found.update({"lm_head.weight": torch.zeros(2, 3)}), r"lm_head\.weight has another shape in"),
    ],
)
def test_weights_of_another_model_are_refused(change: Any, words: str, task: Any, tmp_path: Path) -> None:
    model = task.build_model()
    found = dict(model.state_dict())
    change(found)
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, kept_weights(found, tmp_path), SingleProcessWorld())


def test_the_weights_of_a_checkpoint_are_put_into_the_model(task: Any, tmp_path: Path) -> None:
    model, wanted = task.build_model(), {}
    for name, value in model.state_dict().items():
        wanted[name] = torch.randn(value.shape) if value.is_floating_point() else value.clone()
    load_weights(model, kept_weights(wanted, tmp_path), SingleProcessWorld())
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def kept_weights(values: dict[str, torch.Tensor], folder: Path) -> Path:
    """A checkpoint of these weights."""
    shard = StateFile(
        "rank-00000-000.safetensors", [(f"{name}/weight@0", value.flatten()) for name, value in values.items()]
    )
    about = {"shapes": {name: list(value.shape) for name, value in values.items()}, "optimizer": "sgd"}
    checkpoints = CheckpointStore(folder=folder, world=SingleProcessWorld())
    return checkpoints.save(lambda place: write_state(place, [shard], about), Progress(1, 1), {})


def test_weights_on_a_disk_have_a_folder_of_their_own(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}
    }
    own = with_private_nvme_path(config)
    place = Path(own["zero_optimization"]["offload_param"]["nvme_path"])
    assert place.parent == tmp_path / "nvme"
    (place / "zero_stage_3").mkdir(parents=True)
    remove_private_nvme_path(own)
    assert list((tmp_path / "nvme").iterdir()) == [], "the folder of the preset is the user's"
    remove_private_nvme_path(config)
    assert (tmp_path / "nvme").exists(), "a run's own is left alone"
