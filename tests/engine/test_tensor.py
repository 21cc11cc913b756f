"""Several devices share every layer: the same tokens, and one exchange per drafted token."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.core.program_costs import COLLECTIVES
from dspark_jax.core.sharding import make_mesh, on_mesh, replicated
from dspark_jax.drafters.config import Markov
from dspark_jax.drafters.registry import make_drafter
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.plan import plan_serving
from dspark_jax.engine.profile import fingerprint, measure_costs
from dspark_jax.engine.programs import Models
from dspark_jax.speculation.sampling import Draw, SamplingParams, distribution, sample
from dspark_jax.speculation.schedule import Lagged
from dspark_jax.speculation.shard_sampling import best, sample_logits
from dspark_jax.targets.families import decoder_config_from_hf
from dspark_jax.testing.tiny import tiny_drafter, tiny_target

from .conftest import TinyEngines

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize("name", ["markov", "gated", "eagle3", "mtp", "reduced"])
def test_greedy_answers_are_those_of_one_device(tiny, name):
    engine = tiny.engine(name, slots=3, tensor=2)
    assert tiny.answers(engine, tiny.requests()) == tiny.plain
    assert engine.pages.num_held == 0


@pytest.mark.parametrize("name", ["markov", "rnn"])
def test_draws_are_those_of_one_device(tiny, name):
    requests = [tiny.requests(temperature=1.0, max_new_tokens=16) for _ in range(2)]
    alone, shared = tiny.engine(name, slots=2), tiny.engine(name, slots=2, tensor=2)
    assert tiny.answers(alone, requests[0]) == tiny.answers(shared, requests[1])


def test_eight_devices_draw_what_one_does():
    wide = TinyEngines(16, num_attention_heads=8, num_key_value_heads=8)
    answers = []
    for tensor in (1, 8):
        requests = wide.requests((3, 9, 1), temperature=1.0, max_new_tokens=8)
        requests[1].sampling = wide.requests()[1].sampling  # a greedy one among them
        answers.append(wide.answers(wide.engine("gated", slots=2, tensor=tensor), requests))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "draw"),
    [("markov", Draw.GREEDY), ("gated", Draw.TEMPERATURE), ("rnn", Draw.TEMPERATURE), ("rnn", Draw.FILTERED)],
)
def test_a_drafted_token_is_one_exchange(tiny, name, draw):
    programs = tiny.engine(name, slots=2, tensor=2).programs
    programs.draft(2, draw)
    loops = collectives_in_loops(programs.compiled["draft", 2, draw].as_text())
    # One of the loops draws the block; attention walks over pages in the others, and exchanges nothing.
    assert sorted(loops)[-2:] in ([0, 1], [1])


def collectives_in_loops(hlo: str) -> list[int]:
    """Of every `while` of a compiled program: how many collectives its body has, in whatever it calls."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{$(.*?)^\}", hlo, re.MULTILINE | re.DOTALL))

    def count(name: str) -> int:
        called = set(re.findall(r"%([\w.-]+)", bodies[name])) & bodies.keys() - {name}
        own = re.findall(rf" (?:{'|'.join(COLLECTIVES)})(?:-start)?\(", bodies[name])
        return len(own) + sum(map(count, called))

    return [count(name) for name in re.findall(r" while\(.*?body=%?([\w.-]+)", hlo)]


@pytest.mark.parametrize("vocab_size", [16, 1064])  # groups of 4 and 33 tokens: most lie on two devices
def test_shards_draw_what_the_whole_vocabulary_draws(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = jnp.asarray(rng.normal(0, 3, (64, vocab_size)), jnp.float32).at[0].set(1.0)
    temperature = jnp.asarray(rng.choice([0.0, 0.05, 1.0, 3.0], 64), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 64)
    options = dataclasses.replace(SamplingParams.greedy(64), temperature_B=temperature)
    wanted = sample(keys, distribution(logits, options, draw=Draw.TEMPERATURE))

    mesh = make_mesh(tensor=8)
    placed = jax.device_put((keys, logits, temperature), replicated(mesh))
    with on_mesh(mesh):
        drawn = jax.jit(sample_logits)(*placed)
        ids, highest = jax.jit(best)(placed[1])

    np.testing.assert_array_equal(drawn, wanted)
    np.testing.assert_array_equal(ids, logits.argmax(-1))
    np.testing.assert_array_equal(highest, logits.max(-1))


def test_pages_and_weights_are_divided(tiny):
    engine = tiny.engine("markov", tensor=2)
    state, weights = engine.programs.new_state(), engine.programs._weights
    pages = state.cache.keys_PKSH[0]
    assert pages.addressable_shards[0].data.shape[1] == pages.shape[1] // 2
    kernel = weights.target["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    head = weights.drafter["head"]
    assert head["w1"].is_fully_replicated and not head["w2"].is_fully_replicated


def test_what_cannot_be_divided_is_refused(tiny):
    with pytest.raises(InputError, match=r"tensor=8 for a target with 4 heads"):
        tiny.engine("markov", tensor=8)
    with pytest.raises(InputError, match=f"with {len(jax.devices())} devices"):
        EngineConfig(tensor=64).mesh()


def test_costs_are_measured_on_every_mesh(tiny):
    programs = tiny.engine("markov", Lagged(), slots=1, tensor=2).programs
    table = measure_costs(programs)
    assert (table.verify_curve(1, 64)[1] > 0).all()
    assert table.fingerprint != fingerprint(tiny.engine("markov", Lagged(), slots=1).programs)


def test_an_engine_is_planned_for_devices_that_are_not_there(tpu_devices):
    """Qwen3's shape in small, over the four devices of a slice: memory and collectives of every program."""
    target = tiny_target(
        model_type="qwen3",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
    )
    drafter = tiny_drafter(target, taps=(0, 1), head=Markov(rank=128)).drafter
    models = Models(
        target=target.config, drafter=make_drafter(drafter.config, jnp.bfloat16), dtype=jnp.bfloat16
    )
    devices = tpu_devices("v5e:2x2")
    engine = EngineConfig(slots=8, max_context=256, dtype=jnp.bfloat16)
    plan = plan_serving(models, engine, make_mesh(tensor=4, devices=devices), (8, 16), draw=Draw.GREEDY)

    assert plan.fits
    assert [p.name for p in plan.programs] == [
        "prefill 256",
        "draft R=8",
        "verify R=8 M=8",
        "verify R=8 M=16",
    ]
    weights = 2 * sum(x.size for x in jax.tree.leaves(target.params))
    assert plan.weight_bytes < weights  # with the drafter's, a quarter of almost everything
    logits_bytes = 4 * 8 * 4096
    for program in plan.programs:
        assert program.total_bytes >= plan.weight_bytes + plan.page_bytes
        assert "all-reduce" in program.collectives
        gathered = program.collectives.get("all-gather")
        assert gathered is None or gathered.largest_bytes < logits_bytes // 4


def test_what_no_device_holds_is_said(tpu_devices):
    fields = tiny_target().hf_config | {"hidden_size": 4096, "intermediate_size": 1 << 21}
    models = Models(target=decoder_config_from_hf(fields), drafter=None, dtype=jnp.bfloat16)
    mesh = make_mesh(tensor=4, devices=tpu_devices("v5e:2x2"))
    plan = plan_serving(models, EngineConfig(slots=1, max_context=64), mesh, (1,), draw=Draw.GREEDY)
    assert not plan.fits and "hbm" in plan.programs[0].refusal.lower()
