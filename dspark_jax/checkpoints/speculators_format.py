"""The format of the `speculators` project (version 0.9), as far as drafters of this one fit into it.

Its draft layers are Qwen3's, embedding and LM head are the verifier's, and a tap is named by the hidden state
that it is in transformers' count, where 0 is the embedding: one more than the layer that put it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.checkpoints.drafter import LM_HEAD, VOCABULARY
from dspark_jax.checkpoints.drafter_formats import DFLASH_FIELD, DSPARK, NOTES, SHARED_FIELDS, own_fields
from dspark_jax.checkpoints.safetensors_files import Tensors
from dspark_jax.drafters.config import DSparkConfig
from dspark_jax.drafters.registry import DrafterConfig

if TYPE_CHECKING:
    from dspark_jax.checkpoints.convert import TargetTensors

VERSION = "0.9.0"
W2 = DSPARK.names["head/w2"]


def speculators_config(
    config: DrafterConfig, fields: Mapping[str, Any], target: TargetTensors
) -> tuple[dict[str, Any], list[str]]:
    """(config.json, what of the drafter the format cannot hold)."""
    if not isinstance(config, DSparkConfig):
        return {}, [f"a drafter of class {fields['architectures'][0]}"]
    problems = [] if fields["model_type"] == "qwen3" else [f"layers of family {fields['model_type']}"]
    if max(config.taps) == target.config.num_layers - 1:
        problems.append("a tap on the last layer, which its target engine gives without being asked")
    plain = config.head is None and config.confidence is None
    kind = "dflash" if plain else "dspark"
    heads = (
        {}
        if plain
        else {name: fields[name] for name in own_fields(config) if "head" in name or "rank" in name}
    )
    about_drafter = DSPARK.fields | SHARED_FIELDS | NOTES | {"architectures", DFLASH_FIELD}
    return {
        "architectures": ["DFlashDraftModel" if plain else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_len}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.hf_config.get("architectures") or [],
            },
        },
        "transformer_layer_config": {k: v for k, v in fields.items() if k not in about_drafter},
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_rows,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "mask_token_id": config.mask_token,
        "sample_from_anchor": fields["sample_from_anchor"],
        "tie_word_embeddings": False,
        "dtype": fields["dtype"],
        **heads,
    }, problems


def speculators_tensors(
    config: DrafterConfig, tensors: Tensors, target_head: Callable[[], np.ndarray]
) -> Tensors:
    """The tensors of a drafter in this format.

    A reduced vocabulary becomes `t2d` (is a target id in it?) and `d2t` (target id minus draft id), for which
    draft ids must follow the order of target ids: the rows of W2 are reordered. Its LM head is stored.
    """
    if VOCABULARY not in tensors:
        return tensors
    ids_np = tensors[VOCABULARY]()
    order_np = np.argsort(ids_np)
    sorted_np = ids_np[order_np].astype(np.int64)
    in_vocabulary_np = np.isin(np.arange(config.target_vocab_size), sorted_np)
    kept = {name: make for name, make in tensors.items() if name not in (VOCABULARY, W2)}
    if W2 in tensors:
        kept[W2] = lambda: tensors[W2]()[order_np]
    return {
        **kept,
        LM_HEAD: lambda: target_head()[sorted_np],
        "d2t": lambda: sorted_np - np.arange(len(sorted_np)),
        "t2d": lambda: in_vocabulary_np,
    }
