"""The expressions by which known pre-tokenizers cut text into words."""

from __future__ import annotations

# `ByteLevel` uses that of GPT-2. Llama 3's differs from Qwen's in digits. Qwen 3.5's includes the marks of letters.
# Seed-OSS leaves the ends of lines behind a sign to the next word. Mistral's Tekken and OpenAI's o200k begin a new word
# where a small letter precedes a capital one; o200k keeps an English ending, as in "don't", with its word.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35 = QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
SEED = QWEN.replace(r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*", r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+")
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*")
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}{_REST}"
O200K = rf"{_WORDS[0]}{_ENDING}|{_WORDS[1]}{_ENDING}|\p{{N}}{{1,3}}{_REST}"
