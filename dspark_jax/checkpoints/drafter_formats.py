"""How each class of drafters lies in a Hugging Face directory: names of tensors, fields of config.json.

A new class is one entry in `FORMATS`. Everything else about checkpoints (reading, writing, converting,
checking) follows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dspark_jax.checkpoints.tap_sketches import SKETCH_SIZE, SKETCHES
from dspark_jax.core.errors import InputError, require
from dspark_jax.drafters.config import (
    RNN,
    Confidence,
    DSparkConfig,
    Eagle3Config,
    Gated,
    Layout,
    Markov,
    MTPConfig,
    SequentialHead,
)
from dspark_jax.drafters.contract import DrafterDimensions
from dspark_jax.drafters.heads import HEADS, MarkovHead
from dspark_jax.drafters.registry import DrafterConfig
from dspark_jax.targets.config import DecoderConfig
from dspark_jax.targets.families import decoder_config_from_hf

Fields = Mapping[str, Any]
FAMILIES = {"qwen3": "Qwen3", "llama": "Llama", "gemma4_text": "Gemma4", "gemma4_unified_text": "Gemma4"}
"""`model_type` -> how class names in `architectures` begin."""
LAYOUT = "sample_from_anchor"
"""The field that names the layout, as the `speculators` project calls it: true is anchor-first."""
TEMPLATE = "trained_chat_template"
"""The field with the name of the chat template, and its mode, that a drafter was trained on. Only ours."""
SHARED_FIELDS = frozenset(
    f"target_layer_ids num_target_layers draft_vocab_size {TEMPLATE} {SKETCHES}".split()
)
"""Fields of every class."""
DFLASH_FIELD = "dflash_config"
DFLASH = ("mask_token_id", "target_layer_ids", "block_size")
"""Fields that the original DFlash keeps in a field of that name."""
NOTES = frozenset("target_model_type target_text_model_type target_model_name_or_path auto_map".split())
"""Fields that only say where a checkpoint comes from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterFormat:
    """One class of drafters in files.

    Attributes:
      config: the type of its configuration.
      suffix: how its class names in `architectures` end, after the family's name.
      names: our parameter (path joined by "/", without "backbone/") -> tensor. Parameters of layers that are
        not here have the names of any transformer's (`hf_names.LAYER_NAMES`).
      fields: fields of config.json that are about the drafter; all others are about its layers.
      read: (fields, layers as a decoder has them, fields of every class) -> configuration. Raises InputError.
      write: configuration -> fields.
    """

    config: type
    suffix: str
    names: Mapping[str, str]
    fields: frozenset[str]
    read: Callable[[Fields, DecoderConfig, dict[str, Any]], DrafterConfig]
    write: Callable[[Any], dict[str, Any]]


HEAD_TYPES: dict[str, type] = {"vanilla": Markov, "gated": Gated, "rnn": RNN}
SHIPPED_HEADS = frozenset(HEAD_TYPES)


def _read_dspark(hf: Fields, layers: DecoderConfig, shared: dict[str, Any]) -> DSparkConfig:
    needed = ["block_size", "mask_token_id", "markov_rank", "enable_confidence_head"]
    needed += ["confidence_head_with_markov"] if hf.get("enable_confidence_head") else []
    problems = [f"no field {name!r}" for name in needed if hf.get(name) is None]
    if hf.get("markov_rank") and hf.get("markov_head_type") not in HEAD_TYPES:
        problems.append(f"markov_head_type {hf.get('markov_head_type')!r}")
    anchor_first = hf.get(LAYOUT, True)  # DeepSpec's classes know no other layout
    if not isinstance(anchor_first, bool):
        problems.append(f"{LAYOUT} {anchor_first!r}, which names no layout")
    if problems:
        raise _unreadable(problems)
    layout = Layout.ANCHOR_FIRST if anchor_first else Layout.FILL_IN
    head: SequentialHead | None = None
    if hf["markov_rank"]:
        head = HEAD_TYPES[hf["markov_head_type"]](rank=hf["markov_rank"])
    confidence = None
    if hf["enable_confidence_head"]:
        confidence = Confidence(with_markov=hf["confidence_head_with_markov"])
    return DSparkConfig(
        **shared,
        num_layers=layers.num_layers,
        block_len=hf["block_size"] - (layout is Layout.FILL_IN),
        mask_token=hf["mask_token_id"],
        layout=layout,
        head=head,
        confidence=confidence,
    )


def _write_dspark(config: DSparkConfig) -> dict[str, Any]:
    head_types = {cls: name for name, cls in HEAD_TYPES.items()}
    return {
        "block_size": config.block_rows,
        LAYOUT: config.layout is Layout.ANCHOR_FIRST,
        "mask_token_id": config.mask_token,
        "markov_rank": config.head.rank if config.head else 0,
        "markov_head_type": head_types[type(config.head)] if config.head else "vanilla",
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": bool(config.confidence and config.confidence.with_markov),
    }


_DSPARK_NAMES = {
    "fc/kernel": "fc.weight",
    "hidden_norm/scale": "hidden_norm.weight",
    "final_norm/scale": "norm.weight",
    "head/w1": "markov_head.markov_w1.weight",
    "head/w2": "markov_head.markov_w2.weight",
    "head/gate_kernel": "markov_head.gate_proj.weight",
    "head/gate_bias": "markov_head.gate_proj.bias",
    "head/joint_kernel": "markov_head.joint_proj.weight",
    "head/joint_bias": "markov_head.joint_proj.bias",
    "confidence/kernel": "confidence_head.proj.weight",
    "confidence/bias": "confidence_head.proj.bias",
}
DSPARK = DrafterFormat(
    config=DSparkConfig,
    suffix="DSparkModel",
    names=_DSPARK_NAMES,
    fields=frozenset(
        "block_size mask_token_id num_anchors markov_rank markov_head_type enable_confidence_head"
        f" confidence_head_with_markov dflash_config {LAYOUT}".split()
    ),
    read=_read_dspark,
    write=_write_dspark,
)


def register_head(
    name: str,
    config: type[Markov],
    module: type[MarkovHead],
    tensors: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Makes a sequential head of your own known, to drafters and to their checkpoints (docs/tutorial.md).

    Processes that read such a checkpoint have to register its head first, too.

    Args:
      name: `markov_head_type` in config.json.
      config: its configuration; `rank` is the rank of W1 and W2.
      module: its network.
      tensors: parameters beyond W1 and W2 -> names in files. Kernels are written transposed.

    Raises:
      InputError: the name is one of the heads of DeepSpec.
    """
    require(
        name not in SHIPPED_HEADS,
        given=f"a head named {name!r}",
        expected=f"a name other than {sorted(SHIPPED_HEADS)}",
        fix="choose another name: checkpoints of others use this one",
    )
    HEADS[config] = module
    HEAD_TYPES[name] = config
    _DSPARK_NAMES.update({f"head/{parameter}": f"markov_head.{file}" for parameter, file in tensors.items()})


def _read_eagle3(hf: Fields, layers: DecoderConfig, shared: dict[str, Any]) -> Eagle3Config:
    problems = [] if hf.get("ttt_length") else ["no field 'ttt_length'"]
    problems += [] if layers.num_layers == 1 else [f"num_hidden_layers={layers.num_layers} instead of 1"]
    if problems:
        raise _unreadable(problems)
    return Eagle3Config(**shared, block_len=hf["ttt_length"])


EAGLE3 = DrafterFormat(
    config=Eagle3Config,
    suffix="Eagle3Model",
    names={"fc/kernel": "fc.weight", "final_norm/scale": "norm.weight"},
    fields=frozenset("ttt_length draft_num_hidden_layers step_loss_decay".split()),
    read=_read_eagle3,
    write=lambda config: {"ttt_length": config.block_len, "draft_num_hidden_layers": 1},
)


def _read_mtp(hf: Fields, layers: DecoderConfig, shared: dict[str, Any]) -> MTPConfig:
    if hf.get(MODULES) != layers.num_layers:
        raise _unreadable([f"{MODULES} {hf.get(MODULES)} and {layers.num_layers} layers"])
    return MTPConfig(**shared, block_len=layers.num_layers)


MODULES = "num_nextn_predict_layers"
"""The field in which DeepSeek-V3 counts its modules; their tensors have DeepSeek's names, too."""
MTP = DrafterFormat(
    config=MTPConfig,
    suffix="MTPModel",
    names={},
    fields=frozenset({MODULES}),
    read=_read_mtp,
    write=lambda config: {MODULES: config.block_len},
)

FORMATS: tuple[DrafterFormat, ...] = (DSPARK, EAGLE3, MTP)


def format_of(config: DrafterDimensions) -> DrafterFormat:
    """The format of a drafter's checkpoints."""
    return next(entry for entry in FORMATS if entry.config is type(config))


def architecture(entry: DrafterFormat, model_type: str) -> str:
    """What `architectures` of config.json says."""
    return FAMILIES[model_type] + entry.suffix


def own_fields(config: DrafterDimensions) -> dict[str, Any]:
    """The fields of config.json that describe a drafter, beyond its layers and its name."""
    fields = {**format_of(config).write(config), "target_layer_ids": list(config.taps)}
    if config.vocab_size != config.target_vocab_size:
        fields["draft_vocab_size"] = config.vocab_size
    return fields


def read_config(hf: Fields) -> tuple[DrafterConfig | None, list[str]]:
    """(the drafter that a config.json describes, everything about it that is not understood).

    Raises:
      InputError: the directory holds no drafter of a known class.
    """
    hf = with_lifted_dflash(hf)
    known = {architecture(entry, family): entry for entry in FORMATS for family in FAMILIES}
    named: list[Any] = hf.get("architectures") or [None]
    entry = known.get(named[0]) if len(named) == 1 else None
    if entry is None:
        raise InputError(
            given=f"architectures {hf.get('architectures')}",
            expected=f"a drafter: one of {sorted(known)}",
            fix="pass a drafter directory; for a target use --target",
        )
    problems = []
    model_type = hf.get("model_type")
    if model_type in FAMILIES and named != [architecture(entry, model_type)]:
        problems.append(f"architectures {named} with model_type {model_type!r}")
    layers = layer_config(hf, problems)
    if layers is not None and len(set(layers.layers)) > 1:
        problems.append("layers that are not all alike")
    problems += [f"dflash_config with {name!r}" for name in hf.get(DFLASH_FIELD) or {} if name not in DFLASH]
    taps = hf.get("target_layer_ids")
    depth = hf.get("num_target_layers")
    if not taps:
        problems.append("no field 'target_layer_ids'")
    elif depth is not None and max(taps) >= depth:
        problems.append(f"target_layer_ids {taps} of a target with {depth} layers")
    if taps and SKETCHES in hf and not _are_sketches(hf[SKETCHES], len(taps)):
        problems.append(f"{SKETCHES} that are not {SKETCH_SIZE} numbers for each of {len(taps)} taps")
    if problem := mask_problem(hf.get("mask_token_id"), hf):
        problems.append(problem)
    config = None
    if layers is not None and taps:
        shared = {
            "target_vocab_size": layers.vocab_size,
            "vocab_size": hf.get("draft_vocab_size") or layers.vocab_size,
            "block": layers.block,
            "taps": tuple(taps),
        }
        try:
            config = entry.read(hf, layers, shared)
        except InputError as error:
            problems.append(error.given)
    return config, problems


def mask_problem(mask_token: int | None, hf: Fields) -> str | None:
    """Padding as mask token: other engines give it no embedding, or mask its rows out."""
    is_padding = mask_token is not None and mask_token == hf.get("pad_token_id")
    return f"mask_token_id {mask_token}, the padding id" if is_padding else None


def _are_sketches(value: Any, num_taps: int) -> bool:
    rows = value if isinstance(value, list) else []
    return len(rows) == num_taps and all(
        isinstance(row, list) and len(row) == SKETCH_SIZE and all(isinstance(x, int | float) for x in row)
        for row in rows
    )


def with_lifted_dflash(hf: Fields) -> Fields:
    """A config.json of the original DFlash, told in the fields of DeepSpec.

    Its class is fill-in by definition, has no heads, and keeps two fields in `dflash_config`.
    """
    if hf.get("architectures") != ["DFlashDraftModel"] or hf.get("model_type") not in FAMILIES:
        return hf
    nested = hf.get(DFLASH_FIELD) or {}
    lifted = {name: nested[name] for name in DFLASH if name in nested}
    implied = {"markov_rank": 0, "enable_confidence_head": False, LAYOUT: False}
    return {**implied, **hf, **lifted, "architectures": [architecture(DSPARK, hf["model_type"])]}


def layer_config(hf: Fields, problems: list[str]) -> DecoderConfig | None:
    """The drafter's layers as a decoder has them.

    Args:
      hf: the fields of config.json.
      problems: takes what is not understood; unknown fields do not hide other problems.
    """
    about_drafter = frozenset().union(SHARED_FIELDS, NOTES, *(entry.fields for entry in FORMATS))
    about_layers = {name: value for name, value in hf.items() if name not in about_drafter}
    try:
        return decoder_config_from_hf(about_layers)
    except InputError as error:
        problems.append(error.given)
        known = {n: v for n, v in about_layers.items() if f"unknown field {n!r}" not in error.given}
    try:
        return decoder_config_from_hf(known)
    except InputError:
        return None


def _unreadable(problems: list[str]) -> InputError:
    return InputError(
        given=", ".join(problems),
        expected=f"DeepSpec's fields, and markov_head_type one of {sorted(HEAD_TYPES)}",
        fix="use a config.json as dspark_jax or DeepSpec writes it",
    )
