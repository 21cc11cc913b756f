"""Reading: good rows in order, bad rows named by file and line, a split that never changes."""

import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.data.sources import (
    Example,
    Prompt,
    is_held_out,
    read_conversations,
    read_prompts,
    read_responses,
    read_training_examples,
    split_held_out,
)
from dspark_jax.testing.tokenizer import tiny_tokenizer

SHARED = Path(__file__).parents[3] / "shared"


def response(number: int, **changes) -> dict:
    row = {"id": f"r{number}", "domain": "math", "source": "test", "prompt_ids": [1, 2, number]}
    return row | {"response_ids": list(range(10, 30)), "finish": "stop"} | changes


def write_lines(path: Path, rows: list) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(text.encode())
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_responses_become_examples(tmp_path, name):
    path = write_lines(tmp_path / name, [response(0), "", response(1)])
    examples = read_responses(path)
    assert [example.id for example in examples] == ["r0", "r1"]
    assert examples[1].domain == "math"
    assert examples[1].tokens_np.dtype == np.int32
    assert examples[1].tokens_np.tolist() == [1, 2, 1, *range(10, 30)]
    assert examples[1].loss_mask_np.tolist() == [False] * 3 + [True] * 20


BAD_ROWS = {
    "not JSON": '{"id": ',
    "not a JSON object": "[1]",
    "no text in 'id'": response(0, id=7),
    "no text in 'domain'": response(0, domain=""),
    "'prompt_ids' is not a list": response(0, prompt_ids=[]),
    "'response_ids' is not a list of token ids": response(0, response_ids=[1.5] * 20),
    "is not a list of token": response(0, response_ids=[True] * 20),
    "outside of the vocabulary": response(0, response_ids=[100] * 20),
    "has an id outside": response(0, response_ids=[-1] * 20),
    "inhomogeneous": response(0, response_ids=[[1], [2, 3]]),
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_named_and_skipped(tmp_path, caplog, reason):
    path = write_lines(tmp_path / "rows.jsonl", [response(0), BAD_ROWS[reason], response(1)])
    with caplog.at_level(logging.WARNING):
        examples = read_responses(path, max_bad_share=0.5, vocab_size=100)
    assert [example.id for example in examples] == ["r0", "r1"]
    assert "1 bad rows of 3" in caplog.text
    assert f"{path}:2: " in caplog.text and reason in caplog.text


def test_too_many_bad_rows_are_one_error_that_names_them_all(tmp_path):
    first = write_lines(tmp_path / "first.jsonl", [response(0), "{", response(1)])
    second = write_lines(tmp_path / "second.jsonl.gz", [response(2), response(3, id=None)])
    with pytest.raises(InputError) as caught:
        read_responses([first, second], max_bad_share=0.3)
    assert "2 bad rows of 5" in caught.value.given
    assert f"{first}:2: not JSON" in caught.value.given
    assert f"{second}:2: no text in 'id'" in caught.value.given


def test_a_cut_gzip_file_keeps_its_beginning(tmp_path, caplog):
    path = write_lines(tmp_path / "rows.jsonl.gz", [response(n, domain=f"d{n * 7919}") for n in range(2000)])
    path.write_bytes(path.read_bytes()[:-500])
    examples = read_responses(path)
    assert 0 < len(examples) < 2000
    assert f"{path}:{len(examples) + 1}: unreadable" in caplog.text


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_responses(tmp_path / "absent.jsonl")


def test_repeated_ids_are_numbered_and_short_answers_dropped(tmp_path, caplog):
    rows = [response(0), response(0, response_ids=[5] * 13), response(0, response_ids=[6] * 14)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert [example.id for example in read_responses(path)] == ["r0", "r0#2"]
    assert "dropped 1 examples" in caplog.text
    assert len(read_responses(path, min_supervised_tokens=13)) == 3


def test_conversations(tmp_path):
    template = ChatTemplate(tokenizer=tiny_tokenizer())
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a long enough answer"}]
    rows = [
        {"id": "c0", "conversations": turns},
        {"id": "c1", "domain": "code", "conversations": turns},
        {"id": "c2", "conversations": turns[:1]},
        {"id": "c3"},
    ]
    path = write_lines(tmp_path / "chat.jsonl", rows)
    examples = read_conversations(path, template, max_bad_share=0.5)
    assert [(example.id, example.domain) for example in examples] == [("c0", "chat"), ("c1", "code")]
    answer = template.tokenizer.decode(examples[0].tokens_np[examples[0].loss_mask_np].tolist())
    assert answer == "a long enough answer<|im_end|>"


def same(ours: list[Example], theirs: list[Example]) -> None:
    assert [example.id for example in ours] == [example.id for example in theirs]
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our.tokens_np, their.tokens_np)
        np.testing.assert_array_equal(our.loss_mask_np, their.loss_mask_np)


def test_every_kind_of_source_gives_the_same_examples(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [response(number) for number in range(6)]
    data = datasets.Dataset.from_list(rows)
    for name in ("parquet", "lines", "saved"):
        (tmp_path / name).mkdir()
    data.to_parquet(str(tmp_path / "rows.parquet"))
    for part in range(2):
        data.shard(2, part, contiguous=True).to_parquet(str(tmp_path / "parquet" / f"train-{part}.parquet"))
    write_lines(tmp_path / "lines" / "train.jsonl", rows)
    data.save_to_disk(str(tmp_path / "saved"))
    expected = read_responses(write_lines(tmp_path / "rows.jsonl", rows))
    for name in ("rows.parquet", "parquet", "lines", "saved"):
        same(read_responses(tmp_path / name), expected)
    mixed = read_responses([tmp_path / "rows.parquet", tmp_path / "rows.jsonl"])
    assert [example.id for example in mixed] == [f"r{n}" for n in range(6)] + [f"r{n}#1" for n in range(6)]

    # The hub is asked for what has the form of its names and is no path.
    def hub(name, *, split, streaming):
        assert (name, split, streaming) == ("owner/answers", "train_sft", True)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", hub)
    same(read_responses(Path("owner/answers:train_sft")), expected)


def test_what_datasets_cannot_open_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(InputError, match="no such file"):
        read_responses(tmp_path / "absent.parquet")
    with pytest.raises(InputError, match="data set 'nobody/nothing', split 'train'"):
        read_responses("nobody/nothing")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 of another kind")
    with pytest.raises(InputError, match="data set 'parquet'"):
        read_responses(tmp_path / "broken.parquet")
    both = datasets.DatasetDict({"test": datasets.Dataset.from_list([response(0)])})
    both.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match="data set"):
        read_responses(tmp_path / "splits")


def test_conversations_and_responses_in_one_source(tmp_path):
    template, made = ChatTemplate(tokenizer=tiny_tokenizer()), []
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a long enough answer"}]

    def make() -> ChatTemplate:
        made.append(template)
        return template

    mixed = write_lines(tmp_path / "mixed.jsonl", [response(0), {"id": "c", "conversations": turns}])
    same(
        read_training_examples(write_lines(tmp_path / "r.jsonl", [response(0)]), make),
        read_responses(tmp_path / "r.jsonl"),
    )
    assert made == []
    chat = write_lines(tmp_path / "c.jsonl", [{"id": "c", "conversations": turns}] * 2)
    expected = read_responses(tmp_path / "r.jsonl") + read_conversations(chat, template)[:1]
    same(read_training_examples(mixed, make), expected)
    assert len(made) == 1
    with pytest.raises(InputError, match="not a list of token ids"):
        read_training_examples(write_lines(tmp_path / "bad.jsonl", [{"id": "neither"}]), make)


def test_the_split_is_the_one_of_the_shipped_drafter():
    # Recorded: if this fails, prompts that the shipped drafter was trained on are evaluated, or the reverse.
    held_out = [number for number in range(300) if is_held_out(f"prompt-{number}")]
    assert held_out == [11, 41, 68, 84, 292]


@given(st.text(max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_keeps_the_smaller_one(prompt_id, one, other):
    small, large = sorted([one, other])
    assert is_held_out(prompt_id, large) or not is_held_out(prompt_id, small)
    assert is_held_out(f"{prompt_id}#1", one) == is_held_out(prompt_id, one)
    assert not is_held_out(prompt_id, 0.0) and is_held_out(prompt_id, 1.0)


def test_split_parts_are_disjoint_and_complete():
    prompts = [Prompt(id=str(number), domain="d", source="s", text="t") for number in range(2000)]
    training, held_out = split_held_out(prompts, 0.1)
    assert Counter(training + held_out) == Counter(prompts)
    assert 150 < len(held_out) < 250
    assert split_held_out(held_out, 0.1) == ([], held_out)
    assert split_held_out(prompts, 0.1, salt="another")[1] != held_out


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared beside the repository")
def test_real_files():
    examples = read_responses(SHARED / "responses/smollm2_135m/temperature_0.7.jsonl.gz", vocab_size=49152)
    assert len({example.id for example in examples}) == len(examples) > 3000
    assert {example.domain for example in examples} == {"math", "code", "chat", "if"}
    assert all(example.loss_mask_np.sum() >= 14 and not example.loss_mask_np[0] for example in examples)

    prompts = read_prompts([SHARED / f"prompts/{name}" for name in ("if.jsonl", "math.jsonl.gz")])
    assert len({prompt.id for prompt in prompts}) == len(prompts) > 5000
    # Responses to a held-out prompt are held out too, whatever file they come from.
    held_out = {prompt.id for prompt in split_held_out(prompts)[1]}
    assert held_out.isdisjoint(example.id.split("#")[0] for example in split_held_out(examples)[0])
