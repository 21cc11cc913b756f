"""A drafter's first parameters by regression instead of chance.

A small budget is mostly spent on finding two things that least squares finds in a minute: that a block must
look at the newest context position, and which linear function of the target's features predicts its next
hidden state. `warm_start` writes both into the ordinary parameters, so that training starts from there:

1. ridge regression of the target's hidden state at t on its features at t - 1 and the embedding of token t;
2. `fc` becomes the features' half of it, plus one constant direction, which serves as a bias;
3. one query head per kv head attends to the newest context position: constant queries and keys whose RoPE
   phases make the score fall with distance; its values and outputs carry the principal directions of `fc`;
4. units of the first MLP with a constant gate are linear; they take the input embedding out of the
   residual, where tied weights would read it as "the same token again", and leave a constant there instead;
5. the sequential head starts as the embedding's half: a low-rank bigram model of the target.

All other heads start silent, all other MLP units random. Everything here is numpy on the host, once.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.optimize

from dspark_jax.drafters.config import DSparkConfig
from dspark_jax.nn.rope import Rope

RIDGE = 0.02
CONSTANT_ENERGY = (
    3.0  # of the constant direction, relative to the prediction: makes the RMS norm nearly linear
)
SCORE_MARGIN = 5.0  # nats between the newest context position and the one before
OPEN_GATE = 3.0  # input of the gates that make MLP units linear
FEATURE_TO_EMBEDDING = 4.0  # size of the features' contribution to the residual, relative to the embedding's


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionSample:
    """What the target computed at some supervised positions t, float32.

    Attributes:
      features_NX: features at t - 1, flattened taps, X = C D.
      tokens_N: token at t.
      hidden_ND: final-normed hidden state at t.
    """

    features_NX: np.ndarray
    tokens_N: np.ndarray
    hidden_ND: np.ndarray

    @classmethod
    def from_batch(cls, tokens_BT, loss_mask_BT, features_BTCD, hidden_BTD) -> RegressionSample:
        """Every supervised position of a batch."""
        rows, positions = np.nonzero(np.asarray(loss_mask_BT)[:, 1:])
        before = np.asarray(features_BTCD)[rows, positions].astype(np.float32)
        return cls(
            features_NX=before.reshape(len(rows), -1),
            tokens_N=np.asarray(tokens_BT)[rows, positions + 1],
            hidden_ND=np.asarray(hidden_BTD)[rows, positions + 1].astype(np.float32),
        )

    @classmethod
    def join(cls, parts: list[RegressionSample]) -> RegressionSample:
        """Several samples as one."""
        fields = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})


def warm_start(
    params: dict,
    sample: RegressionSample,
    *,
    config: DSparkConfig,
    embedding_VD: np.ndarray,
    head_DV: np.ndarray,
    final_norm_D: np.ndarray,
    feature_scale_X: np.ndarray,
) -> dict:
    """Random parameters -> parameters that start from the regression.

    Args:
      params: freshly initialised, numpy, not changed.
      sample: tens of thousands of positions.
      config: the drafter's; layers without head norms only.
      embedding_VD: the target's embedding table.
      head_DV: its LM head, cut to the draft vocabulary.
      final_norm_D: scale of its final norm.
      feature_scale_X: 1 / rms of the features.

    Returns:
      New parameters in the same tree.
    """
    block, D = config.block, config.block.width
    embedded_ND = embedding_VD[sample.tokens_N]
    unit_ND = _unit_rms(embedded_ND)
    features_NX = sample.features_NX * feature_scale_X
    from_features_XD, from_token_DD = _regress(features_NX, unit_ND, sample.hidden_ND / final_norm_D)
    predicted_ND = features_NX @ from_features_XD
    energy = np.mean(np.sum(predicted_ND**2, axis=1))
    directions_DD = np.linalg.eigh(predicted_ND.T @ predicted_ND)[1][:, ::-1]

    # fc: the prediction without its weakest direction, which holds a constant instead.
    bias_D, bias_size = directions_DD[:, -1], np.sqrt(CONSTANT_ENERGY * energy)
    one_X = _constant(features_NX)
    fc_XD = (
        from_features_XD - np.outer(from_features_XD @ bias_D, bias_D) + bias_size * np.outer(one_X, bias_D)
    )
    norm_gain = np.sqrt(D) / np.sqrt(
        (1 + CONSTANT_ENERGY) * energy
    )  # what the RMS norm multiplies by, nearly

    # Attention to the newest position, in the first query head of every kv head.
    query_H, key_H = newest_position_phases(block.rope, block.head_dim, config.block_len)
    gain = FEATURE_TO_EMBEDDING * np.sqrt(np.mean(embedded_ND**2) * D / energy)
    mask_ND = np.broadcast_to(embedding_VD[config.mask_token], embedded_ND.shape)
    inputs_ND = residual_ND = np.concatenate([embedded_ND, mask_ND])
    mean_D = predicted_ND.mean(0)
    predicted_ND = np.concatenate([predicted_ND, predicted_ND])
    backbone = dict(params["backbone"])
    carried = block.num_kv_heads * block.head_dim
    for i in range(config.num_layers):
        layer = dict(backbone[f"layers_{i}"])
        # The strongest directions go last, so that the first MLP still sees the embedding.
        first = (config.num_layers - 1 - i) * carried
        if first + carried <= D:
            carried_DX = directions_DD[:, first : first + carried]
            layer["attention"] = _attention(
                layer["attention"],
                query_DH=np.outer(_constant(_unit_rms(residual_ND)), query_H),
                key_DH=np.outer(bias_D, key_H) / (norm_gain * bias_size),
                carried_DX=carried_DX,
                gain=gain / norm_gain,
                num_heads=block.num_heads,
            )
            residual_ND = residual_ND + gain * (predicted_ND @ carried_DX) @ carried_DX.T
        if i == 0:
            left_D = mean_D * np.sqrt(np.mean(embedded_ND**2) / np.mean(mean_D**2))
            unit_2ND = _unit_rms(residual_ND)
            replace_DD = _ridge(unit_2ND, left_D - inputs_ND)
            layer["mlp"] = _linear_units(layer["mlp"], _constant(unit_2ND), replace_DD)
            residual_ND = residual_ND + unit_2ND @ replace_DD
        backbone[f"layers_{i}"] = layer

    size = np.sqrt(energy / D)
    backbone["fc"] = {"kernel": (feature_scale_X[:, None] * fc_XD).astype(np.float32)}
    backbone["final_norm"] = {"scale": (size * final_norm_D).astype(np.float32)}
    new = {**params, "backbone": backbone}
    if config.head is not None:
        bigram_VD = (_unit_rms(embedding_VD) @ from_token_DD) * final_norm_D
        weights_V = np.bincount(sample.tokens_N, minlength=len(embedding_VD)).astype(np.float32)
        w1, w2 = _low_rank(bigram_VD, weights_V, head_DV, config.head.rank)
        new["head"] = {**params["head"], "w1": w1, "w2": w2}
    return new


def newest_position_phases(rope: Rope, head_dim: int, block_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Constant query and key [H] under which every row of a block sees the newest context position most.

    Row k of a block stands k + 1 behind that position. A linear program over amplitudes and phases of the
    RoPE pairs maximises the smallest drop of the score from one distance to the next, up to `block_len`,
    and from there to anything farther; the result is scaled to a drop of SCORE_MARGIN.
    """
    frequencies = rope.inverse_frequencies(head_dim)
    distances = np.arange(1, 1025)
    waves = np.concatenate(
        [np.cos(np.outer(distances, frequencies)), np.sin(np.outer(distances, frequencies))], axis=1
    )
    drops = np.concatenate(
        [waves[:block_len] - waves[1 : block_len + 1], waves[block_len - 1] - waves[block_len:]]
    )
    # maximise m subject to drops @ a >= m, |a| <= 1
    program = scipy.optimize.linprog(
        c=np.append(np.zeros(head_dim), -1.0),
        A_ub=np.column_stack([-drops, np.ones(len(drops))]),
        b_ub=np.zeros(len(drops)),
        bounds=[(-1, 1)] * head_dim + [(0, None)],
    )
    scale = SCORE_MARGIN / program.x[-1] * np.sqrt(head_dim)
    cosine, sine = np.split(program.x[:-1] * scale, 2)
    # q rotated by t and k rotated by s give |q||k| cos(w (t - s) + phase): the query carries the phase.
    size, phase = np.sqrt(np.hypot(cosine, sine)), np.arctan2(-sine, cosine)
    query_H = np.concatenate([size * np.cos(phase), size * np.sin(phase)])
    key_H = np.concatenate([size, np.zeros_like(size)])
    return query_H.astype(np.float32), key_H.astype(np.float32)


def _attention(attention: dict, *, query_DH, key_DH, carried_DX, gain: float, num_heads: int) -> dict:
    D, H = query_DH.shape
    K = carried_DX.shape[1] // H
    q_DNH = np.array(attention["q"]["kernel"]).reshape(D, num_heads, H)
    o_NHD = np.zeros((num_heads, H, D), np.float32)
    q_DNH[:, :: num_heads // K] = query_DH[:, None]
    o_NHD[:: num_heads // K] = gain * carried_DX.T.reshape(K, H, D)
    kernels = {
        "q": q_DNH.reshape(D, -1),
        "k": np.tile(key_DH, (1, K)),
        "v": carried_DX,
        "o": o_NHD.reshape(-1, D),
    }
    return {
        **attention,
        **{
            name: {**attention[name], "kernel": kernel.astype(np.float32)} for name, kernel in kernels.items()
        },
    }


def _linear_units(mlp: dict, constant_D: np.ndarray, map_DD: np.ndarray) -> dict:
    """The first D units of a gated MLP as the linear map `map_DD`; their gates are constant."""
    D = len(map_DD)
    gate, up, down = (np.array(mlp[name]["kernel"]) for name in ("gate", "up", "down"))
    gate[:, :D] = OPEN_GATE * constant_D[:, None]
    up[:, :D] = map_DD
    down[:D] = np.eye(D) * (1 + np.exp(-OPEN_GATE)) / OPEN_GATE
    return {
        name: {**mlp[name], "kernel": kernel} for name, kernel in (("gate", gate), ("up", up), ("down", down))
    }


def _constant(inputs_NI: np.ndarray) -> np.ndarray:
    """Weights [I] whose product with every input is about 1."""
    return _ridge(inputs_NI, np.ones((len(inputs_NI), 1), np.float32))[:, 0]


def _regress(
    features_NX: np.ndarray, unit_ND: np.ndarray, target_ND: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Joint ridge regression -> (weights of the features, weights of the embedding)."""
    weights = _ridge(np.concatenate([features_NX, unit_ND], axis=1), target_ND)
    return weights[: features_NX.shape[1]], weights[features_NX.shape[1] :]


def _ridge(inputs_NI: np.ndarray, outputs_NO: np.ndarray) -> np.ndarray:
    gram = inputs_NI.T @ inputs_NI
    gram[np.diag_indices_from(gram)] += RIDGE * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, inputs_NI.T @ outputs_NO).astype(np.float32)


def _low_rank(
    hidden_VD: np.ndarray, weights_V: np.ndarray, head_DV: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """(W1, W2) with W1 W2 the best rank-R form of hidden @ head, tokens weighted, of balanced size."""
    covariance = (hidden_VD * weights_V[:, None]).T @ hidden_VD / weights_V.sum()
    values, vectors = np.linalg.eigh(head_DV @ head_DV.T / head_DV.shape[1])
    root = np.sqrt(np.maximum(values, 1e-6 * values[-1]))
    to_logits, from_logits = vectors * root @ vectors.T, vectors / root @ vectors.T
    top = np.linalg.eigh(to_logits @ covariance @ to_logits)[1][:, ::-1][:, :rank]
    w1, w2 = hidden_VD @ (to_logits @ top), (from_logits @ top).T @ head_DV
    balance = np.sqrt(np.sqrt(np.mean(w2**2)) / np.sqrt(np.mean(w1[weights_V > 0] ** 2)))
    return (w1 * balance).astype(np.float32), (w2 / balance).astype(np.float32)


def _unit_rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
