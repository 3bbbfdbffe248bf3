"""Text to token ids and back, from a model file's own vocabulary."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence

from engine.tokenizer_models import PRE_TOKENIZERS, ByteLevelBPE, SentencePieceBPE, TokenType

# Control tokens with these spellings end a turn in the models that have them, whether or not the file's metadata says
# so.
END_SPELLINGS = frozenset(
    (
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<|end|>",
        "</s>",
        "<eos>",
    )
)


class Tokenizer:
    """A model's vocabulary and the rules for using it.

    Args:
        model: "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE).
        tokens: the spelling of each id.
        token_types: the TokenType of each id; all normal when None.
        scores: the score of each id ("llama" only).
        merges: "left right" in the order of merging ("gpt2" only).
        pre_tokenizer: a key of PRE_TOKENIZERS ("gpt2" only).
        bos_id: the token that starts a text, or None.
        eos_ids: tokens that end a generation; control tokens spelled as in END_SPELLINGS are added.
        unknown_id: the token for text that cannot be spelled, or None.
        add_bos: whether encode() starts a text with bos_id; None takes the habit of the model.
        add_eos: whether encode() ends a text with the first of eos_ids.
        add_space_prefix: whether a text starts with a space of its own ("llama" only); None means yes.

    Raises:
        ValueError: the parts contradict one another or are of an unknown kind.
    """

    def __init__(
        self,
        *,
        model: str,
        tokens: Sequence[str],
        token_types: Sequence[int] | None = None,
        scores: Sequence[float] | None = None,
        merges: Sequence[str] | None = None,
        pre_tokenizer: str = "default",
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        unknown_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
        add_space_prefix: bool | None = None,
    ) -> None:
        types = [int(TokenType.NORMAL)] * len(tokens) if token_types is None else list(token_types)
        _check_vocabulary(tokens, types, {"bos": bos_id, "unknown": unknown_id, **{f"eos {e}": e for e in eos_ids}})
        self.tokens, self._types = tokens, types
        self.bos_id = bos_id
        found = (i for i, t in enumerate(tokens) if types[i] == TokenType.CONTROL and t in END_SPELLINGS)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *found]))
        self._backend: ByteLevelBPE | SentencePieceBPE
        if model == "gpt2":
            pre = PRE_TOKENIZERS.get(pre_tokenizer)
            if pre is None:
                known = ", ".join(PRE_TOKENIZERS)
                raise ValueError(f"pre-tokenizer {pre_tokenizer[:80]!r} is not known; known are {known}")
            self._backend = ByteLevelBPE(tokens, types, merges, pre)
            self._strip_space, default_bos = False, pre.add_bos
        elif model == "llama":
            self._strip_space, default_bos = add_space_prefix is not False, True
            self._backend = SentencePieceBPE(tokens, types, scores, unknown_id, self._strip_space)
        else:
            raise ValueError(
                f"tokenizer model {model[:80]!r} is not known; known are gpt2 (byte-level BPE), llama (SentencePiece)"
            )
        self.add_bos = bos_id is not None and (default_bos if add_bos is None else add_bos)
        self.add_eos = bool(eos_ids) and add_eos
        whole = {t: i for i, t in enumerate(tokens) if types[i] == TokenType.USER_DEFINED and t}
        control = {t: i for i, t in enumerate(tokens) if types[i] == TokenType.CONTROL and t}
        self._whole, self._control = _Literals(whole), _Literals(control)
        self._whole_and_control = _Literals(whole | control)

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return len(self.tokens)

    def is_special(self, token: int) -> bool:
        """Whether an id is a control token, or the unknown token: no part of any text."""
        return self._types[self._checked(token)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        Args:
            text: any text.
            add_special: put BOS in front and EOS behind, where the model's files say so.
            parse_special: let text that spells a control token become that token. Leave it off for text from users:
            then no
                text whatsoever yields a control token.

        Raises:
            ValueError: the text has half a surrogate pair in it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise ValueError(
                f"text has a lone surrogate at character {problem.start}; it should be valid Unicode"
            ) from None
        literals = self._whole_and_control if parse_special else self._whole
        return self._finish(literals.split(text), add_special, add_special)

    def encode_parts(self, parts: Iterable[int | str], *, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The ids of a text that is given as control tokens and plain text in between, as split_control() cuts it.

        `add_bos` and `add_eos` allow what the model's files ask for; they do not force it.
        """
        whole: list[int | str] = []
        for part in parts:
            whole.extend([part] if isinstance(part, int) else self._whole.split(part))
        return self._finish(whole, add_bos, add_eos)

    def split_control(self, text: str) -> list[int | str]:
        """Cut a text at the control tokens that it spells: their ids, and the text in between."""
        return list(self._control.split(text))

    @property
    def control_spellings(self) -> Iterable[str]:
        """The text of each control token."""
        return self._control.ids.keys()

    def _finish(self, parts: Iterable[int | str], add_bos: bool, add_eos: bool) -> list[int]:
        ids: list[int] = []
        starts = True
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                starts = self._types[part] == TokenType.CONTROL
            else:
                ids.extend(self._backend.encode(part, starts=starts))
                starts = False
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_eos and self.add_eos and ids[-1:] != [self.eos_ids[0]]:
            ids.append(self.eos_ids[0])
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD.

        Where the model's texts start with a space of their own, that space is left out behind a BOS. Ids without BOS
        are a continuation and keep theirs.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.put, ids), stream.finish()])

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder that takes ids one at a time; what it returns adds up to decode() of all of them."""
        return StreamDecoder(self, skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for; those of its spelling when it is special."""
        return self._backend.token_bytes(self._checked(token))

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self.tokens):
            raise ValueError(f"token id is {token}; it should be within 0..{len(self.tokens) - 1}")
        return token


class StreamDecoder:
    """Decodes ids as they come, holding back bytes until they make a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = False
        self._count = 0

    def put(self, token: int) -> str:
        """The text that became complete with this id: often a word, sometimes nothing.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        tokenizer = self._tokenizer
        special = tokenizer.is_special(token)
        if special:
            if self._count == 0 and token == tokenizer.bos_id:
                self._drop_space = tokenizer._strip_space
            self._count += 1
            # Half a character before a control token stays half: the two are no neighbours in any text.
            rest = self._utf8.decode(b"", final=True)
            return rest if self._skip_special else rest + tokenizer.token_bytes(token).decode(errors="replace")
        self._count += 1
        data = tokenizer.token_bytes(token)
        if self._drop_space and data:
            data = data[1:] if data.startswith(b" ") else data
            self._drop_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was begun and never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


class _Literals:
    """Finds spellings that are matched whole: the leftmost, and of several there the longest."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        lengths: dict[str, set[int]] = {}
        for literal in ids:
            lengths.setdefault(literal[0], set()).add(len(literal))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order, as ids where a spelling stands and as strings in between."""
        start = position = 0
        while self._first is not None and (candidate := self._first.search(text, position)):
            position = candidate.start()
            for length in self._lengths[text[position]]:
                token = self.ids.get(text[position : position + length])
                if token is not None:
                    if start < position:
                        yield text[start:position]
                    yield token
                    start = position = position + length
                    break
            else:
                position += 1
        if start < len(text):
            yield text[start:]


def _check_vocabulary(tokens: Sequence[str], types: Sequence[int], named: dict[str, int | None]) -> None:
    if not tokens:
        raise ValueError("the vocabulary is empty")
    if len(types) != len(tokens):
        raise ValueError(f"there are {len(types)} token types for {len(tokens)} tokens")
    unknown = set(types) - set(TokenType)
    if unknown:
        raise ValueError(f"token type {min(unknown)} is not known; known are 1 to 6")
    for name, token in named.items():
        if token is not None and not 0 <= token < len(tokens):
            raise ValueError(f"the {name} token is {token}; it should be within 0..{len(tokens) - 1}")
