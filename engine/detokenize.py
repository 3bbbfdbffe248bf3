"""From a request's tokens to the text that may be shown."""

from __future__ import annotations

from collections.abc import Sequence

from engine.tokenizer import Tokenizer


class TextStream:
    """Decodes tokens as they come, and looks for stop strings.

    What is handed out is final: it never ends within a character, and never with the beginning of a stop string that
    may still be completed. The output ends where the first stop string is complete (of several that are complete at
    the same character, the one that began first counts), however the text is cut into tokens.

    Args:
        tokenizer: the model's.
        stop: stop strings, none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.stream()
        self._stop = stop
        self._longest = max((len(text) for text in stop), default=0)
        self._held = ""  # not handed out yet; holds no whole stop string

    def put(self, token: int) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string ended the output."""
        return self._take(self._decoder.put(token))

    def finish(self) -> tuple[str, bool]:
        """All that was held back, as the tokens have ended; and whether that completed a stop string after all."""
        text, stopped = self._take(self._decoder.finish())
        held, self._held = self._held, ""
        return text + held, stopped

    def _take(self, text: str) -> tuple[str, bool]:
        if not self._stop:
            return text, False
        if not text:
            return "", False
        known = len(self._held)
        self._held += text
        end = self._first_end(known)
        if end is not None:
            start = end - max(len(s) for s in self._stop if self._held.endswith(s, 0, end))
            shown, self._held = self._held[:start], ""
            return shown, True
        keep = self._partial()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def _first_end(self, known: int) -> int | None:
        """Where the first whole stop string ends, given that none ends within the first `known` characters."""
        ends = []
        for text in self._stop:
            at = self._held.find(text, max(0, known - len(text) + 1))
            if at >= 0:
                ends.append(at + len(text))
        return min(ends, default=None)

    def _partial(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(text.startswith(end) for text in self._stop):
                return length
        return 0
