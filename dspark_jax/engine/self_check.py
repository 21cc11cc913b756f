"""Before serving: do drafter and target fit together as they were put together?

What is wrong with a drafter costs speed and nothing else, so nobody would notice. Here target and drafter
read a few conversations once, and the acceptance sum min(p, q) of every drafted token is computed from their
distributions, as the checkpoint says and with each property changed that checkpoints and engines get wrong.
All of them read the same tokens, so that small differences show: sums over windows of text are compared by a
paired test. A drafter is refused when a change accepts significantly more, and when it predicts no better
than a guess that ignores the text.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.tap_sketches import layer_sketches, match_taps
from dspark_jax.checkpoints.targets import LoadedTarget
from dspark_jax.core.buckets import round_up
from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import THINKING, ChatTemplate
from dspark_jax.drafters.config import DSparkConfig, Layout
from dspark_jax.drafters.contract import Drafter, Params, SharedWeights
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.engine.conversations import CONVERSATIONS
from dspark_jax.engine.engine import Engine
from dspark_jax.targets.decoder import Decoder, embedding_table, lm_head_kernel

log = logging.getLogger(__name__)

LENGTH_MULTIPLE = 32
SMALLEST_WINDOW = 8
"""Windows of at least so many tokens count as independent."""
FEWEST_WINDOWS = 8
"""With fewer of them there is no verdict."""
SIGNIFICANT = 2.9
"""Standard errors. Where a change made no difference, chance would exceed them once in 400 comparisons."""
MATTERS = 0.01
"""Share of the acceptance below which a difference does not matter."""
DOING_BADLY = 0.35
"""Share of what a guess leaves over, below which single taps, mask tokens and modes are tried, too."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """One property of a drafter told otherwise.

    Attributes:
      property: what is changed: "taps", "layout", "mask id" or "template".
      to: the other value, in words.
      accepted_BAG: acceptance of every slot with it.
    """

    property: str
    to: str
    accepted_BAG: np.ndarray


class Trial:
    """A few conversations as target and drafter read them.

    Args:
      target: the target.
      draft: the drafter; its parameters serve every change of it.
      chat: the template that renders the prompts.
      max_tokens: longer conversations are cut.

    Attributes:
      batch: what drafters are called with; anchors stand in the answers.
      shared: the target's frozen weights that they use.
      features: layer -> its output [B, T, D].
      probs_BTV: the target's distributions, over the draft vocabulary.
      guess_BT: acceptance of a guess that ignores the text: the target's mean distribution over the answers.
    """

    def __init__(self, target: LoadedTarget, draft: LoadedDrafter, chat: ChatTemplate, *, max_tokens: int):
        self._draft = draft
        self.shared = draft.shared_weights(
            embedding_table(target.params), lm_head_kernel(target.params), target.config.scaling
        )
        prompts, answers = [], []
        for question, answer in CONVERSATIONS:
            prompts.append(chat.render_prompt([{"role": "user", "content": question}])[:max_tokens])
            tokens = chat.tokenizer(answer, add_special_tokens=False)["input_ids"]
            answers.append(tokens[: max_tokens - len(prompts[-1])])
        starts_B1 = np.array([[len(tokens)] for tokens in prompts])
        ends_B1 = starts_B1 + np.array([[len(tokens)] for tokens in answers])
        T = round_up(int(ends_B1.max()), LENGTH_MULTIPLE)
        tokens_BT = np.zeros((len(prompts), T), np.int32)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens_BT[row, : len(prompt) + len(answer)] = prompt + answer
        self._anchors_BA = starts_B1 + np.arange(max(map(len, answers)) + 1)
        keep_BA = self._anchors_BA + 1 < ends_B1
        self._anchors_BA = np.where(keep_BA, self._anchors_BA, 0)
        at_T = np.arange(T)
        self.batch = {
            "tokens_BT": jnp.asarray(tokens_BT),
            "loss_mask_BT": jnp.asarray((starts_B1 <= at_T) & (at_T < ends_B1)),
            "anchors_BA": jnp.asarray(self._anchors_BA),
            "keep_BA": jnp.asarray(keep_BA),
        }
        last = target.config.num_layers - 1
        layers = sorted({near for tap in draft.drafter.config.taps for near in _near(tap, last)})
        predicts_BT = (starts_B1 <= at_T + 1) & (at_T + 1 < ends_B1)
        vocabulary = draft.draft_to_target_np
        features, self.probs_BTV, self.guess_BT = _read(
            Decoder(target.config, draft.drafter.dtype),
            tuple(layers),
            target.params,
            self.batch["tokens_BT"],
            jnp.asarray(predicts_BT),
            None if vocabulary is None else jnp.asarray(vocabulary),
        )
        self.features = dict(zip(layers, features, strict=True))

    def accepted(
        self, drafter: Drafter, *, taps: tuple[int, ...] | None = None, shared: SharedWeights | None = None
    ) -> np.ndarray:
        """Acceptance [B, A, G] of every slot; NaN where there is nothing to predict.

        Args:
          drafter: as the checkpoint has it, or in another layout.
          taps: layers that it reads instead of its own.
          shared: what it reads instead of the target's frozen weights.
        """
        features_BTCD = jnp.stack([self.features[tap] for tap in taps or drafter.config.taps], axis=2)
        return np.asarray(
            _acceptance(
                drafter, self._draft.params, shared or self.shared, features_BTCD, self.probs_BTV, self.batch
            )
        )

    def guessed(self, block_len: int) -> np.ndarray:
        """Acceptance [B, A, G] of the guess."""
        at_BAG = self._anchors_BA[..., None] + np.arange(block_len)
        guess_BT = np.asarray(self.guess_BT)
        rows_B11 = np.arange(len(guess_BT))[:, None, None]
        return guess_BT[rows_B11, np.minimum(at_BAG, guess_BT.shape[1] - 1)]

    def windows(self, score_BA: np.ndarray, block_len: int) -> np.ndarray:
        """Sums [windows] over the blocks whose anchors lie in one window of an answer."""
        window = max(SMALLEST_WINDOW, 2 * block_len)
        keep_BA = np.asarray(self.batch["keep_BA"])
        number_BA = np.arange(len(keep_BA))[:, None] * 10**6 + self._anchors_BA // window
        _, inverse = np.unique(number_BA[keep_BA], return_inverse=True)
        return np.bincount(inverse, weights=score_BA[keep_BA])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(
    decoder: Decoder,
    layers: tuple[int, ...],
    params: Params,
    tokens_BT: Array,
    predicts_BT: Array,
    vocabulary: Array | None,
) -> tuple[list[Array], Array, Array]:
    """(outputs [B, T, D] of the layers, p [B, T, V] over the draft vocabulary, acceptance [B, T] of a guess).

    The guess is the mean of p over the rows in predicts_BT.
    """
    output: Any = decoder.apply({"params": params}, tokens_BT, taps=layers)

    def probs(hidden_TD: Array) -> Array:
        logits: Any = decoder.apply({"params": params}, hidden_TD, method="unembed")
        probs_TV = jax.nn.softmax(logits)
        return probs_TV if vocabulary is None else probs_TV[:, vocabulary]

    probs_BTV = jax.lax.map(probs, output.hidden_BTD)
    mean_V = jnp.einsum("btv,bt->v", probs_BTV, predicts_BT / predicts_BT.sum())
    guess_BT = jnp.minimum(probs_BTV, mean_V).sum(-1)
    return list(jnp.moveaxis(output.features_BTCD, 2, 0)), probs_BTV, guess_BT


@functools.partial(jax.jit, static_argnums=0)
def _acceptance(
    drafter: Drafter,
    params: Params,
    shared: SharedWeights,
    features_BTCD: Array,
    probs_BTV: Array,
    batch: dict[str, Array],
) -> Array:
    """sum min(p, q) [B, A, G] under teacher forcing, sequence by sequence to save memory."""
    rows = drafter.training_rows(params, shared, features_BTCD=features_BTCD, **batch)
    positions_BM = jnp.minimum(rows.positions_BM, probs_BTV.shape[1] - 1)

    def of_sequence(sequence: tuple[Any, ...]) -> Array:
        hidden_MD, latent_MR, positions_M, probs_TV = sequence
        own = dataclasses.replace(rows, hidden_BMD=hidden_MD, latent_BMR=latent_MR)
        probs_MV = jax.nn.softmax(own.logits(shared, dtype=drafter.dtype))
        return jnp.minimum(probs_MV, probs_TV[positions_M]).sum(-1)

    accepted_BM = jax.lax.map(of_sequence, (rows.hidden_BMD, rows.latent_BMR, positions_BM, probs_BTV))
    accepted_BM = jnp.where(rows.mask_BM, accepted_BM, jnp.nan)
    return accepted_BM.reshape(*batch["anchors_BA"].shape, drafter.config.block_len)


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
    """Tries the drafter along a few conversations, before it is used.

    Args:
      engine: over the two; its longest context cuts the conversations.
      target: the target.
      draft: the drafter.
      chat: the template in the mode that will be served.

    Returns:
      Summed acceptance of a block's slots, each given the true tokens before it, on average over all anchors;
      NaN when the engine has room for too little text.

    Raises:
      InputError: the drafter was trained on another template or mode or on other layers, predicts no
        better than a guess, or clearly better with something changed.
    """
    _refuse_other_template(draft, chat)
    _refuse_other_layers(target, draft)
    trial = Trial(target, draft, chat, max_tokens=engine.config.max_context)
    drafter = draft.drafter
    declared_BAG = trial.accepted(drafter)
    guess_BAG = trial.guessed(drafter.config.block_len)
    over_guess = trial.windows(np.nansum(declared_BAG - guess_BAG, axis=-1), drafter.config.block_len)
    if len(over_guess) < FEWEST_WINDOWS:
        return float("nan")
    left_over = trial.windows(np.nansum(declared_BAG * 0 + 1 - guess_BAG, axis=-1), drafter.config.block_len)
    changes = [*_shifted_taps(trial, target, drafter), *_other_layout(trial, drafter)]
    if over_guess.sum() < DOING_BADLY * left_over.sum():
        changes += [*_single_taps(trial, target, drafter), *_other_masks(trial, target, drafter)]
        changes += _other_modes(target, draft, chat, engine.config.max_context)
    accepted = float(_blocks(declared_BAG).mean())
    better = {change: gain for change in changes if (gain := _clear_gain(trial, change, declared_BAG))}
    if better:
        change, gain = max(better.items(), key=lambda item: item[1])
        raise _mismatch(
            f"a drafter of which {accepted:.2f} tokens of a block are accepted, but {accepted + gain:.2f} "
            f"{change.to}: its {change.property} looks wrong",
            f"correct the {change.property} of its checkpoint or of this run",
        )
    if _standard_errors(over_guess) < SIGNIFICANT:
        looked_at = ", ".join(dict.fromkeys(change.property for change in changes))
        raise _mismatch(
            f"a drafter of which {accepted:.2f} tokens of a block are accepted, no more than of a guess that "
            f"ignores the text ({_blocks(guess_BAG + declared_BAG * 0).mean():.2f}), and no more with other "
            f"values of {looked_at or 'anything that could be tried'}",
            "use the drafter that was trained for this very target, and check its weights",
        )
    return accepted


def _refuse_other_template(draft: LoadedDrafter, chat: ChatTemplate) -> None:
    if draft.template not in (None, chat.name):
        raise _mismatch(
            f"a drafter that was trained on {draft.template}, for {chat.name}: its template looks wrong",
            "serve the mode that it was trained on (--thinking), or train one on this mode",
        )


def _refuse_other_layers(target: LoadedTarget, draft: LoadedDrafter) -> None:
    """Compares what the taps read with what they read in training, where the checkpoint records that."""
    if draft.tap_sketches_CS is None:
        return
    layers_LS = layer_sketches(target.config, target.params)
    matches = match_taps(draft.drafter.config.taps, draft.tap_sketches_CS, layers_LS)
    if wrong := [match for match in matches if match.reads_another]:
        raise _mismatch(
            "; ".join(
                f"tap {match.number} reads layer {match.layer}, "
                f"the drafter was trained on layer {match.nearest}"
                for match in wrong
            ),
            "correct the taps of its checkpoint",
        )
    if unlike := [match for match in matches if not match.recognised]:
        log.warning(
            "the drafter was trained with another target, or with other weights of it: %s (1 is the same, "
            "other layers are below 0.6); output is right, but less of it may be accepted",
            ", ".join(f"layer {match.layer} is alike to {match.similarity:.2f}" for match in unlike),
        )


def _blocks(accepted_BAG: np.ndarray) -> np.ndarray:
    """Accepted tokens [blocks] of the blocks that predict anything."""
    predicts_BA = ~np.isnan(accepted_BAG).all(-1)
    return np.nansum(accepted_BAG, axis=-1)[predicts_BA]


def _clear_gain(trial: Trial, change: Change, declared_BAG: np.ndarray) -> float:
    """Tokens of a block that a change accepts more; 0 where that may be chance, or does not matter."""
    A, G = (min(sizes) for sizes in zip(change.accepted_BAG.shape[1:], declared_BAG.shape[1:], strict=True))
    both_BAG = np.full((2, *declared_BAG.shape[:2], G), np.nan)
    both_BAG[0, :, :A], both_BAG[1, :, :A] = change.accepted_BAG[:, :A, :G], declared_BAG[:, :A, :G]
    gain_BA = np.nansum(both_BAG[0] - both_BAG[1], axis=-1)
    gains = trial.windows(gain_BA, declared_BAG.shape[-1])
    matters = gains.sum() > MATTERS * np.nansum(both_BAG[1])
    if not matters or _standard_errors(gains) < SIGNIFICANT:
        return 0.0
    return float(gains.sum() / len(_blocks(declared_BAG)))


def _standard_errors(sums: np.ndarray) -> float:
    """How many standard errors the mean of independent sums lies above 0."""
    error = sums.std(ddof=1) / len(sums) ** 0.5
    return float(sums.mean() / error) if error else 0.0


def _near(tap: int, last: int) -> tuple[int, int, int]:
    """The layer below, the layer, the layer above, as far as they exist; -1 is the embedding."""
    return max(tap - 1, -1), tap, min(tap + 1, last)


def _with_taps(trial: Trial, drafter: Drafter, taps: tuple[int, ...]) -> Change:
    return Change(property="taps", to=f"with taps {taps}", accepted_BAG=trial.accepted(drafter, taps=taps))


def _shifted_taps(trial: Trial, target: LoadedTarget, drafter: Drafter) -> Iterator[Change]:
    """Every tap one layer up or down, as off-by-one conventions have it."""
    last = target.config.num_layers - 1
    for shift in (0, 2):
        taps = tuple(_near(tap, last)[shift] for tap in drafter.config.taps)
        if len(set(taps)) == len(taps) and taps != drafter.config.taps:
            yield _with_taps(trial, drafter, taps)


def _single_taps(trial: Trial, target: LoadedTarget, drafter: Drafter) -> Iterator[Change]:
    """One tap one layer up or down."""
    declared, last = drafter.config.taps, target.config.num_layers - 1
    for number in range(len(declared)) if len(declared) > 1 else ():
        for near in _near(declared[number], last):
            if near not in declared:
                yield _with_taps(trial, drafter, (*declared[:number], near, *declared[number + 1 :]))


def _other_layout(trial: Trial, drafter: Drafter) -> Iterator[Change]:
    """The same number of rows, of which the other ones predict."""
    config = drafter.config
    if isinstance(config, DSparkConfig):
        if config.layout is Layout.ANCHOR_FIRST and config.block_len > 1:
            layout, block_len = Layout.FILL_IN, config.block_len - 1
        elif config.layout is Layout.FILL_IN:
            layout, block_len = Layout.ANCHOR_FIRST, config.block_len + 1
        else:
            return
        changed = make_drafter(dataclasses.replace(config, layout=layout, block_len=block_len), drafter.dtype)
        yield Change(property="layout", to=f"in the layout {layout}", accepted_BAG=trial.accepted(changed))


def _other_masks(trial: Trial, target: LoadedTarget, drafter: Drafter) -> Iterator[Change]:
    """The special tokens of the target, one of which a drafter was probably trained with."""
    if isinstance(drafter.config, DSparkConfig):
        declared, table_VD = drafter.config.mask_token, trial.shared.embedding_VD
        for token in sorted(target.tokenizer.added_tokens_decoder):
            if token != declared and token < target.config.vocab_size:
                swapped_VD = table_VD.at[declared].set(table_VD[token])  # another embedding, no other program
                shared = dataclasses.replace(trial.shared, embedding_VD=swapped_VD)
                accepted_BAG = trial.accepted(drafter, shared=shared)
                yield Change(property="mask id", to=f"with mask token {token}", accepted_BAG=accepted_BAG)


def _other_modes(
    target: LoadedTarget, draft: LoadedDrafter, chat: ChatTemplate, max_tokens: int
) -> Iterator[Change]:
    """The mode of the template that is not in use, if it has two; the answers stay the same."""
    if THINKING in str(chat.tokenizer.chat_template):
        thinking = not chat.options.get(THINKING, False)
        other = ChatTemplate.of(chat.tokenizer, thinking=thinking)
        trial = Trial(target, draft, other, max_tokens=max_tokens)
        yield Change(
            property="template", to=f"in the mode {other.name}", accepted_BAG=trial.accepted(draft.drafter)
        )


def _mismatch(given: str, fix: str) -> InputError:
    return InputError(
        given=given,
        expected="a drafter that fits its target (output is right in any case, only slow)",
        fix=f"{fix}; --no-self-check goes on with it as it is",
    )
