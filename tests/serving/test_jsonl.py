"""A file of prompts in, a file of answers out: order, faults, exit codes, memory."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import tyro

from dspark_jax.core.errors import InputError
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.serving.jsonl import ServeConfig, serve_file
from dspark_jax.speculation.schedule import Lagged
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock


def prompts(*lengths: int) -> list[dict]:
    return [
        {"id": f"p{number}", "domain": "ab"[number % 2], "prompt": f"say {number}", "max_new_tokens": length}
        for number, length in enumerate(lengths)
    ]


class TestAnswers:
    def test_a_record(self, serve, server):
        served = serve([{"id": "a", "domain": "math", "prompt": "Hi"}, {"prompt": "Ho", "max_new_tokens": 1}])

        assert served.exit_code == 0
        first, second = served.answers
        assert (
            list(first)
            == "id line sample domain text tokens prompt_tokens finish_reason accepted_length rounds".split()
        )
        assert (first["id"], first["domain"], first["tokens"], first["finish_reason"]) == (
            "a",
            "math",
            8,
            "length",
        )
        assert first["prompt_tokens"] == len("user\nHi\nassistant\n") + 3
        assert first["accepted_length"] >= 1 and 1 <= first["rounds"] <= 7
        assert (second["id"], second["domain"]) == ("line-2", None)
        assert (second["tokens"], second["rounds"], second["accepted_length"]) == (1, 0, None)

    def test_plain_decoding_says_the_same(self, serve):
        lines = prompts(8, 3, 11, 5)

        drafted, plain = serve(lines).answers, serve(lines, drafter="none").answers

        assert [a["text"] for a in drafted] == [a["text"] for a in plain]
        assert {a["accepted_length"] for a in plain} == {1.0}

    def test_an_answer_ends_at_the_end_token_and_does_not_show_it(self, serve, server, monkeypatch):
        decoded = []
        decode = server.target.tokenizer.decode

        def record(ids, **options):
            decoded.append((ids, options))
            return decode(ids, **options)

        monkeypatch.setattr(server.target.tokenizer, "decode", record)
        (whole,) = serve([{"prompt": "Hi"}]).answers
        ((tokens, options),) = decoded
        monkeypatch.setattr(server, "target", dataclasses.replace(server.target, eos_ids=(tokens[3],)))
        (stopped,) = serve([{"prompt": "Hi"}]).answers

        end = tokens.index(tokens[3]) + 1
        assert options == {"skip_special_tokens": True}
        assert stopped["text"] == decode(tokens[: end - 1], skip_special_tokens=True)
        assert (whole["finish_reason"], whole["tokens"]) == ("length", 8)
        assert (stopped["finish_reason"], stopped["tokens"]) == ("stop", end)
        assert decoded[1][0] == tokens[: end - 1]

    def test_lines_with_their_own_options(self, serve):
        lines = prompts(8, 8, 8)
        lines[1] |= {"temperature": 1.5, "top_p": 0.9, "seed": 4}

        first, second = serve(lines).answers, serve(lines, seed=9).answers
        greedy = serve(prompts(8, 8, 8)).answers

        assert first == second  # the only line that draws has its own seed
        assert [a["text"] == b["text"] for a, b in zip(first, greedy, strict=True)] == [True, False, True]

    def test_unicode(self, serve, tmp_path):
        text = "日本 🦜 naïve"
        served = serve([{"id": text, "domain": text, "prompt": text}])

        assert (served.answers[0]["id"], served.answers[0]["domain"]) == (text, text)
        assert text.encode() in (tmp_path / "out.jsonl").read_bytes()
        assert text in served.out  # the table of domains


class TestOrder:
    def test_input(self, serve):
        answers = serve(prompts(14, 2, 9, 1, 5)).answers

        assert [a["id"] for a in answers] == ["p0", "p1", "p2", "p3", "p4"]

    def test_completion(self, serve):
        answers = serve(prompts(14, 2, 2, 1), order="completion").answers

        assert [a["id"] for a in answers] == ["p1", "p2", "p3", "p0"]

    def test_the_same_answers_in_any_order_and_batch(self, serve):
        lines = prompts(14, 2, 9, 1, 5)
        answers = [
            sorted((a["id"], a["text"]) for a in serve(lines, **flags).answers)
            for flags in ({}, {"order": "completion"}, {"slots": 1})
        ]
        assert answers[0] == answers[1] == answers[2]


class TestBadLines:
    def test_are_named_and_the_rest_goes_on(self, serve, tmp_path):
        served = serve(
            [*prompts(3), "{", {"prompt": "x" * 500}, "", {"id": "p0", "prompt": "again"}, {"prompt": "Hi"}]
        )

        assert served.exit_code == 1
        assert [a["id"] for a in served.answers] == ["p0", "line-6"]
        refusals = [line.split("\r")[-1] for line in served.err.splitlines() if "refused:" in line]
        path = tmp_path / "in.jsonl"
        assert [line.partition(": refused: ")[0] for line in refusals] == [f"{path}:{n}" for n in (2, 3, 5)]
        assert "2 answered, 3 refused" in served.out
        side = [json.loads(line) for line in (tmp_path / "out.jsonl.rejected.jsonl").read_text().splitlines()]
        assert [record["line"] for record in side] == [2, 3, 5]
        assert side[0]["text"] == "{" and "not JSON" in side[0]["reason"]

    def test_only_bad_lines(self, serve):
        served = serve(["[]"])

        assert (served.exit_code, served.answers) == (1, [])

    def test_an_empty_file(self, serve):
        served = serve([])

        assert (served.exit_code, served.answers) == (0, [])
        assert "0 answered" in served.out


def test_lines_are_read_as_slots_free_up(serve, monkeypatch):
    """Constant memory: the file may have any number of lines."""
    checked = most_ahead = answered = 0
    check, step = Engine.check, Engine.step

    def counted_check(engine, request):
        nonlocal checked
        checked += 0.5  # once when the line is read, once when it is submitted
        return check(engine, request)

    def counted_step(engine):
        nonlocal answered, most_ahead
        most_ahead = max(most_ahead, checked - answered)
        finished = step(engine)
        answered += len(finished)
        return finished

    monkeypatch.setattr(Engine, "check", counted_check)
    monkeypatch.setattr(Engine, "step", counted_step)

    served = serve(prompts(*(n % 4 + 1 for n in range(40))), slots=2)

    assert len(served.answers) == 40
    assert most_ahead == 2


class TestReport:
    def test_totals_are_those_of_the_answers(self, serve):
        served = serve(prompts(8, 3, 11))

        figures = dict(line.split(None, 1) for line in served.out.splitlines() if line.startswith("tokens"))
        assert int(figures["tokens"]) == sum(a["tokens"] for a in served.answers) == 22
        rounds = sum(a["rounds"] for a in served.answers)
        accepted = sum((a["accepted_length"] - 1) * a["rounds"] for a in served.answers)
        assert f"{1 + accepted / rounds:.2f} in {rounds} rounds" in served.out
        assert "accepted up to position" in served.out
        assert served.out.rstrip().endswith("out.jsonl")

    def test_progress(self, serve):
        err = serve(prompts(8, 3)).err

        assert all(part in err for part in ("2/2", "tokens/s", "accepted length", "rows/step"))


class TestConfig:
    def test_policies(self):
        def policy(**flags):
            return ServeConfig(input="in", output="out", **flags).policy

        assert policy() == Lagged()
        assert policy(scheduler="full") == FullBlock()
        assert policy(verify_tokens=0) == FixedLength(length=0)
        assert policy(confidence_threshold=0.3) == ConfidenceThreshold(threshold=0.3)
        with pytest.raises(InputError, match="verify_tokens and confidence_threshold"):
            policy(verify_tokens=2, confidence_threshold=0.3)

    @pytest.mark.parametrize(
        ("flags", "generation", "expected"),
        [
            ({}, {}, {"temperature": 0.0}),
            ({}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}),
            ({}, {"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
            ({}, {"do_sample": True}, {"temperature": 1.0}),
            (
                {},
                {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]},
                {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
            ),
            ({}, {"do_sample": True, "top_k": None}, {"temperature": 1.0}),
            (
                {"temperature": 0.2, "top_k": 0, "min_p": 0.1},
                {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
                {"temperature": 0.2, "top_k": 0, "top_p": 0.95, "min_p": 0.1},
            ),
            ({"top_p": 0.9, "seed": 3}, {}, {"temperature": 0.0, "top_p": 0.9, "seed": 3}),
        ],
        ids=str,
    )
    def test_sampling_defaults(self, flags, generation, expected):
        config = ServeConfig(input="in", output="out", **flags)

        assert config.sampling(generation) == SamplingOptions(**expected)

    def test_a_missing_input(self, server, tmp_path):
        with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file"):
            serve_file(ServeConfig(input=f"{tmp_path}/nowhere.jsonl", output=f"{tmp_path}/out.jsonl"))
        assert os.listdir(tmp_path) == []

    def test_an_impossible_limit(self):
        with pytest.raises(InputError, match="max_new_tokens=0"):
            ServeConfig(input="in", output="out", max_new_tokens=0)

    @pytest.mark.parametrize("shard", ["", "1", "2/2", "-1/2", "0/0", "a/b"])
    def test_an_impossible_shard(self, shard):
        with pytest.raises(InputError, match="i/n with 0 <= i < n"):
            ServeConfig(input="in", output="out", shard=shard)

    def test_flags(self):
        args = "--input a --output b --temperature 0.5 --verify-tokens 2 --order completion --drafter none"
        args += " --stop a b --resume"
        config = tyro.cli(ServeConfig, args=args.split())

        assert config.policy == FixedLength(length=2)
        assert (config.temperature, config.order, config.drafter) == (0.5, "completion", "none")
        assert (config.stop, config.resume) == (("a", "b"), True)
