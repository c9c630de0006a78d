"""Small tokenizers of each kind of decoder, trained in a fraction of a second."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "いろはにほへと ちりぬるを 我が世誰ぞ 常ならむ",
    "emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 — end",
    "  two  spaces   and\n\nlines\tand tabs  ",
] * 4


@cache
def byte_level() -> Tokenizer:
    """BPE over bytes, as GPT-2's, with a special and an added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Unigram with bytes for what it does not know."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    words = ["▁", "▁the", "▁quick", "▁fox", "qu", "ick", "e", "o", "x", "t", "h", "é", "あ", "▁▁", "."]
    vocab = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        *((token, -12.0) for token in byte_tokens),
        *((word, -3.0) for word in words),
    ]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@cache
def llama_style() -> Tokenizer:
    """BPE with bytes for what it does not know, decoded as Llama 2's: one space stripped from the front."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    vocab = {
        token: index
        for index, token in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *"▁abcdefghijklmnopé"])
    }
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """Pieces that are joined by spaces unless they begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["[UNK]", "[SEP]"]),
    )
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "llama_style": llama_style,
    "word_piece": word_piece,
}


def byte_characters() -> list[str]:
    """Return the character that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the tokens of single bytes, for a tokenizer that has them."""
    vocab, characters = tokenizer.get_vocab(), byte_characters()
    return [vocab.get(f"<0x{byte:02X}>", vocab.get(characters[byte], -1)) for byte in data]
