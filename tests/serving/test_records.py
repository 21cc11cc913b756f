"""Every line becomes the right request, or is refused with its number and the reason."""

from __future__ import annotations

import json
import re

import pytest

from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.serving.options import AnswerOptions
from dspark_jax.serving.records import JobReader
from dspark_jax.speculation.sampling import Draw


@pytest.fixture
def read(server):
    """lines -> (jobs, [(line number, reason)])."""
    loaded = server.load_engine(
        target="smollm2-135m", drafter=SHIPPED, config=EngineConfig(slots=2, max_context=96)
    )

    def run(*lines, settings=None, **defaults):
        settings = settings or {}
        refused = []
        reader = JobReader(
            chat=loaded.chat,
            engine=loaded.engine,
            options=AnswerOptions(
                sampling=SamplingOptions(**{"temperature": 0.5, "top_k": 9} | defaults), max_new_tokens=8
            ),
            eos_ids=frozenset({2}),
            on_refused=lambda number, reason, line: refused.append((number, reason)),
            **settings,
        )
        encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        jobs = list(reader.jobs(enumerate((line + b"\n" for line in encoded), start=1)))
        assert reader.refused == len(refused)
        return jobs, refused

    return run


def test_a_line_that_says_nothing_else_gets_the_defaults(read, server):
    (job,), refused = read({"prompt": "Hi"})

    request = job.request
    assert refused == []
    assert (job.line, job.sample, job.request.domain, request.id) == (1, 0, None, "line-1")
    rendered = server.target.tokenizer.decode(request.prompt_tokens)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (request.max_new_tokens, request.stop_ids) == (8, frozenset({2}))
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 9)


def test_a_line_has_the_last_word(read):
    own = {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7}
    (job,), _ = read({"id": "a", "domain": "math", "prompt": "Hi", "max_new_tokens": 2, **own})

    assert job.request.sampling == SamplingOptions(**own)
    assert (job.request.domain, job.request.id, job.request.max_new_tokens) == ("math", "a", 2)


def test_options_of_a_line(read):
    own = {"min_new_tokens": 3, "stop": "END", "stop_token_ids": [7], "ignore_eos": True, "logprobs": 2}
    (job, greedy), _ = read({"prompt": "Hi", **own}, {"prompt": "Hi", "stop": ["a", "b"], "temperature": 0})

    request = job.request
    assert (request.min_new_tokens, request.logprobs, request.stop_ids) == (3, 2, frozenset({7}))
    assert request.draw == Draw.LOGPROBS and greedy.request.draw == Draw.GREEDY
    assert greedy.request.stop_ids == {2}
    assert [greedy.request.stop_check(token) for token in (67, 68)] == [True, True]  # the bytes a and b


def test_samples(read):
    jobs, _ = read({"id": "a", "prompt": "Hi", "n": 3}, {"id": "b", "prompt": "Hi"})

    assert [(job.id, job.line, job.sample) for job in jobs] == [
        ("a", 1, 0),
        ("a", 1, 1),
        ("a", 1, 2),
        ("b", 2, 0),
    ]
    assert [job.request.id for job in jobs] == ["a#0", "a#1", "a#2", "b"]
    assert [job.request.sampling.sample for job in jobs] == [0, 1, 2, 0]
    assert len({job.request.sampling.seed for job in jobs[:3]}) == 1  # their keys differ by the sample


def test_what_is_done_is_left_out(read):
    done = {(1, 0), (1, 2), (2, 0)}
    lines = [{"id": "a", "prompt": "Hi", "n": 3}, {"id": "b", "prompt": "Hi"}, {"id": "b", "prompt": "again"}]
    jobs, refused = read(*lines, settings={"is_done": lambda *answer: answer in done})

    assert [(job.id, job.sample) for job in jobs] == [("a", 1)]
    assert refused == [(3, "a second line with the id 'b'")]  # also after a stop


def test_shards_cover_every_line_once(read):
    lines = [{"id": f"p{n % 30}", "prompt": "Hi"} for n in range(40)] + [b"{"] * 6
    found, refusals = [], []
    for part in range(3):
        jobs, refused = read(*lines, settings={"shard": (part, 3)})
        found += [job.line for job in jobs]
        refusals += [number for number, _ in refused]
        assert jobs

    assert sorted(found) == list(range(1, 31))
    assert sorted(refusals) == list(range(31, 47))  # the doubles too, each in one shard


def test_messages(read, server):
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": ""},
    ]
    (job,), _ = read({"messages": conversation})

    rendered = server.target.tokenizer.decode(job.request.prompt_tokens)
    assert [part.split("\n")[0] for part in rendered.split("<|im_start|>")[1:]] == [
        *(message["role"] for message in conversation),
        "assistant",
    ]


def test_seeds_come_from_the_id_and_the_jobs_seed(read):
    lines = [{"id": id, "prompt": "same"} for id in ("a", "b", "c")]

    def seeds(*lines, **defaults):
        return {job.request.id: job.request.sampling.seed for job in read(*lines, **defaults)[0]}

    assert len(set(seeds(*lines).values())) == 3
    reordered = seeds({"id": "new", "prompt": "same"}, *lines[::-1])
    assert {id: reordered[id] for id in ("a", "b", "c")} == seeds(*lines)
    assert seeds(*lines, seed=1) != seeds(*lines)


def test_unicode(read, server):
    text = "naïve 日本語 🦜 \u0000 e\u0301"
    (job, escaped, marked), refused = read(
        json.dumps({"id": text, "prompt": text}, ensure_ascii=False).encode(),
        json.dumps({"prompt": text}).encode(),
        b"\xef\xbb\xbf" + json.dumps({"prompt": "byte order mark"}).encode(),
    )

    assert refused == [] and marked.line == 3
    assert job.request.id == text
    assert text in server.target.tokenizer.decode(job.request.prompt_tokens)
    assert escaped.request.prompt_tokens == job.request.prompt_tokens


BAD_LINES = {
    "not JSON": (b'{"prompt": "Hi"', "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not JSON.*utf-8"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "not JSON.*surrogates"),
    "too deep": (b"[" * 200_000, "not JSON"),
    "NaN": (b'{"prompt": "Hi", "temperature": NaN}', "NaN is not a JSON number"),
    "list": (["Hi"], "the line is not a JSON object"),
    "text": ("Hi", "the line is not a JSON object"),
    "unknown": ({"prompt": "Hi", "temprature": 1, "best_of": 2}, "unknown keys best_of, temprature in the"),
    **{
        f"{kind}_penalty": ({"prompt": "Hi", f"{kind}_penalty": 1.1}, f"{kind}_penalty is not supported: it")
        for kind in ("repetition", "presence", "frequency")
    },
    "logit_bias": ({"prompt": "Hi", "logit_bias": {"5": 1}}, "logit_bias is not supported: neither"),
    "greedy samples": ({"prompt": "Hi", "n": 2, "temperature": 0}, "n=2 answers at temperature 0"),
    "no samples": ({"prompt": "Hi", "n": 0}, "n=0; expected 1 to"),
    "stop": ({"prompt": "Hi", "stop": 3}, "stop is 3; expected a string or a list of strings"),
    "stops": ({"prompt": "Hi", "stop": ["a", 3]}, "stop holds '3'; expected a string or a list of strings"),
    "empty stop": ({"prompt": "Hi", "stop": ""}, "an empty stop string"),
    "stop id": (
        {"prompt": "Hi", "stop_token_ids": ["a"]},
        "stop_token_ids holds 'a'; expected a list of int",
    ),
    "no such stop id": ({"prompt": "Hi", "stop_token_ids": [259]}, "a stop id outside the vocabulary"),
    "short": ({"prompt": "Hi", "min_new_tokens": 9}, "min_new_tokens=9; expected 0 to max_new_tokens=8"),
    "many stop ids": (
        {"prompt": "Hi", "min_new_tokens": 1, "stop_token_ids": list(range(20))},
        "at most 16 stop ids beside min_new_tokens",
    ),
    "eos": ({"prompt": "Hi", "ignore_eos": 1}, "ignore_eos is 1; expected true or false"),
    "logprobs": ({"prompt": "Hi", "logprobs": 21}, "logprobs=21; expected 0 to 20 alternatives"),
    "nothing": ({"id": "a"}, "neither prompt nor messages"),
    "both": ({"prompt": "Hi", "messages": []}, "both prompt and messages"),
    "empty": ({"prompt": ""}, "an empty prompt"),
    "no messages": ({"messages": []}, "an empty prompt"),
    "id": ({"prompt": "Hi", "id": 3}, "id is 3; expected a string"),
    "prompt": ({"prompt": ["Hi"]}, 'prompt is ["Hi"]; expected a string'),
    "null": ({"prompt": "Hi", "domain": None}, "domain is null; expected a string"),
    "messages": ({"messages": "Hi"}, 'messages is "Hi"; expected a list of messages'),
    "text of a number": ({"prompt": "Hi", "temperature": "1"}, 'temperature is "1"; expected a number'),
    "bool": ({"prompt": "Hi", "top_k": True}, "top_k is true; expected an integer"),
    "fraction": ({"prompt": "Hi", "max_new_tokens": 2.5}, "max_new_tokens is 2.5; expected an integer"),
    "temperature": ({"prompt": "Hi", "temperature": -1}, "temperature=-1; expected 0 to"),
    "infinite": (b'{"prompt": "Hi", "temperature": 1e999}', "temperature=inf; expected 0 to"),
    "huge": ({"prompt": "Hi", "temperature": 10**400}, "temperature=1000*; expected 0 to"),
    "top_p": ({"prompt": "Hi", "top_p": 0}, "top_p=0; expected in (0, 1]"),
    "seed": ({"prompt": "Hi", "seed": -1}, "seed=-1; expected 0 to"),
    "no tokens": ({"prompt": "Hi", "max_new_tokens": 0}, "max_new_tokens=0; expected at least 1"),
    "too long": ({"prompt": "x" * 90}, "prompt tokens and max_new_tokens=8; expected at most 96 together"),
    "too long an answer": ({"prompt": "Hi", "max_new_tokens": 96}, "max_new_tokens=96; expected at most 96"),
    "role": ({"messages": [{"role": "robot", "content": "Hi"}]}, "message 0: .*robot"),
    "content": ({"messages": [{"role": "user"}]}, "message 0"),
    "message key": (
        {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]},
        "unknown keys name in message 0; known are role, content",
    ),
    "message": ({"messages": ["Hi"]}, "message 0 is not a JSON object"),
    "message content": ({"messages": [{"role": "user", "content": 1}]}, "content is 1; expected a string"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_and_the_others_are_not(read, name):
    line, reason = BAD_LINES[name]

    jobs, refused = read({"id": "before", "prompt": "Hi"}, b"", line, {"id": "after", "prompt": "Hi"})

    assert [(job.line, job.request.id) for job in jobs] == [(1, "before"), (4, "after")]
    ((line_number, given),) = refused
    assert line_number == 3
    assert reason in given or re.search(reason, given), given
    assert len(given) < 700


def test_an_id_may_not_come_twice(read):
    jobs, refused = read(
        {"id": "a", "prompt": "Hi"},
        {"id": "a", "prompt": "Ho"},
        {"id": "b", "prompt": ""},
        {"id": "b", "prompt": "a refused line has not used up its id"},
    )

    assert [job.request.id for job in jobs] == ["a", "b"]
    assert refused == [(2, "a second line with the id 'a'"), (3, "an empty prompt")]


def test_a_template_may_refuse_too(read, server, monkeypatch):
    template = "{{ raise_exception('no system messages here') }}"
    monkeypatch.setattr(server.target.tokenizer, "chat_template", template)

    _, ((line_number, reason),) = read({"prompt": "Hi"})

    assert line_number == 1 and "no system messages here" in reason
