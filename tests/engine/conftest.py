"""A tiny target, drafters that agree with it often but not always, and engines over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.config import RNN, Confidence, Eagle3Config, Gated, Markov, MTPConfig
from dspark_jax.engine.engine import Engine, EngineConfig
from dspark_jax.engine.requests import Request, SamplingOptions
from dspark_jax.engine.state import Weights
from dspark_jax.speculation.cost import CostTable
from dspark_jax.speculation.schedule import Scheduler
from dspark_jax.speculation.verify_length import FullBlock
from dspark_jax.targets.decoder import Decoder
from dspark_jax.testing.tiny import TinyDrafter, TinyTarget, tiny_drafter, tiny_target

DRAFT_TO_TARGET = np.array([0, 2, 3, 5, 6, 8, 9, 11])


class TinyEngines:
    """Engines over one target of `vocab_size` tokens.

    A random drafter would hardly ever agree with a random target. Those with a head know the target's
    bigrams: W2 holds its mean logits after each token, and W1 tells the tokens apart.
    """

    block_len = 3
    drafters = ("markov", "gated", "rnn", "reduced", "dflash")

    def __init__(self, vocab_size: int, **fields):
        self.vocab_size, self.fields = vocab_size, fields

    @functools.cached_property
    def target(self) -> TinyTarget:
        """The target: the last token tells much about the next one, but far from everything."""
        target = tiny_target(
            vocab_size=self.vocab_size,
            num_hidden_layers=2,
            tie_word_embeddings=False,
            seed=11,
            **self.fields,
        )
        for layer in ("layers_0", "layers_1"):
            target.params[layer]["attention"]["o"]["kernel"] *= 0.3
        return target

    @functools.cached_property
    def forward(self) -> Callable:
        """(tokens [B, T], taps) -> TargetOutput, without a cache."""

        def run(tokens_BT, taps=()):
            return Decoder(self.target.config).apply({"params": self.target.params}, tokens_BT, taps=taps)

        return jax.jit(run, static_argnames="taps")

    @functools.cached_property
    def bigrams(self) -> np.ndarray:
        """[V, V]: the target's logits after each token, averaged over texts that it writes itself."""
        tokens_np = np.random.default_rng(0).integers(0, self.vocab_size, (64, 24))
        for t in range(3, 24):
            tokens_np[:, t] = self.forward(tokens_np).logits_BTV[:, t - 1].argmax(-1)
        logits_np = np.asarray(self.forward(tokens_np).logits_BTV)
        return np.stack([logits_np[tokens_np == token].mean(0) for token in range(self.vocab_size)])

    @functools.cache  # noqa: B019 lives as long as the tests
    def drafter(self, name: str) -> TinyDrafter:
        """The drafter of that name: a kind, or a head of DSpark; "reduced" ones lack some tokens."""
        V = self.vocab_size
        heads = {
            "markov": Markov(rank=V),
            "gated": Gated(rank=V),
            "rnn": RNN(rank=V),
            "reduced": Markov(rank=V),
        }
        vocabulary_np = DRAFT_TO_TARGET[DRAFT_TO_TARGET < V] if name.endswith("reduced") else None
        kinds = {"eagle3": Eagle3Config, "mtp": MTPConfig}
        if kind := kinds.get(name.removesuffix("-reduced")):
            return tiny_drafter(
                self.target,
                kind=kind,
                draft_to_target_np=vocabulary_np,
                taps=(-1, 1) if kind is Eagle3Config else (1,),
                block_len=self.block_len,
            )
        head = heads.get(name)
        drafter = tiny_drafter(
            self.target,
            draft_to_target_np=vocabulary_np,
            num_layers=1,
            taps=(-1, 1),
            block_len=self.block_len,
            head=head,
            confidence=Confidence(with_markov=head is not None),
        )
        if head is not None:
            weights = drafter.params["head"]
            weights["w1"] = jnp.eye(V)
            weights["w2"] = jnp.asarray(
                self.bigrams[:, slice(None) if vocabulary_np is None else vocabulary_np]
            )
            drafter.params["backbone"]["final_norm"]["scale"] *= 0.3
        if name == "rnn":  # the output follows W1[prev], the recurrence adds noise
            kernel = weights["joint_kernel"] * 0.3
            weights["joint_kernel"] = kernel.at[V : 2 * V, 2 * V :].add(2 * jnp.eye(V))
        return drafter

    def engine(
        self,
        name: str | None,
        policy: Scheduler | None = None,
        *,
        slots: int = 1,
        max_context: int = 64,
        **config,
    ) -> Engine:
        """An engine with the drafter of that name; None decodes plainly."""
        drafter = name and self.drafter(name)
        return Engine(
            target=self.target.config,
            drafter=drafter.drafter if drafter else None,
            weights=Weights(
                target=self.target.params,
                drafter=drafter.params if drafter else None,
                shared=drafter.shared if drafter else None,
            ),
            config=EngineConfig(
                slots=slots,
                max_context=max_context,
                policy=policy or FullBlock(),
                **{"smallest_prefill": 16, "page_len": 16} | config,
            ),
            table=self.table(policy, slots, max_context),
        )

    def table(self, policy, slots: int, max_context: int) -> CostTable:
        """Made-up times under which it pays to verify some tokens, but not all."""
        config = EngineConfig(slots=slots, max_context=max_context, policy=policy or FullBlock())
        buckets = config.request_buckets
        declared = [config.row_buckets(requests, self.block_len) for requests in buckets]
        rows = sorted({row for of_bucket in declared for row in of_bucket})
        verify_ms_np = np.array(
            [[4 + row**0.8 if row in of_bucket else np.inf for row in rows] for of_bucket in declared]
        )
        return CostTable(
            request_buckets=buckets,
            row_buckets=tuple(rows),
            context_buckets=(max_context,),
            verify_ms_np=verify_ms_np[..., None],
            draft_ms_np=np.array([[0.5 + 0.1 * requests] for requests in buckets]),
            fingerprint="made up",
        )

    def requests(self, lengths: Sequence[int] = (3, 9, 1, 14, 6, 8), **changes) -> list[Request]:
        """Requests with random prompts of these lengths, always the same; greedy, 30 tokens by default."""
        rng = np.random.default_rng(3)
        options = {"max_new_tokens": 30, "temperature": 0.0} | changes
        fields = {name: options.pop(name) for name in ("max_new_tokens", "stop_ids") if name in options}
        return [
            Request(
                id=f"r{number}",
                prompt_tokens=rng.integers(0, self.vocab_size, length).tolist(),
                sampling=SamplingOptions(**{"seed": number} | options),
                **fields,
            )
            for number, length in enumerate(lengths)
        ]

    @functools.cached_property
    def plain(self) -> dict[str, list[int]]:
        """What plain decoding answers to `requests()`, one at a time."""
        return self.answers(self.engine(None), self.requests())

    @staticmethod
    def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Runs requests to their end: id -> emitted tokens."""
        return {request.id: request.emitted for request in engine.run(requests)}


@pytest.fixture(scope="session")
def tiny() -> TinyEngines:
    """Engines over 12 tokens."""
    return TinyEngines(12)


@pytest.fixture(scope="session")
def toy() -> TinyEngines:
    """Engines over so few tokens that every continuation can be counted."""
    return TinyEngines(5)
