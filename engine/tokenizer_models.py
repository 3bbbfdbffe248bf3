"""The two ways in which supported models cut text into tokens.

`ByteLevelBPE` is GPT-2's: text is split by regular expressions, each piece becomes bytes, bytes are spelled with
printable characters, and pairs are merged in the order of the merge list (the `tokenizers` library does the work).
`SentencePieceBPE` is SentencePiece's: spaces become U+2581, and of all neighbours that form a piece those with the best
score are merged first. Neither ever yields a control token: those are kept out of the vocabularies that text is matched
against.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

SPACE_MARK = "\u2581"


class TokenType(IntEnum):
    """What a token of a GGUF vocabulary is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: each expression in turn splits the pieces that the one before it left."""

    patterns: tuple[str, ...]
    normalize_nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is taken whole, even if merges would not reach it
    add_bos: bool = False  # when the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

# The expressions are those of the models' own tokenizer definitions.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenizer((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), normalize_nfc=True),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others move up behind U+00FF."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class ByteLevelBPE:
    """Byte-level BPE over a vocabulary, a merge list and a pre-tokeniser."""

    def __init__(
        self, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str] | None, pre: PreTokenizer
    ) -> None:
        if merges is None:
            raise ValueError("a byte-level vocabulary needs a merge list")
        vocabulary: dict[str, int] = {}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            if kind not in (TokenType.CONTROL, TokenType.UNKNOWN):
                vocabulary.setdefault(token, i)
        pairs = []
        for i, merge in enumerate(merges):
            left, _, right = merge.partition(" ")
            if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
                raise ValueError(f"merge {i} is {merge[:80]!r}; its two parts and their union should be tokens")
            pairs.append((left, right))
        self._tokens, self._types = tokens, types
        self._backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.ignore_merges))
        if pre.normalize_nfc:
            self._backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, spelling])

    def encode(self, text: str, *, starts: bool) -> list[int]:
        """The tokens of a run of plain text. Where it starts makes no difference here."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the decoded bytes."""
        text = self._tokens[token]
        if self._types[token] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            return text.encode()
        return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in text)


class SentencePieceBPE:
    """SentencePiece's BPE: characters, merged greedily by the score of the piece that results."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        scores: Sequence[float] | None,
        unknown: int | None,
        prefix: bool,
    ) -> None:
        if scores is None or len(scores) != len(tokens):
            raise ValueError(f"a SentencePiece vocabulary needs a score for each of its {len(tokens)} tokens")
        self._tokens, self._types, self._scores = tokens, types, scores
        self._unknown, self._prefix = unknown, prefix
        self._pieces: dict[str, int] = {}
        self._byte_ids: dict[int, int] = {}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            if kind == TokenType.BYTE:
                self._byte_ids[self._byte_value(token)] = i
            elif kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED):
                self._pieces.setdefault(token, i)
        if unknown is None and len(self._byte_ids) < 256:
            raise ValueError(f"there is no unknown token and only {len(self._byte_ids)} of the 256 byte tokens")

    @staticmethod
    def _byte_value(token: str) -> int:
        if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
            raise ValueError(f"byte token {token[:80]!r} should be spelled like <0x0A>")
        return int(token[3:5], 16)

    def encode(self, text: str, *, starts: bool) -> list[int]:
        """The tokens of a run of plain text.

        Args:
            text: without any token that is matched whole.
            starts: the run is at the start of the text or behind a control token, where the model's training put a
            space.
        """
        text = text.replace(" ", SPACE_MARK)
        if starts and self._prefix:
            text = SPACE_MARK + text
        ids: list[int] = []
        unused: dict[str, tuple[str, str]] = {}
        for piece in self._merge(text, unused):
            self._append(piece, unused, ids)
        return ids

    def _merge(self, text: str, unused: dict[str, tuple[str, str]]) -> list[str]:
        """Merge the best-scored pair of neighbours, the leftmost of equals, until none forms a piece.

        Pieces marked unused take part, and `unused` notes the parts they came from. The symbols are a doubly linked
        list over the characters' indices. A queue entry is stale when either side has changed since; that shows in the
        length of what would result.
        """
        symbols = list(text)
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                union = symbols[left] + symbols[right]
                piece = self._pieces.get(union)
                if piece is not None:
                    heapq.heappush(queue, (-self._scores[piece], left, right, len(union)))
                    if self._types[piece] == TokenType.UNUSED:
                        unused[union] = (symbols[left], symbols[right])

        for i in range(len(symbols) - 1):
            offer(i, i + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]

    def _append(self, piece: str, unused: dict[str, tuple[str, str]], ids: list[int]) -> None:
        """Add the ids of a merged piece: its own, those of its parts (where unused), its bytes, or unknown."""
        token = self._pieces.get(piece)
        if token is not None:
            if piece in unused:
                for part in unused[piece]:
                    self._append(part, unused, ids)
            else:
                ids.append(token)
            return
        if len(self._byte_ids) == 256:
            ids.extend(self._byte_ids[byte] for byte in piece.encode())
        elif self._unknown is not None and ids[-1:] != [self._unknown]:  # one for a run of unknown characters
            ids.append(self._unknown)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the decoded bytes."""
        text, kind = self._tokens[token], self._types[token]
        if kind == TokenType.BYTE:
            return bytes([self._byte_value(text)])
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            return text.encode()
        return text.replace(SPACE_MARK, " ").encode()
