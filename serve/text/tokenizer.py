"""Text ↔ ids, and chats → ids, off the event loop.

The `tokenizers` library does the work: its batch call releases the interpreter lock (its single
call and transformers' wrapper do not) and changes no shared state, so that threads may share it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as Backend

from serve.errors import ConfigError, InvalidRequest, PromptTooLong
from serve.sampling_params import SamplingParams
from serve.text.chat_messages import Message, for_template
from serve.text.chat_template import ChatTemplate
from serve.text.detokenizer import Detokenizer, text_plan
from serve.text.token_bytes import TokenBytes
from serve.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from serve.text.tokenizer_threads import TokenizerThreads
from serve.text.tool_prompt import told_in_words

MAX_CHARS_PER_TOKEN = 32
"""Generous: prose has about 4, code 3. A text with more on average than this is refused unread."""
TEMPLATE_TIME_LIMIT_S = 5.0


class Tokenizer:
    """One model's tokenizer and chat template. `load` reads both from disk.

    `max_model_len`, once it is known, bounds the texts that are encoded: see `check_length`.
    """

    max_model_len: int | None = None

    def __init__(
        self,
        backend: Backend,
        files: TokenizerFiles,
        *,
        template_time_limit_s: float = TEMPLATE_TIME_LIMIT_S,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(files.special_tokens)
        self._templates = {name: _compile(text) for name, text in files.templates.items()}
        self._template_time_limit_s = template_time_limit_s
        self._threads = TokenizerThreads()
        self.tokens = TokenBytes(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_id: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self._adds_bos = backend.encode("").ids[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """From a model folder or a .gguf file. `chat_template`, a file or the text itself, replaces
        the model's own. Raises ConfigError."""
        backend, files = read_tokenizer_files(path)
        if chat_template is not None:
            text = _template_text(chat_template)
            files = TokenizerFiles(files.special_tokens, {"default": text})
        return cls(backend, files)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered without a template of the request's own."""
        return bool(self._templates)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in it count as such; one that begins with the
        BOS keeps a single one. Raises PromptTooLong before any time is spent on it."""
        (token_ids,) = await self.encode_all([text], add_special_tokens)
        return token_ids

    async def encode_all(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of each text; together they count as one long text, however short each is."""
        for text in texts:
            self.check_length(text, "prompt")
        return await self._threads.run(
            lambda: [self.encode_now(text, add_special_tokens) for text in texts], texts
        )

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; the same as a stream of them would give."""
        return await self._threads.run(
            lambda: self.decode_now(token_ids, skip_special_tokens), token_ids
        )

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """`token_text` of each."""
        return await self._threads.run(lambda: [*map(self.token_text, token_ids)], token_ids)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat, tokenized without further special tokens, since templates write them.

        `continue_final_message` leaves the last message open to be continued. Raises InvalidRequest
        for messages or a template that cannot be rendered, with the template's own words.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }

        def work() -> list[int]:
            template = self._template(chat_template, has_tools=bool(tools))
            plain = for_template(messages, template)
            if tools and not template.knows_tools:
                plain = told_in_words(plain, tools)
            render = self._render_open if continue_final_message else self._render
            text = render(template, plain, variables)
            self.check_length(text, "messages")
            return self.encode_now(text, add_special_tokens=False)

        return await self._threads.run(work, messages, variables)

    def check_length(self, text: str, param: str) -> None:
        """Raises PromptTooLong for a text that could not fit into the context."""
        limit = self.max_model_len
        if limit is not None and len(text) > limit * MAX_CHARS_PER_TOKEN:
            raise PromptTooLong(
                f"The text has {len(text)} characters; this model accepts {limit} tokens, "
                f"completion included, and no text of more than {limit * MAX_CHARS_PER_TOKEN} "
                "characters is read. Shorten it.",
                param=param,
            )

    def encode_now(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` on the caller's own thread."""
        try:
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                "The text is not valid Unicode: it holds half of a surrogate pair."
            ) from error
        except Exception as error:  # the library raises nothing more special
            raise InvalidRequest(
                f"The model's tokenizer cannot encode this text ({str(error)[:200]})."
            ) from error
        ids: list[int] = encoding.ids
        doubled = add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    def decode_now(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """`decode` on the caller's own thread."""
        sampling = SamplingParams(skip_special_tokens=skip_special_tokens)
        plan = text_plan(self.tokens, sampling)
        return Detokenizer(plan).push(token_ids, final=True).text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds within a text; b"" for an unknown id."""
        return self.tokens.inside[token_id]

    def token_text(self, token_id: int) -> str:
        """The token for people; parts of characters as OpenAI shows them: `bytes:\\xe2\\x82`."""
        token = self.tokens.inside[token_id]
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def _template(self, text: str | None, *, has_tools: bool) -> ChatTemplate:
        if text is not None:
            try:
                return ChatTemplate(text)
            except jinja2.TemplateError as error:
                raise InvalidRequest(
                    f"chat_template has an error: {error.message}", param="chat_template"
                ) from error
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot take messages. Start the server "
                "with --chat-template FILE, or use /v1/completions with a plain prompt.",
                param="messages",
            )
        return template

    def _render(
        self, template: ChatTemplate, messages: list[Message], variables: Mapping[str, Any]
    ) -> str:
        return template.render({**variables, "messages": messages}, self._template_time_limit_s)

    def _render_open(
        self, template: ChatTemplate, messages: list[Message], variables: Mapping[str, Any]
    ) -> str:
        """Render with a mark after the last message's text, and keep what is before the mark."""
        mark = uuid.uuid4().hex
        content = messages[-1]["content"]
        marked: str | list[dict[str, str]]
        if isinstance(content, str):
            marked = content + mark
        else:
            marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
        last = {**messages[-1], "content": marked}
        text = self._render(template, [*messages[:-1], last], variables)
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "continue_final_message: the chat template does not show the last message.",
                param="continue_final_message",
            )
        return before

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _compile(text: str) -> ChatTemplate:
    try:
        return ChatTemplate(text)
    except jinja2.TemplateError as error:
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"The chat template has an error{where}: {error.message}. Correct it, or give another "
            "with --chat-template FILE."
        ) from error


def _template_text(chat_template: str) -> str:
    """A file's content, or the argument itself when it looks like Jinja."""
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {chat_template[:200]}: not a readable file ({error}), nor Jinja text."
        ) from error
