"""Text as tokens come equals text at once, and stop strings are found wherever they fall."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dspark_jax.data.detokenize import TextStream
from dspark_jax.testing.tokenizer import tiny_tokenizer

BYTES = tiny_tokenizer()
TEXTS = st.text(st.sampled_from("abé日🦜 \n\N{REPLACEMENT CHARACTER}"), max_size=20)


def byte_tokens(content: bytes) -> list[int]:
    """One token for each byte, whether it is UTF-8 or not."""
    characters = _byte_characters()
    return [BYTES.convert_tokens_to_ids(characters[byte]) for byte in content]


def _byte_characters() -> list[str]:
    """GPT-2's table: the printable character that stands for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def decode(tokens: list[int]) -> str:
    return str(BYTES.decode(tokens, skip_special_tokens=True))


@settings(max_examples=50)
@given(st.one_of(TEXTS.map(str.encode), st.binary(max_size=12)))
def test_text_never_changes_and_ends_right(content):
    stream, before = TextStream(decode), ""
    for number, token in enumerate(byte_tokens(content), start=1):
        stream.push(token)
        whole = decode(byte_tokens(content[:number]))
        assert stream.text.startswith(before)
        assert whole in (stream.text, stream.text + "\N{REPLACEMENT CHARACTER}")
        before = stream.text


@given(TEXTS, TEXTS.filter(bool), TEXTS)
def test_a_stop_string_cuts_exactly(before, stop, after):
    content = before + stop + after
    stream = TextStream(decode, [stop])
    tokens = enumerate(byte_tokens(content.encode()), start=1)
    number = next((number for number, token in tokens if stream.push(token)), None)
    if number is None:
        assert stop.endswith("\N{REPLACEMENT CHARACTER}")  # which looks like a character that is not complete
        return
    assert stream.text == content[: content.index(stop)]
    if not stop.startswith("\N{REPLACEMENT CHARACTER}") and not stop.endswith("\N{REPLACEMENT CHARACTER}"):
        assert number == len(content[: content.index(stop) + len(stop)].encode())  # and not a byte later


def test_a_token_may_hold_the_end_of_a_stop_string_and_half_a_character():
    """The stop string is complete with this token, though the text behind it is not."""
    vocab = {character: number for number, character in enumerate(_byte_characters())}
    half = "".join(_byte_characters()[byte] for byte in b"#" + "é".encode()[:1])
    merged = {**vocab, half: 256}
    backend = Tokenizer(models.BPE(vocab=merged, merges=[]))
    backend.decoder = decoders.ByteLevel()
    stream = TextStream(backend.decode, ["##"])

    assert not stream.push(ord("x"))
    assert not stream.push(ord("#"))
    assert stream.push(256)
    assert stream.text == "x"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["b", "ab"], "xxaby", "xx"),  # both end with the same token: the one that begins first
        (["abc", "b"], "abc", "a"),
        (["aa"], "aaa", ""),
        (["xyz"], "xyxyz", "xy"),
    ],
)
def test_which_stop_string(stops, text, expected):
    stream = TextStream(decode, stops)
    for token in byte_tokens(text.encode()):
        if stream.push(token):
            break
    assert stream.text == expected


def test_a_stop_string_that_was_passed_over_does_not_cut_later():
    """Before min_new_tokens a stop string is text like any other."""
    stream = TextStream(decode, ["ab"])
    stopped = [stream.push(token) for token in byte_tokens(b"abxab")]

    assert stopped == [False, True, False, False, True]
    assert stream.text == "abx"


def test_special_tokens_are_not_text():
    stream = TextStream(decode, ["|im_end|"])
    assert not any(stream.push(token) for token in [*byte_tokens(b"a"), 2, 1, *byte_tokens(b"b")])
    assert stream.text == "ab"


def test_spaces_that_a_decoder_takes_from_the_first_word():
    """Metaspace decoders drop a leading space: words need the one before them as context."""
    backend = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "<s>": 2}, merges=[]))
    backend.decoder = decoders.Metaspace()
    stream = TextStream(lambda tokens: backend.decode(tokens).replace("<s>", ""), ["a b"])

    assert [stream.push(token) for token in (1, 0, 1)] == [False, False, True]
    assert stream.text == "b "


def test_only_a_window_is_decoded():
    longest = 0

    def watched(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    stream = TextStream(watched)
    for token in byte_tokens(("é日🦜a" * 50).encode()):
        stream.push(token)
    assert longest <= 8
    assert stream.text == "é日🦜a" * 50
