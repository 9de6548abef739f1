"""Pieces: joined they are the text, whatever bytes tokens have cut it into."""

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models

from dllm_jax import data
from dllm_jax.viewer import pieces
from dllm_jax.viewer.pieces import PART, PLAIN, SPECIAL, UNKNOWN
from tests.viewer.common import MODEL

TEXTS = [
    "a",
    "",
    "two words",
    "\n\nx",
    "é",
    "日本",
    "🙂",
    "👩‍👩‍👧",
    "שלום",
    "</script>",
    "\u202eabc",
]


def fast(vocab: list[str], decoder):
    """Returns a transformers tokenizer with these tokens, the last of them special."""
    table = {name: i for i, name in enumerate(vocab)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=table, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens([vocab[-1]])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def byte_level():
    """A vocabulary of the 256 bytes, as GPT-2 writes them, and an end."""
    signs = {byte: char for char, byte in pieces.printable().items()}
    return fast([signs[i] for i in range(256)] + ["<end>"], decoders.ByteLevel())


@pytest.fixture(scope="module")
def sentence_piece():
    """A vocabulary of lone bytes, a word with its blank, and an end."""
    vocab = [f"<0x{i:02X}>" for i in range(256)] + ["▁the", "<end>"]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return fast(vocab, decoders.Sequence(steps))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_pieces_joined_are_the_text(kind, text, request):
    tok = request.getfixturevalue(kind)
    ids = [*text.encode()]
    told = pieces.Pieces(tok).of(ids)
    assert "".join(piece.text for piece in told if piece.kind == PLAIN) == text
    assert [piece.id for piece in told] == ids
    assert text == tok.decode(ids, clean_up_tokenization_spaces=False)


def test_words_of_a_tokenizer_without_a_decoder_stand_apart():
    """As its own texts have them, such as those of examples/pictures."""
    tok, ids = fast(["a", "red", "}", "<end>"], None), [0, 1, 3, 2]
    told = pieces.Pieces(tok)
    assert [piece.text for piece in told.of(ids)] == ["a", " red", "<end>", " }"]
    assert told.text(ids) == tok.decode(ids, skip_special_tokens=True) == "a red }"


class Slow:
    """A tokenizer that nobody has written in Rust, which no file tells the parts of."""

    all_special_ids = (0,)

    def convert_ids_to_tokens(self, token: int) -> str:
        """Returns a token's name."""
        return "<end>" if token == 0 else f"w{token}"

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        """Returns a text, whose blanks are tokens' own."""
        return "".join(f" word{token}" for token in ids)

    def __len__(self):
        return 9


def test_a_tokenizer_that_tells_no_parts_decodes_each_token():
    told = pieces.Pieces(Slow())
    assert told.text([3, 0, 4, 9]) == " word3 word4"  # the last one is an image's


def test_parts_of_words_are_joined_as_their_decoder_says():
    tok = fast(["play", "##ing", "<end>"], decoders.WordPiece())
    told = [piece.text for piece in pieces.Pieces(tok).of([0, 2])]
    assert told == [tok.decode([0]), "<end>"]


def test_a_character_is_shown_by_the_token_that_completes_it(byte_level):
    ids = [*"a🙂b".encode(), 256]
    told = pieces.Pieces(byte_level).of(ids)
    assert [(piece.text, piece.kind) for piece in told] == [
        ("a", PLAIN),
        ("f0", PART),
        ("9f", PART),
        ("99", PART),
        ("🙂", PLAIN),
        ("b", PLAIN),
        ("<end>", SPECIAL),
    ]


@pytest.mark.parametrize("end", [[], [256, 97]])
def test_bytes_that_nothing_completes_are_shown_once_as_lost(byte_level, end):
    told = pieces.Pieces(byte_level).of([97, 0xF0, 0x9F, *end])
    assert [(piece.text, piece.kind) for piece in told[:3]] == [
        ("a", PLAIN),
        ("f0", PART),
        (pieces.LOST, PLAIN),
    ]
    assert [piece.text for piece in told[3:]] == ["<end>", "a"][: len(end)]


def test_a_blank_before_a_word_is_kept(sentence_piece):
    told = pieces.Pieces(sentence_piece)
    assert told.text([256, 256, 257]) == " the the"


def test_the_bundled_tokenizer_says_the_same():
    tok = data.tokenizer(MODEL)
    ids = [8, 31, 25, 32, 102, 2]
    told = pieces.Pieces(tok)
    assert told.text(ids) == tok.decode(ids, skip_special_tokens=True) == "\\boxed{607}"
    assert [piece.kind for piece in told.of(ids)] == [PLAIN] * 5 + [SPECIAL]
    assert told.of([10**6])[0].text == pieces.LOST  # another model's id


def test_without_a_tokenizer_ids_stand_for_themselves():
    told = pieces.Pieces(None)
    assert told.of([7]) == [pieces.Piece("7", UNKNOWN, 7)]
    assert told.text([7, 8]) == "7 8"
