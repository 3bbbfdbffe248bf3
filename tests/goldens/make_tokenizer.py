"""Makes tokenizer.json beside this file: encodings by other people's tokenisers, for tests/test_tokenizer.py.

    python tests/goldens/make_tokenizer.py

`smollm2` holds what transformers' AutoTokenizer makes of texts with the tokeniser inside the SmolLM2 GGUF file. `spm`
holds two small SentencePiece models (one in the manner of Llama 2, one in the manner of Gemma) that are trained here,
and what SentencePiece makes of the same texts with them. Needs transformers and sentencepiece.
"""

# ruff: noqa: RUF001 - look-alike characters are what is tested
import io
import json
import sys
from pathlib import Path

import sentencepiece
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.models import resolve

TEXTS = [
    "",
    " ",
    "  ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "tab\there\t\ttwo",
    "line\nbreak\n\nparagraph\r\nwindows\n",
    "\n\n\n",
    "   \n  indented\n    more",
    "I'll say it's what they've said; we're done, I'm sure you'd agree. DON'T SHOUT, I'LL HEAR",
    "1 12 123 1234 12345 3.14159 1,000,000 2024-02-29 0x1F 1e-5",
    "x1y22z333",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"key": [1, 2.5, null, true], "s": "a\\nb"}',
    "https://example.org/path?q=a%20b&c=d#frag",
    "e-mail: someone@example.org",
    "naïve café Zürich Ærøskøbing smørrebrød",
    "cafe\u0301 versus caf\u00e9",
    "Привет, как дела? Всё хорошо.",
    "Ελληνικά: καλημέρα",
    "日本語のテキスト、漢字とかな。",
    "中文没有空格，但有标点。",
    "한국어 문장입니다.",
    "العربية من اليمين إلى اليسار",
    "עברית",
    "हिन्दी में एक वाक्य",
    "ภาษาไทย",
    "emoji 😊 and 👩‍👩‍👧‍👦 family, flag 🇩🇪, skin 👍🏽",
    "math ∑ ∫ √2 ≈ 1.414 ≤ ∞, arrows → ⇒",
    "quotes “curly” ‘single’ «guillemets» – dash — em…",
    "½ ² ³ ① Ⅷ ٣ ४",
    "zero\u200bwidth and nbsp\u00a0here\u3000ideographic",
    "\u0000\u0001\u007f control",
    "a" * 40,
    "=" * 30 + " " * 30 + "-" * 30,
    "The quick brown fox jumps over the lazy dog. " * 3,
    "CamelCaseWords and snake_case_words and kebab-case",
    "\U0001f9ff\U000e0001\U0010ffff",
    "<0x0A> <s> </s> <unk> ▁ <table>x</table>",
]
SPECIAL = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "<|im_start|><|im_end|> <|im_start|",
    "<|im_start |>",
]


def smollm2() -> dict:
    path = resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers 5 knows no pre-tokeniser called "smollm" and leaves GPT-2's in place. The model's own tokenizer.json,
    # which is not in the file, splits digits first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return {
        "plain": [[text, encode(text)] for text in TEXTS],
        "special": [[text, encode(text)] for text in SPECIAL],
        "decoded": [tokenizer.decode(encode(text), skip_special_tokens=True) for text in SPECIAL],
    }


def spm(gemma: bool) -> dict:
    """A small model over the licence text and the texts above: pieces with scores and types, and encodings."""
    corpus = (Path(__file__).parents[2] / "LICENSE").read_text().splitlines() + TEXTS * 3
    out = io.BytesIO()
    options = {
        "user_defined_symbols": ["<table>", "</table>", "\n\n"],
        "bos_id": 2,
        "eos_id": 1,
        "pad_id": 0,
        "unk_id": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=out,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        add_dummy_prefix=not gemma,
        num_threads=1,
        minloglevel=2,
        **(options if gemma else {}),
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(model.get_piece_size())
    user_defined = set(options["user_defined_symbols"]) if gemma else set()

    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.id_to_piece(i) in user_defined:
            return 4
        return 6 if model.is_byte(i) else 5 if model.is_unused(i) else 1

    return {
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [round(model.get_score(i), 6) for i in ids],
        "types": [kind(i) for i in ids],
        "bos": model.bos_id(),
        "eos": model.eos_id(),
        "unknown": model.unk_id(),
        "encodings": [[text, model.encode(text)] for text in TEXTS],
        "decoded": [model.decode(model.encode(text)) for text in TEXTS],
    }


if __name__ == "__main__":
    found = {"smollm2": smollm2(), "spm": {"llama": spm(gemma=False), "gemma": spm(gemma=True)}}
    Path(__file__).with_name("tokenizer.json").write_text(
        json.dumps(found, ensure_ascii=True, separators=(",", ":")) + "\n"
    )
