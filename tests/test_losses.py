"""The chunked loss equals the plain formulas over all logits at once, values and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.core.program_costs import collectives, largest_array_bytes
from dspark_jax.core.sharding import make_mesh, on_mesh, param_sharding, replicated
from dspark_jax.losses import RowWeights, block_loss, confidence_loss, slot_weights

B, M, D, R, V, FULL = 2, 7, 5, 3, 12, 20  # the drafter proposes 12 of the target's 20 tokens


SOFTCAP = 2.0  # logits vary by about 2: many of them are bent


def cap(logits, softcap: float | None):
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


@functools.cache
def inputs(softcap: float | None = None) -> dict:
    """Random rows; one of them is not supervised, some labels cannot be proposed."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    head_DF, target_hidden_BMD = normal(D, FULL), normal(B, M, D)
    with jax.ensure_compile_time_eval():  # the first caller may be inside `jit`
        logz_BM = jax.nn.logsumexp(cap(target_hidden_BMD @ head_DF, softcap), axis=-1)
    supervised_BM = np.ones((B, M), np.float32)
    supervised_BM[1, 3] = 0
    labels_BM = generator.integers(0, V, (B, M))
    labels_BM[0, 2] = labels_BM[1, 6] = -1
    return {
        "hidden_BMD": normal(B, M, D),
        "latent_BMR": normal(B, M, R),
        "w2_RV": normal(R, V),
        "head_DV": head_DF[:, :V],
        "target_hidden_BMD": target_hidden_BMD,
        "target_logz_BM": np.asarray(logz_BM),
        "labels_BM": labels_BM,
        "weights": {
            term: supervised_BM * generator.random((B, M)).astype(np.float32)
            for term in ("ce_BM", "tv_BM", "kl_BM")
        },
    }


def only(*terms: str) -> RowWeights:
    """The weights of some terms; those of the others are zero."""
    weights = inputs()["weights"]
    return RowWeights(**{name: w * (name[:2] in terms) for name, w in weights.items()})


def plain_terms(hidden_BMD, latent_BMR, w2_RV, softcap: float | None = None) -> dict[str, jax.Array]:
    """Definitions of the paper, over the target's and the drafter's full distributions."""
    x = inputs(softcap)
    logits_BMV = cap(hidden_BMD @ x["head_DV"], softcap)
    logits_BMV = logits_BMV + (0 if latent_BMR is None else latent_BMR @ w2_RV)
    log_q = jax.nn.log_softmax(logits_BMV)
    target_logits_BMV = cap(x["target_hidden_BMD"] @ x["head_DV"], softcap)
    q, p = jnp.exp(log_q), jnp.exp(target_logits_BMV - x["target_logz_BM"][..., None])
    outside = 1 - p.sum(-1)
    one_hot = jax.nn.one_hot(x["labels_BM"], V)  # all zeros for -1
    return {
        "ce": -(one_hot * log_q).sum(-1),
        "tv": jnp.abs(q - p).sum(-1) + outside,
        "kl": -(p * log_q).sum(-1),
        "accept": jnp.minimum(p, q).sum(-1),
        "agree": (q.argmax(-1) == p.argmax(-1)).astype(jnp.float32),
    }


def plain_loss(hidden_BMD, latent_BMR, w2_RV, weights: RowWeights, softcap: float | None = None):
    terms = plain_terms(hidden_BMD, latent_BMR, w2_RV, softcap)
    return sum((getattr(weights, f"{name}_BM") * terms[name]).sum() for name in ("ce", "tv", "kl"))


def trained(with_latent: bool) -> tuple:
    x = inputs()
    return (x["hidden_BMD"], x["latent_BMR"] if with_latent else None, x["w2_RV"] if with_latent else None)


@functools.partial(jax.jit, static_argnames=("chunk", "softcap"))
def chunked(hidden_BMD, latent_BMR, w2_RV, weights: RowWeights, chunk: int, softcap: float | None = None):
    x = inputs(softcap)
    names = ("head_DV", "target_hidden_BMD", "target_logz_BM", "labels_BM")
    frozen = {name: jnp.asarray(x[name]) for name in names}

    def loss(hidden_BMD, latent_BMR, w2_RV):
        value, terms = block_loss(
            hidden_BMD=hidden_BMD,
            latent_BMR=latent_BMR,
            w2_RV=w2_RV,
            weights=weights,
            softcap=softcap,
            chunk=chunk,
            **frozen,
        )
        return 3 * value, terms  # the cotangent is not 1

    arguments = (0,) if latent_BMR is None else (0, 1, 2)
    (value, terms), gradients = jax.value_and_grad(loss, arguments, has_aux=True)(
        hidden_BMD, latent_BMR, w2_RV
    )
    return value / 3, terms, jax.tree.map(lambda g: g / 3, gradients)


@pytest.mark.parametrize("with_latent", [True, False], ids=["latent", "no-latent"])
@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["uncapped", "capped"])
@pytest.mark.parametrize("terms", [("ce",), ("tv",), ("kl",), ("ce", "tv", "kl")], ids="-".join)
def test_equals_the_plain_formula(terms, with_latent, softcap):
    weights, arrays = only(*terms), trained(with_latent)
    arguments = (0, 1, 2) if with_latent else (0,)

    # 7 rows: the last chunk is padded.
    value, _, gradients = chunked(*arrays, weights, chunk=3, softcap=softcap)
    plain = jax.jit(jax.value_and_grad(functools.partial(plain_loss, softcap=softcap), arguments))
    expected, expected_gradients = plain(*arrays, weights)

    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["uncapped", "capped"])
def test_terms_of_every_row(softcap):
    _, terms, _ = chunked(*trained(True), only("tv"), chunk=3, softcap=softcap)
    expected = plain_terms(*trained(True), softcap)

    for name, value in expected.items():
        np.testing.assert_allclose(getattr(terms, f"{name}_BM"), value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert expected["accept"].max() < 0.9 and 0 < expected["agree"].mean() < 1  # nothing degenerate


def test_acceptance_is_the_mass_that_target_and_drafter_share():
    """sum min(p, q) over the FULL vocabulary, on which q is zero outside the draft vocabulary."""
    x = inputs()
    _, terms, _ = chunked(*trained(True), only("tv"), chunk=3)
    inside_np = np.exp(x["target_hidden_BMD"] @ x["head_DV"] - x["target_logz_BM"][..., None])
    p_np = np.concatenate([inside_np, 1 - inside_np.sum(-1, keepdims=True)], axis=-1)
    logits_np = x["hidden_BMD"] @ x["head_DV"] + x["latent_BMR"] @ x["w2_RV"]
    q_np = np.exp(logits_np) / np.exp(logits_np).sum(-1, keepdims=True)
    q_np = np.pad(q_np, ((0, 0), (0, 0), (0, 1)))

    np.testing.assert_allclose(terms.accept_BM, np.minimum(p_np, q_np).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(terms.tv_BM, np.abs(p_np - q_np).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_chunk_does_not_matter(chunk):
    weights = only("ce", "tv", "kl")
    for ours, theirs in zip(
        jax.tree.leaves(chunked(*trained(True), weights, chunk=chunk)),
        jax.tree.leaves(chunked(*trained(True), weights, chunk=3)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def loss_in_float64(hidden_np, latent_np, w2_np) -> float:
    """The weighted loss in numpy, fine enough to be differentiated by differences."""
    x, weights = inputs(), only("ce", "tv", "kl")
    logits_np = hidden_np @ x["head_DV"] + latent_np @ w2_np
    log_q_np = logits_np - np.log(np.exp(logits_np).sum(-1, keepdims=True))
    p_np = np.exp(x["target_hidden_BMD"] @ x["head_DV"] - x["target_logz_BM"][..., None])
    picked_np = np.take_along_axis(log_q_np, np.maximum(x["labels_BM"], 0)[..., None], axis=-1)[..., 0]
    return (
        -(weights.ce_BM * (x["labels_BM"] >= 0) * picked_np).sum()
        + (weights.tv_BM * (np.abs(np.exp(log_q_np) - p_np).sum(-1) + 1 - p_np.sum(-1))).sum()
        - (weights.kl_BM * (p_np * log_q_np).sum(-1)).sum()
    )


def test_finite_differences():
    value, _, gradients = chunked(*trained(True), only("ce", "tv", "kl"), chunk=3)
    arrays, generator, step = [x.astype(np.float64) for x in trained(True)], np.random.default_rng(1), 1e-6
    np.testing.assert_allclose(value, loss_in_float64(*arrays), rtol=1e-5)

    for i, gradient in enumerate(gradients):
        direction = generator.standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if k == i else x for k, x in enumerate(arrays)]
            ends.append(loss_in_float64(*moved))
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((np.asarray(gradient) * direction).sum(), slope, rtol=1e-4)


def test_rows_without_weight_have_no_gradient():
    _, _, (hidden, latent, w2) = chunked(*trained(True), only("ce", "tv", "kl"), chunk=3)
    assert not hidden[1, 3].any() and not latent[1, 3].any()
    assert np.abs(hidden[1, 2]).min() > 0 and w2.any()

    value, terms, gradients = chunked(*trained(True), only(), chunk=3)
    assert value == 0 and not any(g.any() for g in gradients)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(terms))


@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["uncapped", "capped"])
def test_extreme_logits_stay_finite(softcap):
    hidden, latent, w2 = trained(True)

    value, terms, gradients = chunked(200 * hidden, latent, w2, only("ce", "tv"), chunk=3, softcap=softcap)

    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, terms, gradients)))
    assert terms.tv_BM.max() <= 2 + 1e-5 and terms.accept_BM.min() >= 0


def test_the_teacher_is_detached():
    x = inputs()

    def loss(target_hidden_BMD, head_DV, target_logz_BM):
        value, terms = block_loss(
            hidden_BMD=jnp.asarray(x["hidden_BMD"]),
            latent_BMR=None,
            w2_RV=None,
            head_DV=head_DV,
            target_hidden_BMD=target_hidden_BMD,
            target_logz_BM=target_logz_BM,
            labels_BM=jnp.asarray(x["labels_BM"]),
            weights=only("ce", "tv", "kl"),
        )
        return value + terms.accept_BM.sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(x["target_hidden_BMD"], x["head_DV"], x["target_logz_BM"])
    assert not any(g.any() for g in gradients)


def test_confidence_loss():
    generator = np.random.default_rng(2)
    logits = 30 * generator.standard_normal((B, M)).astype(np.float32)
    accept, weights = generator.random((2, B, M)).astype(np.float32)

    def reference(logits, accept):
        return (weights * optax.sigmoid_binary_cross_entropy(logits, accept)).sum()

    value, gradients = jax.value_and_grad(confidence_loss, (0, 1))(logits, accept, weights)
    np.testing.assert_allclose(value, reference(logits, accept), rtol=1e-5)
    np.testing.assert_allclose(gradients[0], jax.grad(reference)(logits, accept), rtol=1e-5, atol=1e-6)
    assert not gradients[1].any(), "c* is a constant"


def test_slot_weights():
    mask = np.array([[True, True, False, True]])

    weights = slot_weights(jnp.asarray(mask), jnp.array([[0, 1, 2, 3]]), 4.0)

    np.testing.assert_allclose(weights, [[1, np.exp(-1 / 4), 0, np.exp(-3 / 4)]], rtol=1e-6)


def on_axes(weights: RowWeights, shift: float = 0.0, **axes: int) -> tuple:
    """The loss (value, terms, gradients) on a mesh; `shift` moves all logits of target and drafter alike."""
    mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    x = inputs()
    ones = np.ones((B, M, 1), np.float32)
    arrays = {
        "hidden_BMD": np.concatenate([x["hidden_BMD"], ones], axis=-1),
        "target_hidden_BMD": np.concatenate([x["target_hidden_BMD"], ones], axis=-1),
        "head_DV": np.concatenate([x["head_DV"], np.full((1, V), shift, np.float32)]),
        "target_logz_BM": x["target_logz_BM"] + shift,
        **{name: x[name] for name in ("latent_BMR", "w2_RV", "labels_BM")},
    }

    @jax.jit
    def run(trained, frozen):
        def loss(trained):
            with on_mesh(mesh):
                return block_loss(**trained, **frozen, weights=weights, chunk=3)

        return jax.value_and_grad(loss, has_aux=True)(trained)

    arrays = jax.device_put(arrays, replicated(mesh))
    trained = {name: arrays.pop(name) for name in ("hidden_BMD", "latent_BMR", "w2_RV")}
    (value, terms), gradients = run(trained, arrays)
    return value, terms, {**gradients, "hidden_BMD": gradients["hidden_BMD"][..., :-1]}


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"tensor": 8}], ids=["divided", "padded"])
@pytest.mark.parametrize("shift", [0.0, -30.0], ids=["", "all-logits-negative"])
def test_parts_of_the_vocabulary_make_the_whole_and_padding_has_no_chance(axes, shift):
    """12 words on 8 devices are padded to 16; a padded logit of 0 would win against logits around -30."""
    weights = only("ce", "tv", "kl")
    ours, whole = on_axes(weights, shift, **axes), on_axes(weights, shift, data=1)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    assert 0 < whole[1].agree_BM.mean() < 1


def test_a_whole_head_tells_the_normaliser():
    x = inputs()
    names = ("hidden_BMD", "latent_BMR", "w2_RV", "head_DV", "target_hidden_BMD", "labels_BM")
    arrays = {name: x[name] for name in names}
    logz_BM = jax.nn.logsumexp(x["target_hidden_BMD"] @ x["head_DV"], axis=-1)
    given, found = (
        block_loss(**arrays, target_logz_BM=logz, weights=only("ce", "tv", "kl"), chunk=3)
        for logz in (logz_BM, None)
    )
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def compiled_loss(rows: int, vocab_size: int, chunk: int, mesh=None, width: int = 8):
    """The loss and its gradients, compiled for shapes; the head lies divided over the mesh."""

    def shape(*sizes: int, axes=None, dtype=jnp.float32):
        sharding = (
            None if mesh is None else param_sharding(mesh, axes or ("batch", *[None] * (len(sizes) - 1)))
        )
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    batch = 1 if mesh is None else 2
    row = shape(batch, rows)

    def loss(hidden, latent, w2, head, target, logz, labels, weights):
        with on_mesh(mesh):
            return block_loss(
                hidden_BMD=hidden,
                latent_BMR=latent,
                w2_RV=w2,
                head_DV=head,
                target_hidden_BMD=target,
                target_logz_BM=logz,
                labels_BM=labels,
                weights=weights,
                chunk=chunk,
            )[0]

    return (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        .lower(
            shape(batch, rows, width),
            shape(batch, rows, 4),
            shape(4, vocab_size, axes=("rank", "vocab")),
            shape(width, vocab_size, axes=("embed", "vocab")),
            shape(batch, rows, width),
            row,
            shape(batch, rows, dtype=jnp.int32),
            RowWeights(row, row, row),
        )
        .compile()
    )


def test_no_array_is_larger_than_one_chunk_of_logits():
    chunk, vocab_size = 32, 1000
    for rows in (64, 256):
        assert largest_array_bytes(compiled_loss(rows, vocab_size, chunk)) == 4 * chunk * vocab_size


def test_neither_head_nor_logits_travel_between_devices():
    """What does is per row: sums over the vocabulary and gradients of the width."""
    chunk, width = 4, 8
    mesh = make_mesh(data=2, tensor=4)
    found = collectives(compiled_loss(12, 4096, chunk, mesh, width))
    assert set(found) == {"all-reduce"}
    grad_w2_bytes = 4 * 4 * 4096 // 4  # summed over the sequences, each device its own words
    assert found["all-reduce"].largest_bytes <= grad_w2_bytes + 4


def test_no_loss_is_compiled_with_logits_gathered_for_tpus(tpu_devices):
    mesh = make_mesh(data=2, tensor=2, devices=tpu_devices("v5e:2x2"))
    found = collectives(compiled_loss(16, 4096, 8, mesh, 128))
    assert set(found) == {"all-reduce"}
    assert found["all-reduce"].largest_bytes <= 4 * 4 * 4096 // 2 + 4
