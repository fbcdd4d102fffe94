"""Pieces of text add up to the text, and no character is torn."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from cp_shared_kv.server.detokenizer import StreamDecoder
from cp_shared_kv.server.tokenizer import Tokenizer

BOS = 256
AWKWARD_BYTES = st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xFF, 0x41])


def pieces(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


@given(st.lists(st.lists(AWKWARD_BYTES | st.integers(0, 259), max_size=5), max_size=20))
@settings(max_examples=150, deadline=None)
def test_pieces_add_up_to_the_whole_text(tokenizer, chunks):
    whole = tokenizer.decode([token for chunk in chunks for token in chunk])
    assert "".join(pieces(tokenizer, chunks)) == whole


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_valid_text_never_shows_a_replacement_character_and_is_never_late(tokenizer, text):
    text = text.replace("\ufffd", "")
    decoder = StreamDecoder(tokenizer)
    for character in text:
        *start, last = character.encode()
        assert all(decoder.push([byte]) == "" for byte in start)
        assert decoder.push([last]) == character
    assert decoder.flush() == ""


def test_output_that_is_not_utf8_still_flows(tokenizer):
    decoder = StreamDecoder(tokenizer)
    given_after = [len(decoder.push([0x80])) for _ in range(100)]
    assert sum(given_after) >= 99
    assert decoder.flush() == "\ufffd"
    assert len(decoder._window) <= 4


def test_special_tokens_inside_a_character_do_not_tear_it(tokenizer):
    assert "".join(pieces(tokenizer, [[0xE2, BOS], [0x82, BOS, BOS], [0xAC]])) == "€"


def test_a_decoder_can_be_used_again_after_its_end(tokenizer):
    decoder = StreamDecoder(tokenizer)
    assert decoder.push([0xE2]) + decoder.flush() == "\ufffd"
    assert decoder.push([0x41]) + decoder.flush() == "A"


def sentencepiece_tokenizer() -> tuple[Tokenizer, dict[str, int]]:
    """Words with a leading space mark, and byte tokens for the rest, as in Llama 2."""
    words = ["<unk>", "▁Hello", "▁world", "!", "▁"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend), vocab


def test_byte_fallback_tokenizers_keep_spaces_and_characters():
    tokenizer, vocab = sentencepiece_tokenizer()
    tokens: list[int] = []
    for word in ["▁Hello", "▁", "😀", "你", "é", "▁world", "!", "€"]:
        tokens += [vocab[word]] if word in vocab else [vocab[f"<0x{b:02X}>"] for b in word.encode()]
    assert tokenizer.decode(tokens) == "Hello 😀你é world!€"
    got = pieces(tokenizer, [[token] for token in tokens])
    assert "".join(got) == "Hello 😀你é world!€"
    assert not any("\ufffd" in piece for piece in got)
