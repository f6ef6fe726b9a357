"""Task protein: samples, hidden residues, loss, metrics, baselines and splits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import DataError, RecipeError, TaskError
from dstrain.tasks import make_task
from dstrain.tasks.protein.structures import BACKBONE_ATOMS, MASK, UNKNOWN, Chain
from dstrain.tasks.protein.task import NO_TARGET, MaskMode, Protein, ResidueMask
from tests.tiny import tiny_recipe
from tests.unit.data.pdb_files import helix, pdb_text
from tests.vocabulary import invoke

pytest.importorskip("gemmi", reason='needs gemmi: pip install "dstrain[protein]"')


def made(folder: Path, data: dict[str, Any] | None = None, **options: Any) -> Protein:
    values = tiny_recipe("protein", folder)
    values["options"] |= options
    values["data"] |= data or {}
    task = make_task(RunConfig.model_validate(values))
    assert isinstance(task, Protein)
    return task


def train_batch(task: Protein, ids: list[int], places: list[int] | None = None) -> Any:
    examples = task.examples("train")
    assert examples is not None
    return make_batch(examples, task.collate, ids, 0, places or [])


def write(folder: Path, name: str, *sequences: str) -> None:
    folder.mkdir(exist_ok=True)
    chains = [pdb_text(helix(sequence, chain)) for sequence, chain in zip(sequences, "ABCD", strict=False)]
    (folder / f"{name}.pdb").write_text("".join(text.replace("END\n", "") for text in chains))


def test_each_chain_is_a_sample(tmp_path: Path) -> None:
    write(tmp_path / "pdb", "two", "ACDEFGH", "IKLMNPQ")
    write(tmp_path / "pdb", "and-a-peptide", "ACDEFGHIK", "ACD")
    examples = made(tmp_path, {"train": str(tmp_path / "pdb")}).examples("train")
    assert examples is not None
    assert [len(examples[index]["residues"]) for index in range(len(examples))] == [9, 7, 7]
    assert examples.summarize()["tokens"] == 23, "residues, not coordinates"
    assert examples.sequence_lengths(np.arange(3)).sequences.tolist() == [[9], [7], [7]]


def test_a_hidden_type_is_not_in_the_input_and_a_shown_one_is_no_target(tmp_path: Path) -> None:
    tensors = train_batch(made(tmp_path), [0, 1, 2]).tensors
    is_hidden = tensors["residues"] == MASK
    assert (is_hidden == (tensors["targets"] != NO_TARGET)).all()
    assert not (tensors["visible"] & tensors["hidden_atoms"].any(-1)).any()
    assert not (tensors["visible"] & ~tensors["is_residue"]).any()


def test_what_is_hidden_differs_from_epoch_to_epoch_and_not_in_evaluations(tmp_path: Path) -> None:
    task = made(tmp_path)
    first, later, again = (train_batch(task, [5], places).tensors["targets"] for places in ([5], [69], [5]))
    assert torch.equal(first, again)
    assert first.shape != later.shape or not torch.equal(first, later)
    assert torch.equal(train_batch(task, [5]).tensors["targets"], train_batch(task, [5]).tensors["targets"])


def test_the_weight_is_the_number_of_hidden_types(tmp_path: Path) -> None:
    batch = train_batch(made(tmp_path), [0, 1, 2, 3])
    assert batch.weight == int((batch.tensors["targets"] != NO_TARGET).sum())
    assert batch.tokens == int(batch.tensors["is_residue"].sum())


class Oracle(torch.nn.Module):
    """Knows the answers; the atoms are moved by `offset` Å along x."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = 50 * torch.nn.functional.one_hot(tensors["targets"].clamp(min=0), 20).float()
        return logits, tensors["coordinates"] + torch.tensor([self.offset, 0.0, 0.0])


def test_the_right_answers_cost_nothing(tmp_path: Path) -> None:
    task = made(tmp_path)
    batch = train_batch(task, [0, 1, 2, 3])
    loss = task.loss(Oracle(0.0), batch)
    assert float(loss.total) == pytest.approx(0, abs=0.02)
    assert int(loss.metrics["accuracy"]) == batch.weight  # type: ignore[arg-type]


def test_the_coordinate_loss_is_the_distance_and_a_shift_of_all_atoms_has_no_rmsd(tmp_path: Path) -> None:
    task = made(tmp_path, coordinate_weight=2.0)
    batch = train_batch(task, [0, 1, 2, 3])
    loss: Any = task.loss(Oracle(3.0), batch)
    total, residues = loss.metrics["coordinate_loss"]
    assert float(total) / float(residues) == pytest.approx(0.3, abs=1e-4)
    assert float(loss.total) == pytest.approx(2 * float(total), abs=0.02)
    assert float(loss.metrics["rmsd"][0]) == pytest.approx(0, abs=1e-3)


def test_a_chain_that_is_turned_and_moved_has_the_same_loss(tmp_path: Path) -> None:
    task = made(tmp_path)
    batch, model = train_batch(task, [0, 1, 2, 3]), task.build_model()
    turn = torch.tensor([[0.36, 0.48, -0.8], [-0.8, 0.6, 0.0], [0.48, 0.64, 0.6]])
    moved = batch.with_tensors({"coordinates": batch.tensors["coordinates"] @ turn.T + torch.tensor([9.0, -5.0, 2.0])})
    with torch.no_grad():
        losses = [task.loss(model, each) for each in (batch, moved)]
    assert float(losses[1].total) == pytest.approx(float(losses[0].total), rel=1e-5)
    assert float(losses[1].metrics["rmsd"][0]) == pytest.approx(float(losses[0].metrics["rmsd"][0]), rel=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("mask", ["separate", "together"])
def test_a_step_of_training_lowers_the_loss(mask: str, tmp_path: Path) -> None:
    task = made(tmp_path, mask=mask)
    batch, model = train_batch(task, list(range(16))), task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        loss = task.loss(model, batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_similar_chains_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    for number in range(8):
        sequence = "".join(random.choice([*"ACDEFGHIKLMNPQRSTVWY"], 40))
        write(tmp_path / "pdb", f"{number}", sequence)
        write(tmp_path / "pdb", f"{number}-copy", sequence[:20] + "W" + sequence[21:])
    task = made(tmp_path, {"train": str(tmp_path / "pdb"), "eval": None, "eval_fraction": 0.25})
    train, held_out = task.examples("train"), task.examples("eval")
    assert train is not None
    assert held_out is not None
    assert (len(train), len(held_out)) == (12, 4)
    numbers = [{int(dataset[index]["sample"]) // 2 for index in range(len(dataset))} for dataset in (train, held_out)]
    assert not numbers[0] & numbers[1]


def test_chains_that_are_all_similar_cannot_be_split(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "pdb", f"{number}", "ACDEFGHIKLMNPQRSTVWY" * 2)
    task = made(tmp_path, {"train": str(tmp_path / "pdb"), "eval": None, "eval_fraction": 0.25})
    with pytest.raises(DataError, match=r"holds out all 3 records .*which belong together \(similar sequences\)"):
        task.examples("train")


def test_baselines_know_the_frequencies_only(tmp_path: Path) -> None:
    write(tmp_path / "pdb", "x", "A" * 30 + "G" * 10)
    task = made(tmp_path, {"eval": str(tmp_path / "pdb"), "max_length": 64}, mask_ratio=0.99)
    examples = task.examples("eval")
    assert examples is not None
    found = task.checks.baselines(examples)
    assert found["most_common_accuracy"] == pytest.approx(0.75, abs=0.02), "hidden nearly everywhere"
    assert found["unigram_accuracy"] == pytest.approx(0.75**2 + 0.25**2, abs=0.02)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found["unigram_perplexity"] == pytest.approx(math.exp(entropy), abs=0.05)


@pytest.mark.parametrize("on_error", ["skip", "fail", None])
def test_a_broken_file_is_named_and_handled_as_the_recipe_says(on_error: str | None, tmp_path: Path) -> None:
    write(tmp_path / "pdb", "good", "ACDEFGHIK")
    lines = pdb_text(helix("ACDEF")).splitlines()
    (tmp_path / "pdb/bad.pdb").write_text("\n".join([lines[0], *lines]))
    task = made(tmp_path, {"train": str(tmp_path / "pdb"), "on_error": on_error})
    if on_error == "skip":
        examples = task.examples("train")
        assert examples is not None
        assert len(examples) == 1
        assert examples.report["skipped_records"] == [
            f"{tmp_path}/pdb/bad.pdb: chain A, residue 1 ALA has atom N twice; give alternate locations, or remove one"
        ]
        return
    with pytest.raises(DataError, match=r"bad\.pdb: chain A, residue 1 ALA has atom N twice"):
        task.examples("train")


def test_data_check_names_the_broken_file(tmp_path: Path) -> None:
    write(tmp_path / "pdb", "good", "ACDEFGHIK")
    (tmp_path / "pdb/worse.cif").write_text("no structure")
    (tmp_path / "pdb/dna.pdb").write_text("END\n")
    result = invoke("data", "check", tmp_path / "pdb", "--task", "protein")
    assert result.exit_code == 2
    assert "worse.cif: gemmi cannot read it" in result.output
    assert "dna.pdb: it has no chain of amino acids" in result.output
    assert "1 good records, 2 bad" in result.output


def test_chains_that_are_too_short_are_bad_only_where_none_is_left(tmp_path: Path) -> None:
    write(tmp_path / "pdb", "short", "ACD", "AC")
    task = made(tmp_path, {"train": str(tmp_path / "pdb"), "on_error": "skip"})
    with pytest.raises(DataError, match=r"no chain has 4 residues .* \(the best has 3\)"):
        task.examples("train")


@pytest.mark.parametrize("key", ["path", "tokenizer", "chat_template"])
def test_a_model_that_would_be_ignored_is_refused(key: str, tmp_path: Path) -> None:
    values = tiny_recipe("protein", tmp_path) | {"model": {key: "exported"}}
    with pytest.raises(RecipeError, match=rf"model\.{key}: task protein builds its own model.* into model\.init"):
        make_task(RunConfig.model_validate(values)).checks.required_keys()


def test_without_gemmi_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gemmi", None)
    task = made(tmp_path)
    with pytest.raises(DataError, match=r'pip install "dstrain\[protein\]"'):
        task.checks.run()
    with pytest.raises(DataError, match=r'pip install "dstrain\[protein\]"'):
        task.parse({"path": str(tmp_path / "train/000.pdb")})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 0.0}, r"mask_ratio is 0, but it must be above 0 and below 1"),
        ({"mask_ratio": 1.0}, r"mask_ratio is 1, but"),
        ({"hidden_dim": 30}, r"hidden_dim is 30, but it must be a multiple of num_heads 4"),
        ({"encoder_layers": 0}, r"encoder_layers is 0, but it must be at least 1"),
        ({"min_residues": 1}, r"min_residues is 1, but it must be at least 2"),
        ({"split_identity": 0.0}, r"split_identity is 0, but it must be above 0 and up to 1"),
        ({"dropout": 1.0}, r"dropout is 1, but"),
        ({"coordinate_weight": -1.0}, r"coordinate_weight is -1, but"),
        ({"mask": "both"}, r"mask"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        made(tmp_path, **options)


def test_a_recipe_without_data_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.train: is not set"):
        make_task(RunConfig.model_validate({"task": "protein"})).checks.required_keys()


def test_the_atoms_of_the_store_are_those_of_the_head() -> None:
    from dstrain.tasks.protein.model import NUM_ATOMS

    assert len(BACKBONE_ATOMS) == NUM_ATOMS


# Hidden residues: fixed by seed and sample, and never more than a chain can spare.


def chain(length: int) -> Chain:
    random = np.random.RandomState(length)
    types = random.randint(20, size=length).astype(np.int32)
    return Chain("A", types, random.normal(size=(length, 4, 3)), np.arange(length))


def masking(mode: MaskMode = "separate", ratio: float = 0.15, max_length: int = 64) -> ResidueMask:
    return ResidueMask(ratio, mode, max_length, 3)


@pytest.mark.parametrize("mode", ["separate", "together"])
def test_the_ratio_of_types_and_backbones_is_hidden(mode: MaskMode) -> None:
    found = masking(mode).apply(chain(60), (5, 0, 0))
    assert found.hides_type.sum() == found.hides_coordinates.sum() == 9
    assert (found.hides_type == found.hides_coordinates).all() == (mode == "together")


def test_the_key_alone_decides_the_masking() -> None:
    first, again, other = (masking().apply(chain(60), key) for key in ((5, 0, 0), (5, 0, 0), (5, 0, 1)))
    assert (first.hides_type == again.hides_type).all()
    assert (first.hides_type != other.hides_type).any()


@pytest.mark.parametrize("mode", ["separate", "together"])
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.99])
@pytest.mark.parametrize("length", [2, 3, 30, 200])
def test_something_is_hidden_and_a_backbone_is_shown(mode: MaskMode, ratio: float, length: int) -> None:
    found = masking(mode, ratio).apply(chain(length), (1, 0, 7))
    assert 1 <= found.hides_coordinates.sum() <= found.hides_type.sum()
    assert (found.chain.is_complete & ~found.hides_coordinates).any()


def test_what_is_unknown_is_no_target() -> None:
    whole = chain(60)
    whole.types[::2] = UNKNOWN
    whole.coordinates[::3, 1] = np.nan
    found = masking(ratio=0.9).apply(whole, (1, 0, 0))
    assert found.chain.is_known[found.hides_type].all()
    assert found.chain.is_complete[found.hides_coordinates].all()


def test_a_long_chain_is_cut_to_a_window_that_differs_from_time_to_time() -> None:
    whole = chain(300)
    windows = [masking().apply(whole, (1, 0, place)).chain for place in range(8)]
    assert all(len(window.types) == 64 for window in windows)
    assert len({int(window.positions[0]) for window in windows}) > 4
    for window in windows:
        start = int(window.positions[0])
        assert (window.types == whole.types[start : start + 64]).all()


def test_a_window_holds_residues_that_can_be_hidden_and_shown() -> None:
    whole = chain(300)
    whole.coordinates[: 200 - 10] = np.nan
    whole.coordinates[200:] = np.nan
    for place in range(20):
        found = masking(max_length=16).apply(whole, (1, 0, place))
        assert (found.chain.is_complete & ~found.hides_coordinates).any()
        assert found.hides_coordinates.any()
