"""Memory of activations: what autograd keeps for the backward pass of a decoder, and what one layer needs in it."""

# Shapes: T tokens, H width, A heads times head width, K key-value heads times head width, I width of the MLP, R rank.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dstrain.models.gradient_checkpointing import choose_layers
from dstrain.planner.line import MemoryLine
from dstrain.planner.shape import ModelShape
from dstrain.planner.workload import Workload

PAPER = "Korthikanti et al., arXiv 2205.05198, section 4, for gated MLPs and RMSNorm"
CHECKPOINT = "Chen et al., arXiv 1604.06174, section 3; torch/utils/checkpoint.py"
_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linear layers by their common input."""


@dataclass(frozen=True)
class LayerGraph:
    """Which inputs of one decoder layer autograd keeps."""

    is_recorded: bool
    """False where neither the layer nor anything before it is trained."""
    input_needs_grad: bool
    norms_trained: bool
    kept_inputs: frozenset[str]
    """Groups of linear layers that need their input: for the gradient of their weight, or of an adapter's."""
    adapter_rank: int
    """Sum of the ranks of all adapters in the layer."""


@lru_cache(maxsize=8)
def read_graphs(shape: ModelShape) -> tuple[LayerGraph, ...]:
    """Return the graph of each decoder layer, from the first to the last."""
    found: dict[int, list[tuple[str, bool, int]]] = {index: [] for index in range(shape.layers)}
    before = False
    for tensor in shape.tensors:
        language = tensor.part in ("layers", "lora") and "vision" not in tensor.name and "visual" not in tensor.name
        index = _layer_index(tensor.name) if language else None
        if index is None or index not in found:
            before = before or (tensor.is_trainable and tensor.part in ("embedding", "vision", "projector"))
            before = before or (tensor.is_trainable and tensor.part == "lora")
            continue
        rank = tensor.shape[0] if ".lora_A" in tensor.name else 0
        found[index].append((tensor.name, tensor.is_trainable, rank))
    graphs = []
    for index in range(shape.layers):
        graph = _read_graph(found[index], before)
        graphs.append(graph)
        before = graph.is_recorded
    return tuple(graphs)


def _read_graph(tensors: list[tuple[str, bool, int]], before: bool) -> LayerGraph:
    trained = [name for name, is_trainable, _ in tensors if is_trainable]
    kept = {group for group, names in _GROUPS.items() if any(f".{name}." in one for name in names for one in trained)}
    norms = any("norm" in name and "_norm." not in name.replace("layernorm", "") for name in trained)
    # Of families without these names: all inputs, if anything is trained.
    if trained and not kept and not norms:
        kept, norms = set(_GROUPS), True
    rank = sum(rank for _, _, rank in tensors)
    return LayerGraph(bool(trained) or before, before, norms, frozenset(kept), rank)


def _layer_index(name: str) -> int | None:
    words = name.split(".")
    at = next((i for i, word in enumerate(words[:-1]) if word in ("layers", "h", "layer", "blocks")), None)
    return int(words[at + 1]) if at is not None and words[at + 1].isdecimal() else None


def layer_bytes_per_token(shape: ModelShape, graph: LayerGraph, width: int, workload: Workload) -> float:
    """Return the bytes per token that autograd keeps of one decoder layer. `width`: bytes of a value."""
    if not graph.is_recorded:
        return 0.0
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm_input = 4 * shape.hidden + 4  # its fp32 copy and 1 / root mean square
    normed = (4 if shape.has_fp32_norms else width) * shape.hidden if graph.norms_trained else 0
    size = float(shape.norms_per_layer * (norm_input + normed))
    if not graph.input_needs_grad:
        size -= norm_input
    size += width * shape.hidden * sum(group in graph.kept_inputs for group in ("attention", "mlp"))
    if shape.has_qk_norm:
        size += (4 + (normed and width)) * (wide + narrow) + 4 * (shape.heads + shape.kv_heads)
    # Each query head gets a copy of its keys; one key head for all of them is expanded without a copy.
    keys = wide if (workload.has_mask or workload.is_eager) and shape.kv_heads > 1 else narrow
    if workload.has_mask:
        size += width * workload.length  # each call converts the boolean mask
    if workload.is_packed and workload.device == "cpu" and not workload.is_eager:
        # Queries, keys, values and weights; the output is the input of o_proj.
        size += width * (wide + 2 * keys) + workload.attention_weights(shape.heads, width)
        size += width * wide * ("output" in graph.kept_inputs)
    else:
        # Queries, keys, values and output of attention, and the fp32 normalizer of each head.
        size += width * (wide + 2 * keys + wide) + 4 * shape.heads
        if workload.is_packed and workload.device == "cpu":
            size += width * wide * ("output" in graph.kept_inputs)  # outputs of blocks, concatenated
    if workload.is_eager:
        # tanh of the soft cap, softmax in fp32, and its 16-bit copy, for each pair of tokens of a row.
        copies = 4 + (width if width == 2 else 0) + (width if shape.has_softcap else 0)
        size += copies * shape.heads * workload.length
    size += width * 3 * shape.intermediate  # gate, its activation, up
    size += width * shape.intermediate * ("down" in graph.kept_inputs)
    return size + width * graph.adapter_rank


def activation_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the decoder's activations, without head and images."""
    graphs, tokens = read_graphs(shape), workload.tokens
    per_layer = [layer_bytes_per_token(shape, graph, width, workload) for graph in graphs]
    formula = "T (8 H + 2 w H + w (2 A + 2 K + 4 I)) per layer"
    chosen = choose_layers(len(graphs), workload.checkpointed)
    number = sum((one.input_needs_grad or one.is_recorded) and is_on for one, is_on in zip(graphs, chosen, strict=True))
    inputs = number * width * shape.hidden * tokens
    yield MemoryLine("inputs of the layers", inputs, "gpu", "activation", "w T H per layer", CHECKPOINT, "pass")
    recomputed, kept = (
        [size for size, is_on in zip(per_layer, chosen, strict=True) if is_on is wanted] for wanted in (True, False)
    )
    size = round(max(recomputed, default=0) * tokens)
    yield MemoryLine("one recomputed layer", size, "gpu", "activation", formula, PAPER, "layer")
    size = round(sum(kept) * tokens)
    yield MemoryLine("activations of the layers", size, "gpu", "activation", formula, PAPER, "pass")
    yield MemoryLine(
        "embedding and last norm", outside_bytes(shape, workload, width), "gpu", "activation", "T (8 + 4 H + w H)",
        "transformers models/llama/modeling_llama.py", "pass",
    )  # fmt: skip
    angles = 2 * width * shape.head_dim * workload.positions
    yield MemoryLine(
        "rotary angles", angles, "gpu", "activation", "2 w L D", "Su et al., arXiv 2104.09864, eq. 34", "pass"
    )
    if any(graph.is_recorded for graph in graphs):
        inner = width * tokens * (3 * shape.intermediate + 2 * shape.hidden) + 4 * tokens * shape.hidden
        yield MemoryLine(
            "gradients inside a layer", inner, "gpu", "activation", "w T (3 I + 2 H) + 4 T H",
            "largest set of gradients that the MLP's backward pass holds", "layer",
        )  # fmt: skip


def outside_bytes(shape: ModelShape, workload: Workload, width: int) -> int:
    """Return what autograd keeps of the embedding and the last norm."""
    trained = {tensor.name.rpartition(".")[0].rpartition(".")[2] for tensor in shape.tensors if tensor.is_trainable}
    wide = 4 if shape.has_fp32_norms else width
    norm = 4 * shape.hidden + 4 + (wide * shape.hidden if "norm" in trained else 0)
    ids = 8 if any(tensor.is_trainable and tensor.part == "embedding" for tensor in shape.tensors) else 0
    rows = width * shape.hidden if workload.is_scored and not workload.is_packed else 0  # scores of every position
    return round(workload.tokens * (ids + norm + rows))
