"""Makes generation.json and generation.npz beside this file, for tests/test_generation.py: what transformers computes.

    python tests/goldens/make_generation.py

`smollm2`: the SmolLM2 GGUF file, dequantised to float32. For each prompt its ids, 64 greedy tokens (the end of a turn
does not stop them), the two best tokens and logits of every step, and all logits of the first step. `tiny`: one small
model of each architecture as tests/gguf_files.py writes it, and all logits of a sequence that is longer than the
sliding window. Logits have their 8 lowest mantissa bits cleared (a relative error below 2e-5), so that they compress.
Needs transformers and accelerate.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.models import resolve
from tests.gguf_files import tiny_model, write_model

FOLDER = Path(__file__).parent
STEPS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "<|im_start|>user\nWhy is the sky blue? Answer in two sentences.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nNenne drei Flüsse in Europa und sag etwas über jeden.<|im_end|>\n<|im_start|>assistant\n",
]
# What transformers 5 does not read from a file and takes for granted: Qwen 3's head width, and that Gemma 3 scales its
# attention by 256 ** -0.5.
TINY = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 128}, "gemma3": {"head_dim": 256}}
TINY_TOKENS = 24


def load(path: Path) -> torch.nn.Module:
    """A GGUF file as a transformers model in float32."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


def rounded(logits: torch.Tensor) -> np.ndarray:
    """Logits with the 8 lowest bits of their mantissas cleared."""
    return ((logits.float().numpy().view(np.uint32) + np.uint32(0x80)) & np.uint32(0xFFFFFF00)).view(np.float32)


def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[dict, torch.Tensor]:
    """STEPS greedy tokens behind `ids`, the two best of each step, and the logits of the first step."""
    inputs, cache, best, first = torch.tensor([ids]), None, [], None
    for _ in range(STEPS):
        out = model(inputs, past_key_values=cache, use_cache=True)
        logits, cache = out.logits[0, -1], out.past_key_values
        first = logits if first is None else first
        top = logits.topk(2)
        best.append((top.indices.tolist(), [round(v, 5) for v in top.values.tolist()]))
        inputs = top.indices[:1][None]
    found = {"prompt_ids": ids, "tokens": [tokens[0] for tokens, _ in best]}
    return found | {"second": [tokens[1] for tokens, _ in best], "logits": [values for _, values in best]}, first


def smollm2(arrays: dict[str, np.ndarray]) -> list[dict]:
    """The real model's part; first-step logits go into `arrays`."""
    path = resolve("smollm2")
    model = load(path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    entries = []
    for i, prompt in enumerate(PROMPTS):
        entry, first = greedy(model, tokenizer(prompt)["input_ids"])
        entries.append({"prompt": prompt} | entry)
        arrays[f"smollm2_{i}"] = rounded(first)
        print(repr(tokenizer.decode(entry["tokens"])))
    return entries


def tiny(arrays: dict[str, np.ndarray]) -> dict[str, dict]:
    """The small models' part; logits go into `arrays`."""
    entries = {}
    for architecture, changes in TINY.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            weights = write_model(path, tiny_model(architecture, **changes))
            model = load(path)
        vocabulary = len(weights["embedding.weight"])
        ids = np.random.default_rng(5).integers(5, vocabulary, TINY_TOKENS).tolist()
        logits = model(torch.tensor([ids])).logits[0]
        entries[architecture] = {"changes": changes, "ids": ids}
        arrays[f"tiny_{architecture}"] = rounded(logits)
    return entries


def main() -> None:
    """Writes both files."""
    arrays: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        goldens = {"smollm2": smollm2(arrays), "tiny": tiny(arrays)}
    np.savez_compressed(FOLDER / "generation.npz", **arrays)
    (FOLDER / "generation.json").write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
