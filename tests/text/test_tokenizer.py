"""Text and chats to ids and back, and the files they come from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from tokenizers.models import WordLevel

from serve.errors import ConfigError, InvalidRequest
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_files import TokenizerFiles
from tests.text.tiny_tokenizers import CHATML, byte_level, sentencepiece, served

WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


def llama_style(template: str | None = WITH_BOS) -> Tokenizer:
    """Adds a BOS by itself, and its template prints one too."""
    backend = sentencepiece()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return served(backend, template=template, bos_token="<s>", eos_token="</s>")


async def chat(tokenizer: Tokenizer, messages: Any = HI, **options: Any) -> str:
    """The chat's text with its special tokens."""
    return await tokenizer.decode(
        await tokenizer.apply_chat_template(messages, **options), skip_special_tokens=False
    )


# ---------------------------------------------------------------------- BOS


async def test_tpl_01_a_chat_has_exactly_one_bos() -> None:
    tokenizer = llama_style()
    token_ids = await tokenizer.apply_chat_template(HI)
    assert token_ids[0] == tokenizer.bos_token_id
    assert token_ids.count(tokenizer.bos_token_id) == 1


async def test_tpl_01_a_plain_prompt_gets_one_bos_also_when_it_brings_its_own() -> None:
    tokenizer = llama_style()
    plain, own = await tokenizer.encode("hello"), await tokenizer.encode("<s>hello")
    assert plain.count(tokenizer.bos_token_id) == own.count(tokenizer.bos_token_id) == 1
    assert plain[0] == own[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in await tokenizer.encode("hello", add_special_tokens=False)


async def test_a_tokenizer_that_adds_no_bos_leaves_a_written_one_alone() -> None:
    tokenizer = served(bos_token="<|end|>")
    assert len(await tokenizer.encode("<|end|><|end|>")) == 2


# ---------------------------------------------------------------------- templates


async def test_a_chat_is_rendered_and_opens_the_answer() -> None:
    assert await chat(served()) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    closed = await chat(served(), add_generation_prompt=False)
    assert closed == "<|im_start|>user\nhi<|im_end|>\n"


async def test_the_last_message_can_be_left_open() -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = await chat(served(), messages, **options)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
    with pytest.raises(InvalidRequest, match="exclude"):
        await served().apply_chat_template(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not show"):
        await served(template="nothing").apply_chat_template(messages, **options)


async def test_tpl_04_without_a_template_a_chat_says_how_to_give_one() -> None:
    tokenizer = served(template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="--chat-template"):
        await tokenizer.apply_chat_template(HI)
    assert await tokenizer.encode("hello")
    assert await chat(tokenizer, chat_template="{{ messages[0].content }}") == "hi"


async def test_tpl_05_a_developer_reads_as_a_system() -> None:
    as_developer = await chat(served(), [{"role": "developer", "content": "be brief"}, *HI])
    assert as_developer == await chat(served(), [{"role": "system", "content": "be brief"}, *HI])


async def test_tpl_06_parts_give_the_ids_of_the_joined_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "user", "assistant", "tool"):
        joined = await chat(served(), [{"role": role, "content": "ab"}])
        assert await chat(served(), [{"role": role, "content": parts}]) == joined


async def test_template_variables_and_tools_arrive() -> None:
    template = "{{ eos_token }}{{ tools | length if tools else 'none' }}{{ mood }}"
    tokenizer = served(template=template, eos_token="<|end|>")
    assert await chat(tokenizer, template_kwargs={"mood": "glad"}) == "<|end|>noneglad"
    assert await chat(tokenizer, tools=[{"type": "function"}]) == "<|end|>1"


async def test_the_tool_template_is_used_when_there_are_tools() -> None:
    files = TokenizerFiles({}, {"default": "plain", "tool_use": "tools"})
    tokenizer = Tokenizer(byte_level(), files)
    assert await chat(tokenizer) == "plain"
    assert await chat(tokenizer, tools=[{}]) == "tools"


async def test_a_broken_template_of_a_request_is_the_requests_error() -> None:
    with pytest.raises(InvalidRequest) as error:
        await served().apply_chat_template(HI, chat_template="{% if %}")
    assert error.value.param == "chat_template"
    deep = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
    with pytest.raises(InvalidRequest, match="chat_template has an error: Recursion") as error:
        await served().apply_chat_template(HI, chat_template=deep)
    assert error.value.param == "chat_template"
    assert "\n" not in str(error.value)


async def test_sec_45_a_models_own_template_neither_hangs_nor_breaks_the_start(
    tmp_path: Path,
) -> None:
    folder = saved_folder(tmp_path)
    own = folder / "chat_template.jinja"
    own.write_text("{{ 9**(9**8) % 7 }}")
    with pytest.raises(InvalidRequest, match="asks for too much"):
        await Tokenizer.load(folder).apply_chat_template(HI)
    parentheses = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
    for broken in (parentheses, "{% for a in b %}" * 30, "x" * 10**6):
        own.write_text(broken)
        with pytest.raises(ConfigError, match="The chat template has an error") as error:
            Tokenizer.load(folder)
        assert "\n" not in str(error.value)


def test_tpl_04_a_broken_template_file_is_a_start_error(tmp_path: Path) -> None:
    folder = saved_folder(tmp_path)
    broken = tmp_path / "broken.jinja"
    broken.write_text("line one\n{% if %}")
    with pytest.raises(ConfigError, match="line 2"):
        Tokenizer.load(folder, str(broken))
    with pytest.raises(ConfigError, match="not a readable file"):
        Tokenizer.load(folder, str(tmp_path / "missing.jinja"))


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize("text", ["half \ud83d", "\udc00"])
async def test_half_a_surrogate_pair_is_the_requests_error(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        await served().encode(text)
    with pytest.raises(InvalidRequest, match="surrogate"):
        await served().apply_chat_template([{"role": "user", "content": text}])


async def test_a_text_that_the_vocabulary_has_no_token_for_is_the_requests_error() -> None:
    backend = Backend(WordLevel({"a": 0}, unk_token="[UNK]"))  # which is not there
    with pytest.raises(InvalidRequest, match="cannot encode this text"):
        await served(backend).encode("b")


async def test_log_06_tokens_have_text_for_people_and_bytes_for_machines() -> None:
    tokenizer = served()
    token_ids = await tokenizer.encode("é€", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == "é€"
    assert [tokenizer.token_text(i) for i in token_ids] == [
        "é",
        "bytes:\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
    ]
    assert tokenizer.token_text(tokenizer.max_token_id) == "<think here>"


async def test_ops_11_the_event_loop_runs_on_while_megabytes_are_tokenized() -> None:
    tokenizer = served()
    turns = 0
    encoding = asyncio.create_task(tokenizer.encode("hello world " * 100_000))
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    assert len(await encoding) > 100_000


async def test_two_threads_share_one_tokenizer() -> None:
    tokenizer = llama_style()
    texts = [f"hello {'a' * i}" for i in range(50)]
    expected = [tokenizer.encode_now(text) for text in texts]
    assert await asyncio.gather(*map(tokenizer.encode, texts)) == expected


# ---------------------------------------------------------------------- files


def saved_folder(folder: Path, **config: Any) -> Path:
    """A model folder with a tokenizer.json, as transformers writes it."""
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    (folder / "config.json").write_text("{}")
    return folder


async def test_a_folder_gives_tokenizer_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved_folder(tmp_path, chat_template=CHATML))
    assert tokenizer.eos_token_id == tokenizer.encode_now("<|end|>")[0]
    assert tokenizer.bos_token_id is None
    assert await chat(tokenizer) == await chat(served())


async def test_a_template_given_as_file_or_text_replaces_the_models_own(tmp_path: Path) -> None:
    folder = saved_folder(tmp_path, chat_template=CHATML)
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0].content }}")
    assert await chat(Tokenizer.load(folder, str(file))) == "mine hi"
    assert await chat(Tokenizer.load(folder, "text {{ messages[0].content }}")) == "text hi"


async def test_chat_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = saved_folder(tmp_path, chat_template=CHATML)
    messages = [{"role": "system", "content": "sé"}, *HI]
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert await Tokenizer.load(folder).apply_chat_template(messages) == expected


@pytest.mark.parametrize("content", [None, "{", ""])
def test_ops_13_a_folder_without_a_readable_tokenizer_is_a_config_error(
    tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.load(tmp_path)
