"""The scheduler: how many drafted tokens of all requests together are worth verifying, and which.

The objective is tokens per ms, Theta = (R + sum of admitted survivals) / (draft + verification) (spec section
8). What a rule may look at decides whether output stays lossless:

- `lagged` takes the BUDGET from survivals of earlier rounds only, so any search is allowed, a global one too.
- The present round's survivals decide only WHO gets the budget (`admit`), token by token from the most
  certain one on: whether x_j is verified then depends on tokens before it, never on x_j.
- `algorithm1` walks the present survivals in the same order and stops for good at the first step that does
  not pay. Going on to look for a better budget further down would look at x_j through c_{j+1}: spec section 8
  has the counterexample.
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dspark_jax.core.errors import InputError
from dspark_jax.speculation.acceptance import survival
from dspark_jax.speculation.cost import CostTable
from dspark_jax.speculation.verify_length import VerifyPolicy


def predicted_survival(confidence_logits_BG: Array, scaling_B2G: Array) -> Array:
    """a_j = prod_{i<=j} sigmoid(z_i / T_i + shift_i), [B, G]; a NaN counts as certain rejection.

    Args:
      confidence_logits_BG: z.
      scaling_B2G: temperatures and shifts (`calibration.py`).
    """
    temperatures_BG, shifts_BG = jnp.moveaxis(scaling_B2G, -2, 0)
    scaled_BG = confidence_logits_BG.astype(jnp.float32) / temperatures_BG + shifts_BG
    conditional_BG = jax.nn.sigmoid(scaled_BG)
    return survival(jnp.where(jnp.isnan(conditional_BG), 0.0, conditional_BG))


def admit(survival_BG: Array, drafted_B: Array, budget: Array | int) -> Array:
    """Gives `budget` verification slots to the most certain tokens: lengths int32 [B].

    Ties, which are real since a sigmoid saturates, go to the earlier position, then to the lower request
    number: nothing that depends on token values.

    Args:
      survival_BG: a_j of the present round, non-increasing along G.
      drafted_B: requests that drafted a block in this round; the others get nothing.
      budget: tokens to verify over all requests.
    """
    rank_BG = _rank(survival_BG, drafted_B)
    return jnp.sum((rank_BG < budget) & drafted_B[:, None], axis=1, dtype=jnp.int32)


def algorithm1(survival_BG: Array, drafted_B: Array, requests: Array | int, round_ms_N: Array) -> Array:
    """DSpark's Algorithm 1, synchronous: admits until the first token that does not raise Theta.

    Args:
      survival_BG: a_j of the present round.
      drafted_B: requests that drafted a block.
      requests: R, tokens that the round commits anyway.
      round_ms_N: [B G + 1], time of the round with n admitted tokens; padded shapes make it a staircase.

    Returns:
      Lengths int32 [B].
    """
    rank_BG = _rank(survival_BG, drafted_B)
    gain_BG = jnp.where(drafted_B[:, None], survival_BG, 0.0)
    sorted_N = jnp.zeros(rank_BG.size).at[rank_BG.ravel()].set(gain_BG.ravel())
    theta_N = (requests + jnp.concatenate([jnp.zeros(1), jnp.cumsum(sorted_N)])) / round_ms_N
    best_before_N = jax.lax.cummax(theta_N)[:-1]
    pays_N = jnp.cumprod(theta_N[1:] > best_before_N)
    return admit(survival_BG, drafted_B, jnp.sum(pays_N))


def _rank(survival_BG: Array, drafted_B: Array) -> Array:
    """Place [B, G] of every token: by survival, then position, then request; undrafted requests last."""
    B, G = survival_BG.shape
    key_GB = jnp.where(drafted_B[:, None], survival_BG, -1.0).T
    order_N = jnp.argsort(-key_GB.ravel(), stable=True)
    return jnp.zeros(B * G, jnp.int32).at[order_N].set(jnp.arange(B * G)).reshape(G, B).T


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What a round should do."""

    drafted_np: np.ndarray
    """bool [R]: requests that draft a block."""
    budget: int
    """Drafted tokens to verify over all requests."""
    tokens_per_ms: float
    """What the search expects of it."""


def choose(survival_np: np.ndarray, table: CostTable, context: int) -> Decision:
    """The best round for these survivals: who drafts, and the budget; a global search over priced shapes.

    Tokens are worth having wherever the padded shape has room for them, so only full buckets are candidates.
    For every declared number of drafting requests those with the largest expected gain draft.

    Args:
      survival_np: float [R, G], of EARLIER rounds.
      table: measured times.
      context: longest context of the step, in tokens.
    """
    R, G = survival_np.shape
    by_gain = np.argsort(-survival_np.sum(1), kind="stable")
    gain_rank_np = np.empty(R, np.int64)
    gain_rank_np[by_gain] = np.arange(R)
    order_np = np.argsort(-survival_np.ravel(), kind="stable")
    sorted_np, owner_rank_np = survival_np.ravel()[order_np], gain_rank_np[order_np // G]

    rows_np, verify_ms_np = table.verify_curve(R, context)
    # Not to draft is a candidate like the others: nobody drafts, nothing is verified.
    best = Decision(drafted_np=np.zeros(R, bool), budget=0, tokens_per_ms=R / float(verify_ms_np[0]))
    for bucket in table.request_buckets:
        drafting = min(bucket, R)
        kept_np = sorted_np if drafting == R else sorted_np[owner_rank_np < drafting]
        prefix_np = np.concatenate([[0.0], np.cumsum(kept_np)])
        budgets_np = np.minimum(rows_np - R, drafting * G)
        tokens_per_ms_np = (R + prefix_np[budgets_np]) / (verify_ms_np + table.draft_ms(drafting, context))
        at = int(np.argmax(tokens_per_ms_np))
        if tokens_per_ms_np[at] > best.tokens_per_ms:
            best = Decision(
                drafted_np=gain_rank_np < drafting,
                budget=int(budgets_np[at]),
                tokens_per_ms=float(tokens_per_ms_np[at]),
            )
        if drafting == R:
            break
    return best


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lagged:
    """The default scheduler: the budget from survivals at least `lag` rounds old, in a global search."""

    lag: int = 2
    """Rounds between a survival and its use; 2 hides the host behind the device, 0 would not be lossless."""
    freshness: float = 0.25
    """Weight of a new survival in a request's running mean, in (0, 1]."""
    probe_every: int = 16
    """Rounds without drafting after which a request drafts again, to find its way back; twice as many after
    every probe in vain, up to MOST_PATIENCE times as many."""

    def __post_init__(self):
        if self.lag < 1 or not 0 < self.freshness <= 1 or self.probe_every < 1:
            raise InputError(
                given=f"lag={self.lag}, freshness={self.freshness}, probe_every={self.probe_every}",
                expected="lag and probe_every at least 1, freshness in (0, 1]",
                fix="a budget from the present round's survivals is not lossless: keep a lag",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm1:
    """DSpark's Algorithm 1: synchronous, the host waits for the drafts of the round that it plans."""


MOST_PATIENCE = 8

Scheduler = VerifyPolicy | Algorithm1 | Lagged
"""Who decides how much is verified. Fixed lengths and thresholds are schedulers that ask for no prices."""


class ScheduleMemory:
    """Survivals of earlier rounds, readable only once they are old enough: the causal barrier as a type.

    Args:
      config: the scheduler.
      slots: requests that can be decoding.
      block_len: G.
    """

    def __init__(self, config: Lagged, *, slots: int, block_len: int):
        self._config = config
        self._usual_np: np.ndarray | None = None
        self._visible_np = np.ones((slots, block_len))
        self._has_history_np = np.zeros(slots, bool)
        self._undrafted_np = np.zeros(slots, np.int64)
        self._patience_np = np.full(slots, config.probe_every)
        self._waiting: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()

    def forget(self, slot: int) -> None:
        """A new request has moved in: until it has a history of its own it counts as what is usual.

        As survival 1 where nothing is known yet. Under load somebody is always new, and certainty about all
        of them would cost more than not to speculate at all.
        """
        self._visible_np[slot] = 1.0 if self._usual_np is None else self._usual_np
        self._has_history_np[slot], self._undrafted_np[slot] = False, 0
        self._patience_np[slot] = self._config.probe_every
        for drafted_np, _ in self._waiting:
            drafted_np[slot] = False

    def note(self, drafted_np: np.ndarray, survival_np: np.ndarray) -> None:
        """Takes in a round: who drafted, bool [slots], and the predicted survivals, [slots, G]."""
        self._waiting.append((drafted_np.copy(), survival_np))
        # A round noted now may be used by the round after next at the earliest when lag is 2.
        while len(self._waiting) >= self._config.lag:
            seen_np, values_np = self._waiting.popleft()
            if not seen_np.any():
                continue
            weight_np = np.where(self._has_history_np, self._config.freshness, 1.0)[:, None]
            mean_np = self._visible_np + weight_np * (values_np - self._visible_np)
            self._visible_np = np.where(seen_np[:, None], mean_np, self._visible_np)
            self._has_history_np |= seen_np
            latest_np = values_np[seen_np].mean(0)
            usual_np = latest_np if self._usual_np is None else self._usual_np
            self._usual_np = usual_np + self._config.freshness * (latest_np - usual_np)

    def decide(
        self, active_np: np.ndarray, table: CostTable, context: int, *, able_np: np.ndarray | None = None
    ) -> Decision:
        """The next round; `drafted_np` is over all slots.

        A probe drafts and lets the confidences speak; nothing more is verified for it. Who is half as
        impatient joins in, since one draft for many is cheaper than many drafts.

        Args:
          active_np: bool [slots], those that hold a request.
          table: measured times.
          context: longest context among them, in tokens.
          able_np: bool [slots], those of them whose drafts can be used; all by default.
        """
        able_np = active_np if able_np is None else able_np & active_np
        slots_np = np.flatnonzero(active_np)
        best = choose(self._visible_np[slots_np] * able_np[slots_np, None], table, context)
        drafted_np = np.zeros(len(active_np), bool)
        drafted_np[slots_np] = best.drafted_np & able_np[slots_np]
        self._patience_np[drafted_np] = self._config.probe_every
        waits_np = able_np & ~drafted_np
        if (waits_np & (self._undrafted_np >= self._patience_np)).any():
            probes_np = waits_np & (2 * self._undrafted_np >= self._patience_np)
            most = MOST_PATIENCE * self._config.probe_every
            self._patience_np[probes_np] = np.minimum(2 * self._patience_np[probes_np], most)
            drafted_np |= probes_np
        self._undrafted_np = np.where(drafted_np, 0, self._undrafted_np + active_np)
        return dataclasses.replace(best, drafted_np=drafted_np)
