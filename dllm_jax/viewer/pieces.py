"""What each token of an answer shows: pieces which, joined, are the answer's text.

Bytes of one character may lie in several tokens. They are held until it is whole, and it is
shown by the token that completes it, so that an answer is decoded once, from left to right.
"""

import codecs
import json
import re
from typing import NamedTuple

PLAIN, SPECIAL, PART, UNKNOWN, CODE = range(5)
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
LOST = "\ufffd"  # stands for bytes that make no character


class Piece(NamedTuple):
    """What one token shows."""

    text: str
    # PLAIN text; a SPECIAL token, which is no text; PART of a character that a later token
    # completes, the text being its bytes; UNKNOWN: there is no tokenizer; CODE of an image
    kind: int
    id: int


def printable() -> dict[str, int]:
    """Returns the byte behind each character of a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class Pieces:
    """Reads a tokenizer's ids as pieces; without one, each id stands for itself."""

    def __init__(self, tok):
        """tok: a transformers tokenizer, or None."""
        self.tok, self.bytes_of_id = tok, {}
        self.special = set(tok.all_special_ids) if tok is not None else set()
        backend = getattr(tok, "backend_tokenizer", None)
        written = json.loads(backend.to_str()) if backend is not None else {}
        added = written.get("added_tokens") or []
        self.added = {token["id"]: token["content"] for token in added}
        self.special |= {token["id"] for token in added if token["special"]}
        decoder = json.dumps(written.get("decoder"), ensure_ascii=False)
        # A tokenizer that has no decoder puts a blank between tokens, as of a list of words.
        self.between = b" " if written and decoder == "null" else b""
        self.read = self.decoded
        if "ByteLevel" in decoder:
            self.table, self.read = printable(), self.byte_level
        elif "ByteFallback" in decoder or "▁" in decoder:
            self.read = self.sentence_piece

    def of(self, ids: list[int]) -> list[Piece]:
        """Returns a Piece for each id."""
        if self.tok is None:
            return [Piece(str(token), UNKNOWN, token) for token in ids]
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        before = b""
        for token in ids:
            if token in self.special:
                end_of_text(decoder, pieces)
                pieces.append(Piece(self.name(token), SPECIAL, token))
                continue
            data, before = before + self.bytes(token), self.between
            text = decoder.decode(data)
            if data and not text:  # all of it is held
                pieces.append(Piece(data.hex(" "), PART, token))
            else:
                pieces.append(Piece(text, PLAIN, token))
        end_of_text(decoder, pieces)
        return pieces

    def drawn(self, ids: list[int]) -> list[Piece]:
        """Returns a Piece for each id of a drawing, in the order of its rows."""
        return [Piece(str(token), CODE, token) for token in ids]

    def text(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens and the ids of images."""
        kinds = (PLAIN, UNKNOWN)
        if self.tok is not None:
            ids = [token for token in ids if token < len(self.tok)]
        between = " " if self.tok is None else ""
        return between.join(p.text for p in self.of(ids) if p.kind in kinds)

    def name(self, token: int) -> str:
        """Returns what a token is called in its vocabulary."""
        name = self.tok.convert_ids_to_tokens(token)
        return str(token) if name is None else name

    def bytes(self, token: int) -> bytes:
        """Returns the UTF-8 that a token stands for; an id beyond the vocabulary: none."""
        if token not in self.bytes_of_id:
            data = self.added[token].encode() if token in self.added else None
            name = self.tok.convert_ids_to_tokens(token)
            if data is None:
                data = self.read(name, token) if name is not None else LOST.encode()
            self.bytes_of_id[token] = data
        return self.bytes_of_id[token]

    def byte_level(self, name: str, _) -> bytes:
        """Returns the bytes of a token whose characters each stand for one."""
        if all(char in self.table for char in name):
            return bytes(self.table[char] for char in name)
        return name.encode()

    def sentence_piece(self, name: str, _) -> bytes:
        """Returns the bytes of a token that writes blanks as ▁ and lone bytes as <0xE2>."""
        if byte := BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace("▁", " ").encode()

    def decoded(self, _, token: int) -> bytes:
        """Returns what the tokenizer itself makes of one token."""
        return self.tok.decode([token], clean_up_tokenization_spaces=False).encode()


def end_of_text(decoder, pieces: list[Piece]):
    """Lets the last piece show what is held of a character that nothing completes."""
    held = decoder.decode(b"", final=True)
    if held:
        last = pieces[-1]
        text = held if last.kind == PART else last.text + held
        pieces[-1] = Piece(text, PLAIN, last.id)
