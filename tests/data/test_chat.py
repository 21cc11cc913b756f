"""Loss masks: the answers and their end-of-turn tokens, in every template, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.core.errors import InputError
from dspark_jax.data.chat import ChatTemplate
from dspark_jax.testing.tokenizer import CHATML, tiny_tokenizer

# As Qwen3: without thinking, the generation prompt ends in empty thoughts, which only the last answer keeps.
EMPTY_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As Gemma: white space around the content is stripped. As Llama 2: a space precedes the end-of-turn token.
STRIPPING = CHATML.replace("message['content']", "message['content'] | trim")
# As Gemma 4: turns of its own marks, and an empty thought that only the generation prompt has.
EMPTY_CHANNEL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
SPACED = CHATML.replace("<|im_end|>", " <|im_end|>")
TEMPLATES = {
    "chatml": ChatTemplate(tokenizer=tiny_tokenizer()),
    "empty thoughts": ChatTemplate.of(tiny_tokenizer(EMPTY_THOUGHTS)),
    "stripping": ChatTemplate(tokenizer=tiny_tokenizer(STRIPPING)),
    "spaced": ChatTemplate(tokenizer=tiny_tokenizer(SPACED)),
}

# Contents that look like headers, end in marks of other kinds, or are nothing but an emoji.
contents = st.text(st.characters(codec="utf-8", exclude_characters="|"), max_size=12) | st.sampled_from(
    ["a", "assistant", "assistant\n", "<think>", "\n\n", "", " é🙂 ", "user\n"]
)


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("name", TEMPLATES)
@given(texts=st.lists(contents, min_size=2, max_size=6))
def test_exactly_the_answers_are_supervised(name, texts):
    template = TEMPLATES[name]
    messages = conversation(*texts)
    tokens_np, loss_mask_np = template.tokenize_conversation(messages)
    assert tokens_np.dtype == np.int32 and loss_mask_np.dtype == np.bool_

    starts = np.flatnonzero(np.diff(loss_mask_np.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(loss_mask_np.astype(int), append=0) == -1) + 1
    answers = [
        template.tokenizer.decode(tokens_np[start:end].tolist())
        for start, end in zip(starts, ends, strict=True)
    ]
    assert all(answer.endswith("<|im_end|>") for answer in answers)
    expected = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    assert [answer.removesuffix("<|im_end|>").strip() for answer in answers] == expected
    if len(texts) % 2 == 0:  # the last answer begins where serving would ask for it
        assert template.render_prompt(messages[:-1]) == tokens_np[: starts[-1]].tolist()


def test_thoughts_of_earlier_turns_are_not_needed():
    template = TEMPLATES["empty thoughts"]
    tokens_np, loss_mask_np = template.tokenize_conversation(conversation("q", "first", "q", "second"))
    assert template.tokenizer.decode(tokens_np[loss_mask_np].tolist()) == "first<|im_end|>second<|im_end|>"


def test_system_message_is_context():
    template = TEMPLATES["chatml"]
    messages = [{"role": "system", "content": "Be brief."}, *conversation("q", "yes")]
    tokens_np, loss_mask_np = template.tokenize_conversation(messages)
    assert template.tokenizer.decode(tokens_np[loss_mask_np].tolist()) == "yes<|im_end|>"


@pytest.mark.parametrize(
    ("chat_template", "reason"),
    [
        (CHATML.replace("message['content']", "message['content'] | upper"), "content does not follow"),
        ("{{ messages | length }}" + CHATML, "read differently"),
        (CHATML.replace("<|im_end|>", "[end]"), "special end-of-turn token"),
    ],
    ids=["content changed", "beginning changed", "no end of turn"],
)
def test_unsafe_templates_are_refused(chat_template, reason):
    template = ChatTemplate(tokenizer=tiny_tokenizer(chat_template))
    with pytest.raises(InputError, match=reason):
        template.tokenize_conversation(conversation("q", "yes"))


@pytest.mark.parametrize(
    "messages",
    [
        conversation("only a question"),
        [{"role": "assistant", "content": "unasked"}],
        [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}],
        [{"role": "tool", "content": "q"}, {"role": "assistant", "content": "x"}],
        ["hello"],
        [],
    ],
)
def test_bad_conversations_are_refused(messages):
    with pytest.raises(InputError):
        TEMPLATES["chatml"].tokenize_conversation(messages)


def test_what_the_template_itself_refuses_is_bad_input():
    template = ChatTemplate(tokenizer=tiny_tokenizer("{{ raise_exception('no system messages') }}"))
    with pytest.raises(InputError, match="no system messages"):
        template.render_prompt(conversation("q"))


def test_name_states_the_mode():
    assert TEMPLATES["empty thoughts"].name == "chat(enable_thinking=False)"
    assert ChatTemplate.of(tiny_tokenizer(EMPTY_THOUGHTS), thinking=True).name == "chat(enable_thinking=True)"
    assert ChatTemplate.of(tiny_tokenizer()).name == "chat()"  # of one mode


def test_a_template_that_cannot_think_is_not_told_to():
    with pytest.raises(InputError, match="knows no such mode"):
        ChatTemplate.of(tiny_tokenizer(), thinking=True)


@pytest.mark.parametrize("thoughts", [EMPTY_THOUGHTS, EMPTY_CHANNEL], ids=["qwen3", "gemma4"])
def test_without_thinking_the_empty_thoughts_are_prompt_and_not_supervised(thoughts):
    template = ChatTemplate.of(tiny_tokenizer(thoughts))
    prompt = template.tokenizer.decode(template.render_prompt(conversation("q")))
    assert prompt.endswith(("<think>\n\n</think>\n\n", "<|channel>thought\n<channel|>"))
    tokens_np, loss_mask_np = template.tokenize_conversation(conversation("q", "yes"))
    assert template.tokenizer.decode(tokens_np[loss_mask_np].tolist()) == "yes<|im_end|>"


def test_a_tokenizer_without_template_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        ChatTemplate(tokenizer=tokenizer)
