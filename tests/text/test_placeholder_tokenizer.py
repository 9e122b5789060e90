"""Serving from a config.json alone: ids in, placeholders out, text refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve import LLM, SamplingParams
from serve.errors import ConfigError, InvalidRequest
from serve.text.placeholder_tokenizer import PlaceholderTokenizer, load_tokenizer
from tests.e2e.tiny_model import save_tiny_model

SETTINGS = {"device": "cpu", "attention_backend": "reference", "cpu_threads": 1}


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    whole = save_tiny_model(tmp_path_factory.mktemp("whole"), max_model_len=64)
    (folder / "config.json").write_text((whole / "config.json").read_text())
    return folder


def test_ids_are_completed_and_their_text_names_them(config_alone: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
    with LLM(str(config_alone), load_format="dummy", **SETTINGS) as llm:
        (answer,) = llm.generate([[5, 6, 7]], greedy)
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate(["some text"], greedy)

    assert len(answer.token_ids) == 5
    assert answer.text == "".join(f" <{token}>" for token in answer.token_ids)


async def test_chats_and_texts_are_refused_with_the_reason() -> None:
    tokenizer = PlaceholderTokenizer(100)
    refusal = "no tokenizer .* list of token ids"
    with pytest.raises(InvalidRequest, match=refusal):
        await tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    with pytest.raises(InvalidRequest, match=refusal):
        await tokenizer.encode("hi")
    assert await tokenizer.decode([3, 99]) == "<3> <99>"
    assert tokenizer.vocab_size == 100
    assert tokenizer.token_text(7) == " <7>"
    tokenizer.close()


def test_a_tokenizer_that_is_there_is_used(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)

    tokenizer = load_tokenizer(folder, "dummy")

    assert tokenizer.encode_now("ab")
    assert tokenizer.has_chat_template


def test_real_weights_need_a_tokenizer(config_alone: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(config_alone, "auto")


def test_dummy_weights_do_without_the_settings_of_a_tokenizer_that_is_not_there(
    config_alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((config_alone / "config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')

    assert isinstance(load_tokenizer(tmp_path, "dummy"), PlaceholderTokenizer)


@pytest.mark.parametrize("size", [2**31, 0, -5, "many", 1e9, True])
def test_sec_49_an_absurd_number_of_ids_is_refused(tmp_path: Path, size: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))

    with pytest.raises(ConfigError, match=r"config\.json: vocab_size is"):
        load_tokenizer(tmp_path, "dummy")


async def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = PlaceholderTokenizer(4_000_000)  # costs no more than a small one
    assert tokenizer.token_text(3_999_999) == " <3999999>"
    assert await tokenizer.decode([4_000_000, 5]) == "<5>"
    assert tokenizer.max_token_id == 3_999_999
    assert not tokenizer.tokens.knows(4_000_000)
    tokenizer.close()


@pytest.mark.parametrize(
    ("config", "size"),
    [({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 9}}, 9), ({}, None)],
)
def test_the_config_says_how_many_ids_there_are(
    tmp_path: Path, config: dict[str, object], size: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    if size is None:
        with pytest.raises(ConfigError, match="no vocab_size"):
            load_tokenizer(tmp_path, "dummy")
    else:
        assert load_tokenizer(tmp_path, "dummy").vocab_size == size
