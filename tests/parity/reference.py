"""A training step written from the papers alone: plain transformers, one unpadded row at a time, ids from an own encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import log_softmax, logsigmoid

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without line breaks between the turns: an answer ends with its last token."""
SAVED = ".modules_to_save.default."
"""In the names of a head that peft trains whole beside the adapters."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A sequence and, of each token, whether it is learnt."""

    ids: list[int]
    learnt: list[bool]
    images: Mapping[str, torch.Tensor]
    """The model's inputs for the row's images."""


def encode_conversation(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Row:
    """Return a conversation of which every answer is learnt, with the token that ends it."""
    text, spans = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(message["content"]) + len(END)))
        text += message["content"] + END
    text = text[: spans[-1][1]]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return Row(encoded["input_ids"], [any(first <= at < last for first, last in spans) for at in starts], {})


def encode_answer(tokenizer: Any, question: str, answer: str) -> Row:
    """Return a question and its answer, which is learnt."""
    return encode_conversation(
        tokenizer, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )


def answer_log_probs(run: Callable[..., Any], row: Row) -> torch.Tensor:
    """Return log p of each learnt token given those before it."""
    logits = run(input_ids=torch.tensor([row.ids]), **row.images).logits[0].float()
    targets = torch.tensor(row.ids[1:])
    chosen = log_softmax(logits[:-1], -1).gather(1, targets[:, None])[:, 0]
    return chosen[torch.tensor(row.learnt[1:])]


def sft_terms(run: Callable[..., Any], row: Row) -> tuple[torch.Tensor, float]:
    """Return the negative log-likelihood of the learnt tokens, and their number."""
    chosen = answer_log_probs(run, row)
    return -chosen.sum(), float(len(chosen))


def dpo_term(
    run: Callable[..., Any], reference: Callable[..., Any], pair: tuple[Row, Row], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the loss of a pair.

    sigmoid: Rafailov et al., arXiv 2305.18290, eq. 7, with the smoothing of Mitchell's note on cDPO; ipo: Azar et al.,
    arXiv 2310.12036, eq. 17, with means over tokens as TRL; hinge: Zhao et al., arXiv 2305.10425; simpo: Meng et al.,
    arXiv 2405.14734, eq. 6; orpo: Hong et al., arXiv 2403.07691, eq. 6.
    """
    kind, beta, smoothing = options["loss_type"], options["beta"], options.get("label_smoothing", 0.0)
    chosen, rejected = (answer_log_probs(run, row) for row in pair)
    if kind == "simpo":
        return -logsigmoid(beta * (chosen.mean() - rejected.mean()) - options["simpo_gamma"])
    if kind == "orpo":
        odds = [mean - torch.log1p(-mean.exp()) for mean in (chosen.mean(), rejected.mean())]
        return -chosen.mean() - beta * logsigmoid(odds[0] - odds[1])
    with torch.no_grad():
        old_chosen, old_rejected = (answer_log_probs(reference, row) for row in pair)
    if kind == "ipo":
        margin = (chosen.mean() - old_chosen.mean()) - (rejected.mean() - old_rejected.mean())
        return (margin - 1 / (2 * beta)) ** 2
    margin = (chosen.sum() - old_chosen.sum()) - (rejected.sum() - old_rejected.sum())
    if kind == "hinge":
        return torch.relu(1 - beta * margin)
    return -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)


def rm_term(run: Callable[..., Any], pair: tuple[Row, Row], options: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of a pair: Bradley and Terry's, as in Ouyang et al., arXiv 2203.02155, eq. 1.

    With the centring of Eisenstein et al., arXiv 2312.09244, section 3.2.
    """
    chosen, rejected = (run(input_ids=torch.tensor([row.ids]), **row.images).logits[0, 0].float() for row in pair)
    centre = options.get("center_rewards_coefficient") or 0.0
    return -logsigmoid(chosen - rejected) + centre * (chosen + rejected) ** 2


class Model:
    """A plain transformers model whose weights are leaves: its own, or adapters beside frozen ones."""

    def __init__(self, module: torch.nn.Module, values: Mapping[str, Any], scale: float) -> None:
        """`values`: name -> weight, with peft's names where there are adapters. `scale`: alpha / rank."""
        self._module, self._scale = module.eval(), scale
        self.base: Tensors = {}
        self.adapters: dict[str, Tensors] = {}
        heads: Tensors = {}
        for name, value in values.items():
            tensor = torch.as_tensor(value, dtype=torch.float32).clone()
            short = name.removeprefix("base_model.model.")
            layer, _, kind = short.partition(".lora_")
            if ".original_module." in name:  # that of a head which peft trains a copy of
                continue
            if SAVED in name:
                heads[short.replace(SAVED, ".")] = tensor.requires_grad_()
            elif kind:
                self.adapters.setdefault(f"{layer}.weight", {})[kind[0]] = tensor.requires_grad_()
            else:
                self.base[short.replace(".base_layer.", ".")] = tensor
        self.base |= heads
        self.trained: Tensors = heads
        if not self.adapters:
            self.trained = {name: tensor.requires_grad_() for name, tensor in self.base.items()}
        for name, parts in self.adapters.items():
            self.trained |= {f"{name.removesuffix('.weight')}.lora_{kind}": tensor for kind, tensor in parts.items()}

    def run(self, **inputs: Any) -> Any:
        """Return the model's output. LoRA (Hu et al., arXiv 2106.09685, section 4.1): W + alpha / rank B A."""
        added = {
            name: self.base[name] + self._scale * (parts["B"] @ parts["A"]) for name, parts in self.adapters.items()
        }
        return functional_call(self._module, {**self.base, **added}, kwargs=inputs)


def trained_only(values: Mapping[str, Any], adapters: bool) -> dict[str, Any]:
    """Return the values of trained parameters under the reference's names."""
    short = {name.removeprefix("base_model.model."): value for name, value in values.items()}
    if not adapters:
        return short
    named = {name.removesuffix(".default.weight"): value for name, value in short.items() if ".lora_" in name}
    return named | {name.replace(SAVED, "."): value for name, value in short.items() if SAVED in name}
