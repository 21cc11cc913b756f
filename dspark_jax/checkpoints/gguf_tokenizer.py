"""The tokenizer that a GGUF file carries, built in tens of milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_jax.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_NAMED_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# The one kind of tokenizer that is built here: byte-level BPE, single digits, nothing added around a text.
_UNDERSTOOD = {"model": "gpt2", "pre": "smollm"} | dict.fromkeys(
    ("add_bos_token", "add_eos_token", "add_space_prefix"), False
)


def tokenizer_from_metadata(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Builds the byte-level BPE tokenizer of a GGUF file.

    *Differs from transformers' GGUF reader*, which forgets the split into single digits: its ids differ
    where several spaces precede a digit ("a   1"), and there the model's own tokenizer agrees with this one.

    Args:
      metadata: the file's `tokenizer.*` keys.

    Returns:
      A tokenizer with its special tokens and chat template.
    """
    _refuse_unknown(metadata)
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocabulary, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    for index, kind in enumerate(types):
        if kind in (_CONTROL, _USER_DEFINED):
            bpe.add_tokens([AddedToken(tokens[index], normalized=False, special=kind == _CONTROL)])

    named = {
        argument: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for key, argument in _NAMED_TOKENS.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=metadata.get("tokenizer.chat_template"), **named
    )


def _refuse_unknown(metadata: dict[str, Any]) -> None:
    given = {key: metadata.get(f"tokenizer.ggml.{key}", False) for key in _UNDERSTOOD}
    if given != _UNDERSTOOD:
        raise InputError(
            given=f"a GGUF tokenizer with {given}",
            expected=str(_UNDERSTOOD),
            fix="use the model's safetensors directory with its own tokenizer files",
        )
