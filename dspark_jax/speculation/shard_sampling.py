"""Drawing from a vocabulary that is divided among devices: one exchange of a few numbers per draw.

Each function draws what `sampling` draws from the whole vocabulary, with the same noise; without a mesh it is
that. Devices exchange their candidates and no logits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dspark_jax.core.sharding import axes_size, by_device, divided_over
from dspark_jax.speculation.sampling import draw_noise


def best(logits_BV: Array) -> tuple[Array, Array]:
    """(ids int32 [B] of the highest logits, the lowest id of equals; these logits [B])."""
    axes = divided_over("vocab", logits_BV.shape[1])

    def of_shards(part_BV: Array) -> tuple[Array, Array]:
        ids_B, highest_B = _best_here(part_BV)
        if not axes:
            return ids_B, highest_B
        mine_B2 = jnp.stack([highest_B, _as_numbers(ids_B + _first_id(part_BV, axes))], axis=-1)
        return _best_of(*jnp.moveaxis(jax.lax.all_gather(mine_B2, axes), -1, 0))

    return by_device(of_shards, PartitionSpec(None, axes), PartitionSpec())(logits_BV)


def sample_logits(keys_B: Array, logits_BV: Array, temperature_B: Array) -> Array:
    """`sampling.sample` of softmax(logits / temperature), the best id where the temperature is 0.

    Groups of tokens may lie on two devices. Each device sends the mass and the best token of every group, as
    far as it has it; both noises are drawn everywhere.

    Args:
      keys_B: one typed key per row.
      logits_BV: any float type.
      temperature_B: of each row.

    Returns:
      int32 ids [B].
    """
    V = logits_BV.shape[1]
    axes = divided_over("vocab", V)
    whole = PartitionSpec()

    def of_shards(keys_B: Array, part_BV: Array, temperature_B: Array) -> Array:
        B, L = part_BV.shape
        size = math.isqrt(V - 1) + 1
        num_groups, reach = -(-V // size), (L + 2 * size - 2) // size
        group_noise_BN, token_noise_BS = draw_noise(keys_B, num_groups, size)
        first_id = _first_id(part_BV, axes)
        ids_B, highest_B = _best_here(part_BV)
        temperature_B1 = jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]

        scaled_BV = (part_BV - highest_B[:, None]) / temperature_B1
        empty_BX = jnp.full((B, reach * size), -jnp.inf)
        groups_BWS = jax.lax.dynamic_update_slice_in_dim(empty_BX, scaled_BV, first_id % size, axis=1)
        groups_BWS = groups_BWS.reshape(B, reach, size)
        mass_BW = jax.nn.logsumexp(groups_BWS, axis=-1)
        noisy_BWS = groups_BWS + token_noise_BS[:, None]
        within_BW, score_BW = jnp.argmax(noisy_BWS, axis=-1), jnp.max(noisy_BWS, axis=-1)

        small_B2 = jnp.stack([highest_B, _as_numbers(ids_B + first_id)], axis=-1)
        mine = jnp.concatenate([small_B2, mass_BW, score_BW, _as_numbers(within_BW)], axis=-1)
        all_DBX = jax.lax.all_gather(mine, axes)
        best_B, top_B = _best_of(all_DBX[..., 0], all_DBX[..., 1])
        # Relative to the best token of all devices, as the law itself is.
        below_DB1 = (all_DBX[..., :1] - top_B[:, None]) / temperature_B1
        mass_DBW, score_DBW, within_DBW = jnp.split(all_DBX[..., 2:], 3, axis=-1)
        mass_DBW, score_DBW = mass_DBW + below_DB1, score_DBW + below_DB1

        shape = (B, num_groups + reach)
        mass_BN, score_BN = jnp.full(shape, -jnp.inf), jnp.full(shape, -jnp.inf)
        token_BN = jnp.zeros(shape)
        for device in range(axes_size(axes)):
            here = (slice(None), slice(device * L // size, device * L // size + reach))
            mass_BN = mass_BN.at[here].set(jnp.logaddexp(mass_BN[here], mass_DBW[device]))
            better_BW = score_DBW[device] > score_BN[here]
            token_BN = token_BN.at[here].set(jnp.where(better_BW, within_DBW[device], token_BN[here]))
            score_BN = score_BN.at[here].max(score_DBW[device])
        group_B = jnp.argmax(mass_BN[:, :num_groups] + group_noise_BN, axis=-1)
        token_B = jnp.take_along_axis(token_BN, group_B[:, None], axis=1)[:, 0]
        drawn_B = group_B * size + token_B.astype(jnp.int32)
        return jnp.where(temperature_B > 0, drawn_B, best_B).astype(jnp.int32)

    logits_BV = logits_BV.astype(jnp.float32)
    specs = (whole, PartitionSpec(None, axes), whole)
    return by_device(of_shards, specs, whole)(keys_B, logits_BV, temperature_B)


def _first_id(part_BV: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.axis_index(axes) * part_BV.shape[1]


def _best_here(logits_BV: Array) -> tuple[Array, Array]:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), logits_BV.max(-1)


def _as_numbers(ids: Array) -> Array:
    """Ids as float32, to travel beside logits; exact below 2^24, and no vocabulary comes near."""
    return ids.astype(jnp.float32)


def _best_of(highest_DB: Array, ids_DB: Array) -> tuple[Array, Array]:
    """(ids, logits) of the best device; the first of equals has the lowest id."""
    device_1B = jnp.argmax(highest_DB, axis=0)[None]
    ids_B, highest_B = (jnp.take_along_axis(x, device_1B, axis=0)[0] for x in (ids_DB, highest_DB))
    return ids_B.astype(jnp.int32), highest_B
