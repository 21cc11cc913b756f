"""One training step: the same on every mesh and in any number of micro-batches, and sound on useless data."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.checkpoints.targets import load_target
from dspark_jax.core.sharding import make_mesh, replicated
from dspark_jax.data.anchors import sample_anchors
from dspark_jax.data.packing import Document, collate
from dspark_jax.data.sources import Example
from dspark_jax.drafters.config import RNN
from dspark_jax.drafters.contract import SharedWeights
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.targets.decoder import embedding_table, lm_head_kernel
from dspark_jax.testing.tiny import randomised
from dspark_jax.training.config import LossConfig, OptimizerConfig, PerToken
from dspark_jax.training.features import target_features
from dspark_jax.training.optimizer import make_optimizer, with_unit_features
from dspark_jax.training.recipes import DrafterRecipe, DSparkRecipe, Eagle3Recipe, MTPRecipe
from dspark_jax.training.state import Frozen, TrainBatch, TrainState, batch_shardings, state_shardings
from dspark_jax.training.step import train_step

RECIPE = DSparkRecipe(taps=(-1, 1), mask_token=39, num_layers=1, block_len=3, head=RNN(rank=4))
LOSS = LossConfig(kl=0.1, chunk=4)
IN_PARTS = dataclasses.replace(LOSS, block_chunk=2)
OTHERS = {
    "eagle3": (
        Eagle3Recipe(taps=(-1, 1), block_len=3),
        LossConfig(kl=1.0, decay_len=1e9, chunk=4, normaliser=PerToken()),  # every row weighs the same
    ),
    "mtp": (MTPRecipe(block_len=3), LOSS),
}
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
B, T, A = 16, 20, 3


class Trainer:
    """A compiled step on one mesh; its optimiser keeps the gradient of the last step."""

    def __init__(
        self,
        directory,
        *,
        recipe: DrafterRecipe = RECIPE,
        loss: LossConfig = LOSS,
        microbatches: int = 1,
        target_parts: int = 1,
        **axes: int,
    ):
        self.mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
        target = load_target(directory, mesh=self.mesh)
        self.drafter = make_drafter(recipe.resolve(target.config))
        taps = self.drafter.config.taps
        shared = SharedWeights.cut(
            embedding_table(target.params), lm_head_kernel(target.params), None, target.config.scaling
        )
        self.frozen = Frozen(target_params=target.params, shared=shared)
        keep_gradient = optax.chain(optax.trace(0.0), optax.scale(-0.01))
        self.optimizer = keep_gradient
        if self.drafter.feature_kernel is not None:
            ones_X = jnp.ones(len(taps) * 16)
            self.optimizer = with_unit_features(keep_gradient, self.drafter.feature_kernel, ones_X)
        shapes = jax.eval_shape(self.drafter.init, jax.random.key(0))
        params = randomised(shapes, seed=1)
        self._start = TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))
        self.shardings = state_shardings(self._start, self.drafter, self.mesh)
        self.forward = functools.partial(target_features, config=target.config, taps=taps, dtype="float32")
        self.step = jax.jit(
            functools.partial(
                train_step,
                drafter=self.drafter,
                optimizer=self.optimizer,
                target=target.config,
                loss=loss,
                microbatches=microbatches,
                target_parts=target_parts,
                mesh=self.mesh,
            ),
            donate_argnums=0,
            out_shardings=(self.shardings, replicated(self.mesh)),
        )

    def fresh(self) -> TrainState:
        """The same state again; a step eats the one that it is given."""
        return jax.tree.map(
            lambda x, sharding: jax.device_put(np.array(x), sharding), self._start, self.shardings
        )

    def put(self, batch: TrainBatch) -> TrainBatch:
        """The batch as `train` places it."""
        return jax.device_put(batch, batch_shardings(batch, self.mesh))

    def __call__(self, batch: TrainBatch) -> tuple[dict, dict]:
        """(metrics, gradient) of the first step on a batch."""
        state, metrics = self.step(self.fresh(), self.put(batch), self.frozen)
        return jax.device_get((metrics, gradient(state)))


def gradient(state: TrainState) -> dict:
    return optax.tree_utils.tree_get(state.opt_state, "trace")


def make_batch(seed: int = 0) -> TrainBatch:
    """Sequences of different lengths, some with fewer valid anchors than A."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, T + 1, (B, 1))
    loss_mask_BT = (np.arange(T) >= rng.integers(1, 8, (B, 1))) & (np.arange(T) < lengths)
    anchors, keep = zip(*(sample_anchors(rng, mask_T, A) for mask_T in loss_mask_BT), strict=True)
    tokens_BT = rng.integers(0, 39, (B, T)).astype(np.int32)
    return TrainBatch(tokens_BT, loss_mask_BT, np.stack(anchors), np.stack(keep), None)


def packed(batch: TrainBatch) -> TrainBatch:
    """The same documents and blocks, two per row."""
    rows = []
    for b in range(0, B, 2):
        row = []
        for i in (b, b + 1):
            # Documents end behind their last supervised token.
            length = int(max(np.flatnonzero(batch.loss_mask_BT[i]), default=0)) + 1
            tokens_np, mask_np = batch.tokens_BT[i, :length], batch.loss_mask_BT[i, :length]
            record = Example(id=str(i), domain="", tokens_np=tokens_np, loss_mask_np=mask_np)
            row.append(Document(record, batch.anchors_BA[i][batch.keep_BA[i]]))
        rows.append(row)
    return TrainBatch.from_host(collate(rows, length=2 * T, num_anchors=2 * A, packed=True))


def of_packed(trainer: Trainer) -> tuple[dict, dict]:
    """(metrics, gradient) of the packed batch; the metrics per row as they are per sequence."""
    metrics, gradients = trainer(packed(make_batch()))
    return {**metrics, "anchors_per_sequence": metrics["anchors_per_sequence"] / 2}, gradients


def assert_same(ours: tuple[dict, dict], theirs: tuple[dict, dict]) -> None:
    np.testing.assert_allclose(ours[0]["loss"], theirs[0]["loss"], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), ours, theirs)


@pytest.fixture(scope="module")
def trainer(target_directory) -> Trainer:
    """One device, one micro-batch: what everything is compared with."""
    return Trainer(target_directory)


@pytest.fixture(scope="module")
def expected(trainer):
    metrics, gradients = trainer(make_batch())
    assert metrics["loss"] > 1
    dead = [path for path, g in jax.tree_util.tree_leaves_with_path(gradients) if not np.abs(g).max() > 1e-4]
    assert not dead, "parameters that this comparison would not see"
    return metrics, gradients


@pytest.mark.parametrize(
    ("axes", "microbatches", "pack"),
    [
        ({}, 4, False),
        ({"data": 4, "fsdp": 2}, 4, False),
        ({"fsdp": 2}, 1, True),
        ({"data": 2, "tensor": 4}, 4, True),
    ],
    ids=["1-device", "8-devices", "2-devices-packed", "8-devices-packed"],
)
def test_loss_and_gradients_do_not_depend_on_devices_parts_or_packing(
    target_directory, expected, axes, microbatches, pack
):
    settings = {"loss": IN_PARTS, "microbatches": microbatches, "target_parts": 2}
    trainer = Trainer(target_directory, **settings, **axes)
    assert_same(of_packed(trainer) if pack else trainer(make_batch()), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_neither_do_those_of_other_drafters(target_directory, name):
    recipe, loss = OTHERS[name]
    settings = {"recipe": recipe, "loss": loss}
    metrics, gradients = Trainer(target_directory, **settings)(make_batch())
    assert all(g.any() for g in jax.tree.leaves(gradients)), "parameters that this comparison would not see"
    settings["loss"] = dataclasses.replace(loss, block_chunk=2)
    divided = Trainer(target_directory, **settings, microbatches=4, data=2, fsdp=2, tensor=2)
    assert_same(of_packed(divided), (metrics, gradients))
    if name == "eagle3":
        per_row = 0.1 * metrics["ce"] + 0.9 * metrics["tv"] + metrics["kl"]
        assert math.isclose(metrics["loss"], per_row * metrics["rows"] / (B * T), rel_tol=1e-5)


def test_neither_do_those_on_a_target_with_experts(experts_directory):
    expected = Trainer(experts_directory)(make_batch())
    divided = Trainer(experts_directory, loss=IN_PARTS, microbatches=2, data=2, expert=2, tensor=2)
    kernel = divided.frozen.target_params["layers_0"]["mlp"]["gate_kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    assert_same(of_packed(divided), expected)


def test_everything_is_sharded_and_a_second_step_compiles_nothing(target_directory, expected):
    trainer = Trainer(target_directory, **CUBE)
    batch = trainer.put(make_batch())
    assert batch.tokens_BT.addressable_shards[0].data.shape == (B // 4, T)
    embedding = trainer.frozen.target_params["embedding"]
    assert embedding.addressable_shards[0].data.shape == (embedding.shape[0] // 2, embedding.shape[1] // 2)

    state = trainer.fresh()
    for number in range(2):
        state, metrics = trainer.step(state, trainer.put(make_batch(number)), trainer.frozen)
        if number == 0:
            first = jax.device_get((metrics, gradient(state)))
        kernel = state.params["backbone"]["layers_0"]["attention"]["q"]["kernel"]
        assert kernel.sharding.spec == P(("fsdp",), ("tensor",))
        assert kernel.addressable_shards[0].data.size == kernel.size // 4
        for tree in (state.params, gradient(state)):
            jax.tree.map(
                lambda x, s: s.is_equivalent_to(x.sharding, x.ndim) or pytest.fail(str(s)),
                tree,
                trainer.shardings.params,
            )
    assert trainer.step._cache_size() == 1
    assert_same(first, expected)


@pytest.mark.parametrize("orthogonalise", [False, True])
def test_moments_of_the_real_optimisers_are_sharded_like_their_parameters(trainer, orthogonalise):
    config = OptimizerConfig(orthogonalise=orthogonalise)
    optimizer = make_optimizer(
        config,
        steps=10,
        feature_kernel=trainer.drafter.feature_kernel,
        feature_scale=jnp.ones(len(RECIPE.taps) * 16),
    )

    def fresh(params) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    state = jax.eval_shape(fresh, trainer.fresh().params)
    shardings = state_shardings(state, trainer.drafter, make_mesh(**CUBE))
    found = {}
    for _, moments in optax.tree_utils.tree_get_all_with_path(shardings.opt_state, "mu"):
        by_path = traverse_util.flatten_dict(moments)
        found |= {path: x for path, x in by_path.items() if isinstance(x, NamedSharding)}  # others are masked
    assert found == traverse_util.flatten_dict(shardings.params)
    assert found["backbone", "layers_0", "mlp", "up", "kernel"].spec == P(("fsdp",), ("tensor",))


def test_nothing_to_learn_gives_no_loss_no_gradient_and_no_nan(trainer):
    batch = make_batch()
    empty = batch.replace(
        loss_mask_BT=np.zeros_like(batch.loss_mask_BT),
        anchors_BA=np.zeros_like(batch.anchors_BA),
        keep_BA=np.zeros_like(batch.keep_BA),
    )
    metrics, gradients = trainer(empty)
    assert metrics["loss"] == 0 and metrics["rows"] == 0
    assert all(np.isfinite(value).all() for value in metrics.values())
    assert all((g == 0).all() for g in jax.tree.leaves(gradients))


def test_masked_anchors_and_padding_weigh_exactly_nothing(trainer, expected):
    batch = make_batch()
    assert not batch.keep_BA.all()
    anchors_BA, tokens_BT = batch.anchors_BA.copy(), batch.tokens_BT.copy()
    anchors_BA[~batch.keep_BA] = 7  # a masked anchor may stand anywhere
    after_BT = np.cumsum(batch.loss_mask_BT[:, ::-1], axis=1)[:, ::-1] == 0
    assert after_BT.any()
    tokens_BT[after_BT] = 11  # padding may hold anything
    again = trainer(batch.replace(anchors_BA=anchors_BA, tokens_BT=tokens_BT))
    jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_sequences_shorter_than_a_block_are_harmless(trainer):
    batch = make_batch()
    loss_mask_BT, anchors_BA, keep_BA = (
        x.copy() for x in (batch.loss_mask_BT, batch.anchors_BA, batch.keep_BA)
    )
    for row, supervised in enumerate(([0, 1], [T - 2, T - 1], [])):  # at the start, at the end, not at all
        loss_mask_BT[row] = np.isin(np.arange(T), supervised)
        anchors_BA[row], keep_BA[row] = sample_anchors(np.random.default_rng(0), loss_mask_BT[row], A)
    metrics, gradients = trainer(
        batch.replace(loss_mask_BT=loss_mask_BT, anchors_BA=anchors_BA, keep_BA=keep_BA)
    )
    assert keep_BA[:3].sum(1).tolist() == [1, 1, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((metrics, gradients)))


def test_stored_features_train_exactly_like_the_target_itself(trainer, expected):
    batch = make_batch()
    features = jax.jit(trainer.forward)(trainer.frozen.target_params, jnp.asarray(batch.tokens_BT))
    trainer_frozen = trainer.frozen.replace(target_params=None)
    state, metrics = trainer.step(
        trainer.fresh(), trainer.put(batch.replace(target=features)), trainer_frozen
    )
    assert_same(jax.device_get((metrics, gradient(state))), expected)


def test_metrics_are_averages_of_what_they_name(expected):
    metrics, _ = expected
    batch = make_batch()
    assert set(metrics) == {
        *("loss", "ce", "tv", "kl", "bce", "expected_tau", "accept_G", "agree_G", "confidence_bias_G"),
        *("rows", "anchors_per_sequence", "gradient_norm"),
    }
    terms = 0.1 * metrics["ce"] + 0.9 * metrics["tv"] + 0.1 * metrics["kl"] + metrics["bce"]
    assert math.isclose(metrics["loss"], terms, rel_tol=1e-5)
    assert metrics["anchors_per_sequence"] == batch.keep_BA.sum() / B
    assert 1 <= metrics["expected_tau"] <= 1 + RECIPE.block_len
    assert ((metrics["accept_G"] >= 0) & (metrics["accept_G"] <= 1)).all()
