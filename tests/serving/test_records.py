"""Every line becomes the right request, or is refused with its number and the reason."""

from __future__ import annotations

import json
import re

import pytest

from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import SHIPPED
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.serving.records import JobReader


@pytest.fixture
def read(server):
    """lines -> (jobs, [(line number, reason)])."""
    loaded = server.load_engine(
        target="smollm2-135m", drafter=SHIPPED, config=EngineConfig(slots=2, max_context=96)
    )

    def run(*lines, **defaults):
        refused = []
        reader = JobReader(
            chat=loaded.chat,
            engine=loaded.engine,
            sampling=SamplingOptions(**{"temperature": 0.5, "top_k": 9} | defaults),
            max_new_tokens=8,
            stop_ids=frozenset({2}),
            on_refused=lambda *refusal: refused.append(refusal),
        )
        encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        jobs = list(reader.jobs(line + b"\n" for line in encoded))
        assert reader.refused == len(refused)
        return jobs, refused

    return run


def test_a_line_that_says_nothing_else_gets_the_defaults(read, server):
    (job,), refused = read({"prompt": "Hi"})

    request = job.request
    assert refused == []
    assert (job.number, job.domain, request.id) == (0, None, "line-1")
    rendered = server.target.tokenizer.decode(request.prompt_tokens)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (request.max_new_tokens, request.stop_ids) == (8, frozenset({2}))
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 9)


def test_a_line_has_the_last_word(read):
    own = {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7}
    (job,), _ = read({"id": "a", "domain": "math", "prompt": "Hi", "max_new_tokens": 2, **own})

    assert job.request.sampling == SamplingOptions(**own)
    assert (job.domain, job.request.id, job.request.max_new_tokens) == ("math", "a", 2)


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

    assert refused == [] and marked.number == 2
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
    "unknown": ({"prompt": "Hi", "temprature": 1, "n": 2}, "unknown keys n, temprature in the line"),
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

    assert [(job.number, job.request.id) for job in jobs] == [(0, "before"), (1, "after")]
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
