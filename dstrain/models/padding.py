"""The token that fills up rows: one that no text becomes, where the tokenizer has one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
"""How families write a pad token that their tokenizer has and does not name; the last is Llama 3.1's."""
RESERVED_TOKEN = re.compile(r"\W*(reserved|unused|dummy|placeholder|control|special)\D*\d+\W*", re.IGNORECASE)
"""Special tokens that a family keeps for its users: <|reserved_special_token_0|> (Llama 3), <unused7> (Gemma),
[control_8] (Mistral v3), <|placeholder1|> (Phi 3), <|dummy_85|> (Phi 4, whose pad token it is)."""
PRIVATE_CHARACTER = "\U0010fffd"
"""A private letter: a tokenizer that has an unknown token for anything has it for this."""


def set_pad_token(tokenizer: Any, key: str, used_tokens: Collection[str] = ()) -> None:
    """Give a tokenizer without a pad token one; a tokenizer that names one keeps it, also where that is its EOS.

    The first that there is of: a pad token that it has and does not name, a special token kept for its users, an
    unknown token that no text becomes, EOS. With EOS, reward models of transformers, which read a score at the last
    token that is not padding, cannot read it at the EOS of an answer. `used`: special tokens that mean something.
    Raises RecipeError where it has not even an EOS.
    """
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise RecipeError(Fault(key, "the tokenizer has neither a pad nor an EOS token", "add one and save it again"))
    tokenizer.pad_token = next(_unused_tokens(tokenizer, used_tokens), tokenizer.eos_token)


def replace_eos_pad_token(tokenizer: Any) -> None:
    """Give a tokenizer that names its EOS as pad token one that no text becomes, where it has one: for a new score head.

    Recipes of fine-tuning often save a tokenizer so, and the score of an answer would be read in front of its EOS.
    """
    if tokenizer.pad_token is not None and tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = next(_unused_tokens(tokenizer, ()), tokenizer.eos_token)


def _unused_tokens(tokenizer: Any, used_tokens: Collection[str]) -> Iterator[str]:
    """Tokens that can fill up rows, the best first."""
    added = tokenizer.added_tokens_decoder  # id -> AddedToken
    special = [str(added[number].content) for number in sorted(added) if added[number].special]
    roles = {tokenizer.bos_token, tokenizer.eos_token, getattr(tokenizer, "image_token", None), *used_tokens}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    free = [text for text in special if text not in roles and text not in template]
    unknown = tokenizer.unk_token
    yield from (text for text in PAD_TOKENS if text in free and text != unknown)
    yield from (text for text in free if RESERVED_TOKEN.fullmatch(text) and text != unknown)
    if (
        unknown in free
        and tokenizer.unk_token_id not in tokenizer(PRIVATE_CHARACTER, add_special_tokens=False)["input_ids"]
    ):
        yield unknown


def clear_padding_idx(model: PreTrainedModel) -> None:
    """Let every row of the embedding learn.

    Families hand the config's pad token to torch.nn.Embedding as `padding_idx`, whose row gets no gradient: where EOS or
    BOS is the pad token too, it would stay as it was. Padding itself gets none either way: no loss looks at it.
    """
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None
