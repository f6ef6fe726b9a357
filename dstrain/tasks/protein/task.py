"""Masked recovery of protein structures: hidden residue types and backbones from the visible ones."""

# Shapes: B chains, L residues; 4 atoms N, CA, C, O.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dstrain.data.dataset import Samples
from dstrain.data.prepare import NO_TRAIN_DATA, RecordEncode, choose_held_out
from dstrain.data.records import as_record
from dstrain.data.rng import RESIDUE_STREAM, make_random_state
from dstrain.data.token_store import TokenizedDataset
from dstrain.patching import installed_version
from dstrain.task import (
    BadRecord,
    Batch,
    Checks,
    ConcatSource,
    DatasetConfig,
    Fault,
    Loss,
    RecipeError,
    RecordTask,
    Source,
    TokenStore,
    check_limits,
    pad,
    policy_of,
    prepare,
)
from dstrain.tasks.common.task import DATA_KEYS
from dstrain.tasks.protein.structures import (
    AMINO_ACIDS,
    BACKBONE_ATOMS,
    MASK,
    NUM_TYPES,
    PAD,
    READER_VERSION,
    Chain,
    chain_from_columns,
    count_chains,
    describe_chains,
    describe_unknown,
    load_or_cluster,
    open_structures,
    read_chains,
    require_gemmi,
)

if TYPE_CHECKING:
    import torch

NO_TARGET = -100
"""Target of a residue whose type is not hidden, as torch's cross-entropy ignores it."""
UNUSED_MODEL_KEYS = ("path", "config", "tokenizer", "processor", "chat_template")
"""Keys of `model` that other tasks read."""
MAX_EXPONENT = 700.0
"""Largest mean of -log p whose exp is a float64."""
LENGTH_SCALE = 10.0
"""Å per unit of the coordinate loss, Z of FAPE."""


@dataclass(frozen=True, kw_only=True)
class ProteinChecks(Checks):
    """Checks of the recipe, and baselines that know only how often each type occurs."""

    task: Protein

    def required_keys(self) -> None:
        model = self.task.recipe.model
        problem = "task protein builds its own model, without a tokenizer"
        fix = "remove it; saved weights go into model.init, such as EXPORT/model.safetensors"
        faults = [
            Fault(f"model.{name}", problem, fix) for name in UNUSED_MODEL_KEYS if getattr(model, name) is not None
        ]
        if not self.task.recipe.data.train:
            faults.append(NO_TRAIN_DATA)
        if faults:
            raise RecipeError(faults)

    def run(self) -> None:
        require_gemmi()

    def baselines(self, examples: Samples) -> Mapping[str, float]:
        """`most_common_accuracy`, `unigram_accuracy` and `unigram_perplexity` at the hidden residues.

        The frequencies are those of these chains themselves, which favours the baselines.
        """
        counts, hidden = np.zeros(len(AMINO_ACIDS)), np.zeros(len(AMINO_ACIDS))
        for index in range(len(examples)):
            sample = self.task.hide(examples[index])
            counts += np.bincount(sample.chain.types[sample.chain.is_known], minlength=len(AMINO_ACIDS))
            hidden += np.bincount(sample.chain.types[sample.hides_type], minlength=len(AMINO_ACIDS))
        shares, total = counts / counts.sum(), hidden.sum()
        entropy = -float((hidden * np.log(shares.clip(1e-12))).sum() / total)
        return {
            "most_common_accuracy": float(hidden[counts.argmax()] / total),
            "unigram_accuracy": float((hidden * shares).sum() / total),
            "unigram_perplexity": math.exp(entropy),
        }


@dataclass(frozen=True, kw_only=True)
class Protein(RecordTask):
    """Masked recovery of protein structures: residue types by cross-entropy, backbones by FAPE.

    Each sample is a chain of a PDB or mmCIF file. The loss of a hidden type is -log p. That of a hidden backbone is the
    mean distance of its atoms from their true places over 10 Å: FAPE (Jumper et al., Nature 2021, supplement,
    algorithm 28, without the clamp) over the frames of visible residues, which are given and so equal the true ones.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "perplexity", "rmsd", "coordinate_loss")
    token_columns = ("residues",)
    data_keys = tuple(key for key in DATA_KEYS if key != "eval_group")  # similar chains are the groups
    learning_rate = 1.0e-3

    hidden_dim: int = 256
    """Channels of a residue; a multiple of num_heads."""
    encoder_layers: int = 3
    """Layers that attend to residues with a visible backbone."""
    decoder_layers: int = 3
    """Layers after the encoder, which attend to all residues."""
    num_heads: int = 8
    """Attention heads of a layer."""
    dropout: float = 0.1
    """Dropout of attention and layer outputs, from 0 to below 1."""
    mask_ratio: float = 0.15
    """Share of a chain's residues that are hidden, above 0 and below 1."""
    mask: Literal["separate", "together"] = "separate"
    """separate: types and backbones are hidden at residues drawn apart; together: at the same residues."""
    coordinate_weight: float = 1.0
    """Weight of the coordinate loss, in units of 10 Å, next to the cross-entropy."""
    min_residues: int = 4
    """Shortest chain that is used, counted in residues of known type with N, CA and C."""
    split_identity: float = 0.4
    """Sequence identity from which on chains are kept on one side of data.eval_fraction, above 0 and up to 1."""

    def __post_init__(self) -> None:
        check_limits(self, "hidden_dim", "encoder_layers", "decoder_layers", "num_heads", least=1)
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                f"hidden_dim is {self.hidden_dim}, but it must be a multiple of num_heads {self.num_heads}"
            )
        check_limits(self, "dropout", below=1)
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mask_ratio is {self.mask_ratio:g}, but it must be above 0 and below 1")
        check_limits(self, "coordinate_weight")
        check_limits(self, "min_residues", least=2)
        if not 0 < self.split_identity <= 1:
            raise ValueError(f"split_identity is {self.split_identity:g}, but it must be above 0 and up to 1")

    @property
    def checks(self) -> Checks:
        return ProteinChecks(parse_record=self.parse, task=self)

    def parse(self, record: Mapping[str, Any]) -> list[Chain]:
        """Return the chains of a file that are long enough. Raises BadRecord where there is none."""
        path = record.get("path")
        if not isinstance(path, str):
            raise BadRecord("the record names no structure file under 'path'; give a folder of .pdb or .cif files")
        chains = read_chains(Path(path))
        as_record(record).note_content(
            count_chains([(len(chain.types), chain.unknown) for chain in chains]), describe_chains
        )
        if not chains:
            raise BadRecord("it has no chain of amino acids; remove the file")
        sizes = [int((chain.is_complete & chain.is_known).sum()) for chain in chains]
        if max(sizes) < self.min_residues:
            problem = (
                f"no chain has {self.min_residues} residues of known type with N, CA and C (the best has {max(sizes)})"
            )
            raise BadRecord(f"{problem}; lower options.min_residues or remove the file")
        return [chain for chain, size in zip(chains, sizes, strict=True) if size >= self.min_residues]

    def open_source(self, item: DatasetConfig) -> Source:
        return open_structures(item, self.recipe.data.columns)

    def describe_record(self, record: Mapping[str, Any], parsed: Any) -> list[str]:
        letters = np.array([*AMINO_ACIDS, "X"])
        lines = []
        for chain in parsed:
            counts = Counter(letters[chain.types].tolist()).most_common()
            parts = [f"chain {chain.name or 'without a name'}: {len(chain.types)} residues"]
            parts.append(f"types {', '.join(f'{letter} {count}' for letter, count in counts)}")
            parts += [describe_unknown(Counter(chain.unknown), len(chain.types))] * bool(chain.unknown)
            gaps, incomplete = int((np.diff(chain.positions) > 1).sum()), int((~chain.is_complete).sum())
            parts += [f"{gaps} gap{'s' * (gaps != 1)}"] * bool(gaps)
            parts += [f"{incomplete} without N, CA or C"] * bool(incomplete)
            lines += ["; ".join(parts), "".join(letters[chain.types])]
        return lines

    def choose_held_out(self, dataset: TokenizedDataset) -> np.ndarray:
        store = dataset.store
        sequences = [store[row]["residues"] for row in range(len(store))]
        clusters = load_or_cluster(store.digest, sequences, self.split_identity)
        fraction, seed = self.recipe.data.eval_fraction, self.recipe.seed
        # Each chain by itself: those of one file may be in several clusters.
        return choose_held_out(np.arange(len(store)), clusters, dataset.sizes, fraction, seed, "similar sequences")

    def build_store(self, source: ConcatSource) -> TokenStore:
        key = {"what": "structures", "version": READER_VERSION, "min_residues": self.min_residues}
        key["gemmi"] = installed_version("gemmi")
        encode = RecordEncode(self.parse, _encode_chains)
        return prepare(source, encode, key, policy_of(self.recipe), settings=self.example_settings)

    def hide(self, example: Mapping[str, Any], position: int | None = None) -> MaskedChain:
        """Return an example with hidden residues: in training others each time, in an evaluation always the same."""
        masking = ResidueMask(self.mask_ratio, self.mask, self.recipe.data.max_length, self.recipe.seed)
        # The position in the run differs from epoch to epoch, and is the same for any world size.
        key = example["sample"], example["chain"], 0 if position is None else position + 1
        return masking.apply(chain_from_columns(example), key)

    def collate(self, examples: Sequence[Mapping[str, Any]], positions: Sequence[int] | None = None) -> Batch:
        import torch

        in_run = [None] * len(examples) if positions is None else positions
        hidden = [self.hide(example, position) for example, position in zip(examples, in_run, strict=True)]
        chains = [one.chain for one in hidden]
        inputs = [np.where(one.hides_type, MASK, one.chain.types) for one in hidden]
        targets = [np.where(one.hides_type, one.chain.types, NO_TARGET) for one in hidden]
        residues = pad(inputs, PAD)  # (B, L)
        length = residues.shape[1]
        coordinates = np.full((len(chains), length, len(BACKBONE_ATOMS), 3), np.nan)
        for row, chain in zip(coordinates, chains, strict=True):
            row[: len(chain.types)] = chain.coordinates - np.nanmean(chain.coordinates, (0, 1))  # for fp32's precision
        places = torch.from_numpy(coordinates).float()
        hides_backbone = pad([one.hides_coordinates for one in hidden], 0).bool()
        complete = pad([chain.is_complete for chain in chains], 0).bool()
        return Batch(
            tensors={
                "residues": residues,
                "targets": pad(targets, NO_TARGET),
                "positions": pad([chain.positions for chain in chains], 0),
                "coordinates": places.nan_to_num(0.0),  # (B, L, 4, 3)
                "visible": complete & ~hides_backbone,
                "is_residue": residues != PAD,
                "hidden_atoms": places.isfinite().all(-1) & hides_backbone.unsqueeze(-1),  # (B, L, 4)
            },
            weight=float(sum(int(one.hides_type.sum()) for one in hidden)),
            samples=tuple(int(example["sample"]) for example in examples),
            tokens=sum(len(chain.types) for chain in chains),
        )

    def build_model(self) -> torch.nn.Module:
        import torch

        from dstrain.tasks.protein.model import ProteinConfig, ProteinModel

        torch.manual_seed(self.recipe.seed)  # the same weights on every process
        return ProteinModel(
            ProteinConfig(
                hidden_dim=self.hidden_dim,
                encoder_layers=self.encoder_layers,
                decoder_layers=self.decoder_layers,
                num_heads=self.num_heads,
                dropout=self.dropout,
                input_types=NUM_TYPES,
                output_types=len(AMINO_ACIDS),
                gradient_checkpointing=self.recipe.model.gradient_checkpointing,
            )
        )

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        from torch.nn import functional as F

        from dstrain.tasks.protein.model import superposed_rmsd

        logits, found = model(batch.tensors)  # (B, L, 20), (B, L, 4, 3)
        targets, atoms = batch.tensors["targets"], batch.tensors["hidden_atoms"]
        entropy = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        wanted = batch.tensors["coordinates"]
        # The small number keeps the gradient finite at distance 0, as in algorithm 28.
        errors = ((found - wanted).square().sum(-1) + 1e-4).sqrt() * atoms  # (B, L, 4)
        residues = atoms.any(-1).sum()
        distance = (errors.sum(-1) / atoms.sum(-1).clamp(min=1)).sum() / LENGTH_SCALE
        rmsd = superposed_rmsd(found.detach().flatten(1, 2), wanted.flatten(1, 2), atoms.flatten(1, 2))  # (B,)
        metrics: dict[str, Any] = {
            "accuracy": (logits.argmax(-1) == targets).sum(),
            "perplexity": entropy,
            "rmsd": (rmsd.sum(), float(len(rmsd))),
            "coordinate_loss": (distance, residues),
        }
        return Loss(entropy + self.coordinate_weight * distance, metrics)

    def finish_metrics(self, sums: Mapping[str, tuple[float, float]]) -> Mapping[str, float]:
        if "perplexity" not in sums:
            return {}
        total, weight = sums["perplexity"]
        return {"perplexity": math.exp(min(total / weight, MAX_EXPONENT))}


def _encode_chains(files: list[list[Chain]]) -> list[Any]:
    """Return the chains of each file as examples."""
    return [[{**chain.as_columns(), "chain": number} for number, chain in enumerate(chains)] for chains in files]


MaskMode = Literal["separate", "together"]


@dataclass(frozen=True)
class MaskedChain:
    """A window of a chain, and which of its residues are hidden."""

    chain: Chain
    hides_type: np.ndarray
    """(L,) bool: the type is hidden and has to be predicted."""
    hides_coordinates: np.ndarray
    """(L,) bool: the backbone is hidden and has to be predicted."""


@dataclass(frozen=True)
class ResidueMask:
    """How residues are hidden, and the longest window of a chain."""

    ratio: float
    mode: MaskMode
    max_length: int
    seed: int

    def apply(self, chain: Chain, key: tuple[int, ...]) -> MaskedChain:
        """Return a window of the chain with hidden residues, fixed by the seed and the key.

        Two residues at least have to be known and complete. One type and one backbone at least are hidden, and one
        complete backbone is shown.
        """
        random = make_random_state((self.seed, RESIDUE_STREAM, *key))
        chain = self._choose_window(chain, random)
        complete, known = np.flatnonzero(chain.is_complete), np.flatnonzero(chain.is_known)
        if self.mode == "together":
            known = np.intersect1d(complete, known)
        count = self._count(len(known), len(known) - (self.mode == "together" and len(known) == len(complete)))
        types = random.permutation(known)[:count]
        backbones = types
        if self.mode == "separate":
            # No more backbones than types: the number of types is the weight of a batch.
            backbones = random.permutation(complete)[: min(count, self._count(len(complete), len(complete) - 1))]
        return MaskedChain(chain, _as_mask(types, chain), _as_mask(backbones, chain))

    def _count(self, size: int, limit: int) -> int:
        return max(1, min(round(self.ratio * size), limit))

    def _choose_window(self, chain: Chain, random: np.random.RandomState) -> Chain:
        """Return a random window with two residues that are known and complete, next to one another among those."""
        if len(chain.types) <= self.max_length:
            return chain
        usable = np.flatnonzero(chain.is_complete & chain.is_known)
        # Pairs farther apart than the window are rare: chains with long stretches without a backbone.
        pairs = np.flatnonzero(np.diff(usable) < self.max_length)
        at = pairs[random.randint(len(pairs))] if len(pairs) else 0
        first, last = usable[at], usable[at + 1]
        low, high = max(0, last - self.max_length + 1), min(first, len(chain.types) - self.max_length)
        return chain.window(int(low + random.randint(max(high - low, 0) + 1)), self.max_length)


def _as_mask(indices: np.ndarray, chain: Chain) -> np.ndarray:
    mask = np.zeros(len(chain.types), dtype=bool)
    mask[indices] = True
    return mask
