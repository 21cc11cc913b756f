"""Before serving: do drafter and target fit together as they were put together?

What is wrong with a drafter costs speed and nothing else, so nobody would notice. Here it drafts along
answers that the target just gave to a few prompts, once as its checkpoint says and once with each property
changed that checkpoints and engines get wrong. A drafter that accepts next to nothing, or clearly more with a
change, is refused.

A mismatch that costs a drafter little is not seen. Another mode of the chat template is tried only when the
drafter does badly, since texts of different modes are not equally predictable.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.core.buckets import round_up
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.drafters.config import DSparkConfig, Layout
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.targets.decoder import Decoder, embedding_table, lm_head_kernel

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 + 26? Show your steps.",
)
NEW_TOKENS = 24
LENGTH_MULTIPLE = 32
NEXT_TO_NOTHING = 0.1
"""Accepted tokens of a block below which a drafter is refused in any case."""
DOING_BADLY = 0.5
"""Accepted tokens of a block below which other mask tokens and template modes are tried, too."""
CLEARLY_MORE, STANDARD_ERRORS = 0.15, 3.0
"""A change is to blame when it accepts this much more, and by so many standard errors."""
TEMPLATE_MODES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One property of a drafter told otherwise.

    Attributes:
      property: what is changed: "taps", "layout", "mask id" or "template".
      to: the other value, in words.
      drafter: the drafter with it.
      taps: the layers that it reads.
    """

    property: str
    to: str
    drafter: Drafter
    taps: tuple[int, ...]


class Replay:
    """Answers of the target, along which drafters are tried.

    Args:
      answers: finished requests.
      target: who gave them.
      draft: the drafter; its parameters serve every change of it.
    """

    def __init__(self, answers: list[Request], target: LoadedTarget, draft: LoadedDrafter):
        self._target, self._draft = target, draft
        self._shared = draft.shared_weights(
            embedding_table(target.params), lm_head_kernel(target.params), target.config.scaling
        )
        whole = [request.prompt_tokens + request.emitted for request in answers]
        T = round_up(max(map(len, whole)), LENGTH_MULTIPLE)
        tokens_BT = np.stack([np.pad(tokens, (0, T - len(tokens))) for tokens in whole]).astype(np.int32)
        starts_B1 = np.array([[len(request.prompt_tokens)] for request in answers])
        ends_B1 = np.array([[len(tokens)] for tokens in whole])
        anchors_BA = starts_B1 + np.arange(NEW_TOKENS)
        self._keep_BA = anchors_BA + 1 < ends_B1
        self.batch = {
            "tokens_BT": jnp.asarray(tokens_BT),
            "loss_mask_BT": jnp.asarray(np.arange(T) < ends_B1),
            "anchors_BA": jnp.asarray(np.where(self._keep_BA, anchors_BA, 0)),
            "keep_BA": jnp.asarray(self._keep_BA),
        }
        last = target.config.num_layers - 1
        layers = sorted({near for tap in draft.drafter.config.taps for near in _near(tap, last)})
        self._features = dict(zip(layers, self._run_target(tuple(layers)), strict=True))
        self._programs: dict[Drafter, Callable[..., Array]] = {}

    def accepted(self, drafter: Drafter, taps: tuple[int, ...]) -> np.ndarray:
        """Tokens of a block that greedy decoding accepts at every anchor inside an answer [anchors]."""
        features_BTCD = jnp.stack([self._features[tap] for tap in taps], axis=2)
        args = (self._draft.params, self._shared, features_BTCD)
        if drafter not in self._programs:
            self._programs[drafter] = _compiled(functools.partial(_right, drafter, self.batch), *args)
        right_BAG = np.asarray(self._programs[drafter](*args))
        return np.cumprod(right_BAG, axis=-1).sum(-1)[self._keep_BA]

    def _run_target(self, layers: tuple[int, ...]) -> list[Array]:
        """Outputs [B, T, D] of these layers."""
        decoder = Decoder(self._target.config, self._draft.drafter.dtype)

        def run(params) -> list[Array]:
            output: Any = decoder.apply({"params": params}, self.batch["tokens_BT"], taps=layers)
            return list(jnp.moveaxis(output.features_BTCD, 2, 0))

        return _compiled(run, self._target.params)(self._target.params)


def _right(
    drafter: Drafter, batch: dict[str, Array], params: Params, shared: SharedWeights, features_BTCD: Array
) -> Array:
    """Whether each slot's most likely token is the answer's [B, A, G]."""
    rows = drafter.training_rows(params, shared, features_BTCD=features_BTCD, **batch)
    logits_BMV = rows.logits(shared, dtype=drafter.dtype)
    right_BM = (shared.target_ids(logits_BMV.argmax(-1)) == rows.labels_BM) & rows.mask_BM
    return right_BM.reshape(*batch["anchors_BA"].shape, drafter.config.block_len)


def _compiled(function: Callable, *args) -> Callable[..., Any]:
    """Compiled for a few runs: on a CPU the optimiser would take longer than it saves."""
    on_cpu = jax.tree.leaves(args)[0].devices().pop().platform == "cpu"
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function).lower(*args).compile(compiler_options=options if on_cpu else None)


def refuse_misfit(target: LoadedTarget, draft: LoadedDrafter) -> None:
    """Refuses what a drafter's checkpoint alone shows to be wrong for this target.

    Raises:
      InputError: another vocabulary or width, taps that the target does not have, padding as mask token.
    """
    made_for, problems = draft.drafter.config, []
    sizes = (made_for.target_vocab_size, made_for.block.width)
    if sizes != (target.config.vocab_size, target.config.block.width):
        problems.append(f"for vocabulary and width {sizes}")
    if max(made_for.taps) >= target.config.num_layers:
        problems.append(f"with taps {made_for.taps} of a target with {target.config.num_layers} layers")
    padding = (target.tokenizer.pad_token_id, target.generation.get("pad_token_id"))
    if isinstance(made_for, DSparkConfig) and made_for.mask_token in padding:
        problems.append(f"with mask token {made_for.mask_token}, the target's padding")
    if problems:
        raise InputError(
            given="a drafter " + ", ".join(problems),
            expected=f"one for vocabulary and width {(target.config.vocab_size, target.config.block.width)}, "
            f"layers up to {target.config.num_layers - 1} and a mask token of its own",
            fix="use the drafter that was trained for this target",
        )


def self_check(engine: Engine, target: LoadedTarget, draft: LoadedDrafter, chat: ChatTemplate) -> float:
    """Decodes a few prompts greedily and tries the drafter along the answers.

    Args:
      engine: over the two, idle.
      target: the target.
      draft: the drafter.
      chat: the template in the mode that will be served.

    Returns:
      Tokens of a full block that greedy decoding accepts, on average over all anchors; NaN when no prompt
      fits. (A round starts where the one before was rejected, so rounds accept fewer.)

    Raises:
      InputError: the drafter accepts next to nothing, or clearly more with something changed.
    """
    answers = _answers(engine, target, chat)
    if not answers:
        return float("nan")
    replay, declared = Replay(answers, target, draft), draft.drafter
    accepted = replay.accepted(declared, declared.config.taps)
    changes = [*_shifted_taps(target, declared), *_other_layout(declared)]
    badly = accepted.mean() < DOING_BADLY
    if badly:
        changes += _other_masks(target, declared)
    tried = [(change, replay.accepted(change.drafter, change.taps)) for change in changes]
    for mode in _other_modes(chat) if badly else ():
        if others := _answers(engine, target, dataclasses.replace(chat, options=mode)):
            words = f"in the mode {mode or 'of no options'}"
            change = Change(property="template", to=words, drafter=declared, taps=declared.config.taps)
            tried.append((change, Replay(others, target, draft).accepted(declared, change.taps)))
    better = [(other.mean(), change) for change, other in tried if _clearly_more(other, accepted)]
    if better:
        mean, change = max(better, key=lambda pair: pair[0])
        raise _mismatch(
            f"a drafter of which {accepted.mean():.2f} tokens of a block are accepted, but {mean:.2f} "
            f"{change.to}: its {change.property} looks wrong",
            f"correct the {change.property} of its checkpoint or of this run",
        )
    if accepted.mean() < NEXT_TO_NOTHING:
        looked_at = ", ".join(dict.fromkeys(change.property for change, _ in tried))
        raise _mismatch(
            f"a drafter of which {accepted.mean():.2f} tokens of a block are accepted, and no more with "
            f"other values of {looked_at or 'anything that could be tried'}",
            "use the drafter that was trained for this very target, and check its weights",
        )
    return float(accepted.mean())


def _answers(engine: Engine, target: LoadedTarget, chat: ChatTemplate) -> list[Request]:
    """The target's own greedy answers to the prompts that the engine has room for."""
    requests = []
    for number, text in enumerate(PROMPTS):
        tokens = chat.render_prompt([{"role": "user", "content": text}])
        room = min(NEW_TOKENS, engine.config.max_context - len(tokens))
        if room > engine.models.block_len:
            requests.append(
                Request(
                    id=f"self-check-{number}",
                    prompt_tokens=tokens,
                    max_new_tokens=room,
                    stop_ids=frozenset(target.eos_ids),
                    sampling=SamplingOptions(temperature=0.0),
                )
            )
    return [request for request in engine.run(requests) if len(request.emitted) > 2]


def _near(tap: int, last: int) -> set[int]:
    return {min(max(tap + shift, -1), last) for shift in (-1, 0, 1)}


def _shifted_taps(target: LoadedTarget, drafter: Drafter) -> Iterator[Change]:
    """Every tap one layer up or down, as off-by-one conventions have it."""
    last = target.config.num_layers - 1
    for shift in (1, -1):
        taps = tuple(min(max(tap + shift, -1), last) for tap in drafter.config.taps)
        if len(set(taps)) == len(taps):
            yield Change(property="taps", to=f"with taps {taps}", drafter=drafter, taps=taps)


def _other_layout(drafter: Drafter) -> Iterator[Change]:
    """The same number of rows, of which the other ones predict."""
    config = drafter.config
    if isinstance(config, DSparkConfig):
        if config.layout is Layout.ANCHOR_FIRST and config.block_len > 1:
            layout, block_len = Layout.FILL_IN, config.block_len - 1
        elif config.layout is Layout.FILL_IN:
            layout, block_len = Layout.ANCHOR_FIRST, config.block_len + 1
        else:
            return
        changed = _changed(drafter, layout=layout, block_len=block_len)
        yield Change(
            property="layout", to=f"in the layout {layout}", drafter=changed, taps=drafter.config.taps
        )


def _other_masks(target: LoadedTarget, drafter: Drafter) -> Iterator[Change]:
    """The special tokens of the target, one of which a drafter was probably trained with."""
    if isinstance(drafter.config, DSparkConfig):
        for token in sorted(target.tokenizer.added_tokens_decoder):
            if token != drafter.config.mask_token and token < target.config.vocab_size:
                changed = _changed(drafter, mask_token=token)
                yield Change(
                    property="mask id",
                    to=f"with mask token {token}",
                    drafter=changed,
                    taps=drafter.config.taps,
                )


def _other_modes(chat: ChatTemplate) -> list[dict[str, Any]]:
    """Modes of the template that differ from the one in use; most templates have one only."""
    message = [{"role": "user", "content": PROMPTS[0]}]
    seen = [chat.render_prompt(message)]
    modes = []
    for mode in TEMPLATE_MODES:
        tokens = dataclasses.replace(chat, options=mode).render_prompt(message)
        if tokens not in seen:
            seen.append(tokens)
            modes.append(mode)
    return modes


def _changed(drafter: Drafter, **fields: Any) -> Drafter:
    config: Any = drafter.config
    return make_drafter(dataclasses.replace(config, **fields), drafter.dtype)


def _clearly_more(other: np.ndarray, accepted: np.ndarray) -> bool:
    """By a margin that chance does not explain; anchor by anchor where both ran along the same answers."""
    gain = other.mean() - accepted.mean()
    if len(other) == len(accepted):
        error = (other - accepted).std() / len(other) ** 0.5
    else:
        error = (other.var() / len(other) + accepted.var() / len(accepted)) ** 0.5
    return bool(gain > max(CLEARLY_MORE, STANDARD_ERRORS * error))


def _mismatch(given: str, fix: str) -> InputError:
    return InputError(
        given=given,
        expected="a drafter that fits its target (output is right in any case, only slow)",
        fix=f"{fix}; --no-self-check goes on with it as it is",
    )
