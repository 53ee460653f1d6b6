"""The tokenizer and the untrained model of the tiny demo."""

from __future__ import annotations

import json
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from megagent.rollout.tiny_model import CONFIG, END, PAD, VOCABULARY, WHOLE, fresh_weights, train_tokenizer, write_model

TEXTS = [
    (
        "find soft shirt, color red, price below 40\n"
        "click[back to search] [SEP] click[b514] [SEP] soft shirt [SEP] $83.0\n"
    ),
    "<think>need color red</think><action>click[red]</action>",
] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_words_ids_and_prices_are_one_token_each(tokenizer):
    assert tokens(tokenizer, "soft shirt [SEP] $83.0") == ["soft", "Ġshirt", " [SEP] ", "$83.0"]
    assert tokens(tokenizer, "click[b514]") == ["click[", "b514", "]"]


def test_an_option_is_the_same_token_on_the_page_and_in_the_reply(tokenizer):
    page = tokenizer.encode("color [SEP] click[red] [SEP] click[b514] [SEP] $83.0").ids
    for action in ("click[red]", "click[b514]"):
        inside = tokenizer.encode(action).ids
        answer = tokenizer.encode(f"<think>need color red</think><action>{action}</action>").ids
        for sequence in (page, answer):
            assert any(sequence[start : start + len(inside)] == inside for start in range(len(sequence)))


@pytest.mark.parametrize("token", WHOLE)
def test_tags_and_buttons_are_one_token_and_survive_decoding(tokenizer, token):
    ids = tokenizer.encode(token, add_special_tokens=False).ids
    assert len(ids) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == token


@given(text=st.text(max_size=40))
def test_any_text_comes_back_in_unicode_normal_form(tokenizer, text):
    if any(special in text for special in (PAD, END)):
        return
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@given(text=st.text(st.sampled_from("clik[]red <>/thn"), max_size=40))
def test_reply_like_text_comes_back_as_it_went_in(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    assert train_tokenizer(TEXTS).to_str() == tokenizer.to_str()


def test_ids_fit_the_vocabulary_of_the_model(tokenizer):
    assert tokenizer.get_vocab_size() <= VOCABULARY == CONFIG["vocab_size"]
    assert max(tokenizer.get_vocab().values()) < VOCABULARY


def test_padding_and_end_are_the_ids_of_the_config(tokenizer):
    assert tokenizer.token_to_id(PAD) == CONFIG["pad_token_id"]
    assert tokenizer.token_to_id(END) == CONFIG["eos_token_id"]


def test_the_same_seed_gives_the_same_weights():
    one, two, other = fresh_weights(0), fresh_weights(0), fresh_weights(1)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_written_folder_is_one_that_transformers_loads(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path, tokenizer, fresh_weights(0), torch.float32)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXTS[0], add_special_tokens=False) == tokenizer.encode(TEXTS[0]).ids
    assert (loaded.pad_token_id, loaded.eos_token_id) == (CONFIG["pad_token_id"], CONFIG["eos_token_id"])


def test_weights_are_stored_in_the_type_that_the_config_names(tokenizer, tmp_path):
    write_model(tmp_path, tokenizer, fresh_weights(0), torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
