"""Real tokenizers of each kind, small enough to be made in a test."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from serve.text.tokenizer import Tokenizer as ServeTokenizer
from serve.text.tokenizer_files import TokenizerFiles

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(extra: list[str] | None = None) -> Tokenizer:
    """GPT-2 kind: every byte is a token (id = position in the sorted alphabet), some merges,
    three special tokens and one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł")]
    words = [*alphabet, *("".join(pair) for pair in merges), *(extra or [])]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think here>", special=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama-2 kind: a mark for spaces, a token for each byte, one leading space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [
        "▁",
        "▁▁",
        "▁▁▁▁",
        *"abcdehlorwxyz.,!",
        "é",
        "▁hello",
        "▁world",
        "▁a",
        "ll",
        "he",
        "\n",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a"), ("l", "l"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """XLNet and T5 kind: spaces vanish from the first token."""
    words = ["<unk>", "▁", "▁hello", "▁world", "lo", "▁▁a", "b", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT kind: `##` glues to the word before, other words get a space."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##ing", "##é", "do", "n", "'", "t", ".", ",", "a"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


def without_decoder() -> Tokenizer:
    """A plain list of words: tokens are joined by spaces."""
    words = ["<unk>", "hello", "world", "x"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "no decoder": without_decoder,
}


def served(
    backend: Tokenizer | None = None, *, template: str | None = CHATML, **special_tokens: str
) -> ServeTokenizer:
    """Our Tokenizer over one of them; by default a byte-level one with a ChatML template."""
    templates = {} if template is None else {"default": template}
    return ServeTokenizer(backend or byte_level(), TokenizerFiles(special_tokens, templates))
