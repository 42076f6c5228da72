"""POST /completion, llama.cpp's own: prompts of text, token ids or both mixed, and answers in its shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio
from attrs import define, field

from adapters.http.answer import usage
from adapters.http.answer.answer_shape import event
from adapters.http.answer.job_stream import Ended, PickedToken, Progress, Said
from adapters.http.apis.api import Api
from adapters.http.apis.openai_answer import named
from adapters.http.apis.openai_completions import encode
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked, Asker
from adapters.http.request.controls import Words, read_controls
from adapters.http.request.sampling_fields import settings_of
from adapters.http.request.unsupported import EMPTY, MISSING, Missing
from adapters.http.wire.error_format import openai_error
from adapters.http.wire.errors import ApiError, context_exceeded, invalid
from adapters.http.wire.fields import Fields, shown
from adapters.text.model_text import Text
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MAX_PROBS = 20
MOST_PARTS = 1024  # texts of one mixed prompt: each is encoded by itself
MOST_FIELDS = 256  # of an answer
KINDS = "a string, an array of token ids and strings (one prompt), or an array of such prompts"
REFUSED: Mapping[str, Missing] = {
    **{name: missing for name, missing in MISSING.items() if name not in {"n_probs", "suffix"}},
    "input_prefix": Missing("is not supported; /v1/completions and a prompt that has it are"),
    "input_suffix": Missing("is not supported: the model only writes on"),
    "post_sampling_probs": Missing("is not supported: `n_probs` are of the logits as the model says them", EMPTY),
    "n_cmpl": Missing("is not supported; send an array of prompts", (1,)),
    "logprobs": Missing("is not supported; use `n_probs`", (*EMPTY, 0)),
}
WORDS = Words(REFUSED, max_tokens=("n_predict", "max_tokens"), choices="", least=0)


async def read(fields: Fields, options: EdgeOptions, text: Text, asker: Asker) -> Asked:
    probs = fields.integer("n_probs", 0, MAX_PROBS)
    controls = read_controls(fields, WORDS, options, text.tokenizer, probs or -1)
    prompt, path = fields.data.get("prompt"), fields.at("prompt")
    several = isinstance(prompt, list) and int not in set(map(type, prompt))
    listed = [plain(one) for one in (prompt if isinstance(prompt, list) and several else [prompt])]
    if not listed or len(listed) > options.max_prompts:
        raise invalid(path, f"must have 1 to {options.max_prompts} prompts, not {len(listed)}")
    paths = [f"{path}[{place}]" if several else path for place in range(len(listed))]
    special = fields.flag("parse_special", True)  # its clients write templates themselves
    how = {"controls": special, "is_disconnected": asker.gone}
    read = [await mixed(one, where, how, text, options) for one, where in zip(listed, paths, strict=True)]
    said = [
        one if isinstance(one, str) else await anyio.to_thread.run_sync(spelt, text.tokenizer, tokens)
        for one, tokens in zip(listed, read, strict=True)
    ]
    wanted = fields.items("response_fields", MOST_FIELDS) or []
    if not all(isinstance(one, str) for one in wanted):
        raise fields.wrong("response_fields", "an array of strings, such as 'generation_settings/n_predict'")
    return Asked(controls, read, paths, echo={"prompts": said, "several": several, "fields": wanted})


def plain(prompt: Any) -> Any:
    """A text may come as an object, which has room for images beside it."""
    match prompt:
        case {"prompt_string": str(text), **others} if not others.get("multimodal_data"):
            return text
    return prompt


async def mixed(prompt: Any, path: str, how: dict[str, Any], text: Text, options: EdgeOptions) -> Tokens:
    """One prompt. What the tokenizer puts before a text (BOS) goes before the whole, where it begins with text."""
    parts = prompt if isinstance(prompt, list) else [prompt]
    if not set(map(type, parts)) <= {str, int} or sum(isinstance(part, str) for part in parts) > MOST_PARTS:
        raise invalid(path, f"must be {KINDS}, with at most {MOST_PARTS} strings in one, not {shown(prompt)}")
    if len(parts) >= options.longest:  # before millions of them are looked at
        raise context_exceeded(len(parts), options.max_ctx, path)
    tokens: list[int] = []
    for place, part in enumerate(parts):
        where = f"{path}[{place}]" if isinstance(prompt, list) else path
        if isinstance(part, str):
            tokens += await encode(part, where, {**how, "start": place == 0}, text, options)
        elif 0 <= part < options.vocab:
            tokens.append(part)
        else:
            raise invalid(where, f"must be a token id from 0 to {options.vocab - 1}, not {shown(part)}")
    return tuple(tokens)


def spelt(tokenizer: Tokenizer, tokens: Tokens) -> str:
    return tokenizer.decode(tokens, special=True)


@define(eq=False)
class LlamaShape:
    """One answer, or one for each of several prompts."""

    id: str
    asked: Asked
    options: EdgeOptions
    tokenizer: Tokenizer
    lines: set[int] = field(factory=set, init=False)  # answers with a line break

    def part(self, index: int, content: str, **more: Any) -> dict[str, Any]:
        self.lines |= {index} if "\n" in content else set()
        tokens = len(self.asked.prompts[index])
        return {"index": index, "content": content, "tokens": [], "id_slot": -1, "tokens_evaluated": tokens, **more}

    def opening(self) -> Iterable[bytes]:
        return ()

    def said(self, said: Said) -> Iterable[bytes]:
        yield event(self.part(said.index, said.text, stop=False, **self.probabilities(said.picks)))

    def progress(self, progress: Progress, elapsed_ms: float) -> Iterable[bytes]:
        told = usage.prompt_progress(progress, elapsed_ms)
        yield event(self.part(progress.index, "", stop=False, prompt_progress=told))

    def heartbeat(self) -> Iterable[bytes]:
        yield event(self.part(0, "", stop=False))

    def ended(self, ended: Ended) -> Iterable[bytes]:
        yield event(self.last(Said(ended.index, ()), ended))

    def closing(self, ended: Sequence[Ended]) -> Iterable[bytes]:  # noqa: ARG002 - each has been told
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield event(openai_error(error))

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> Any:
        answers = [self.last(said.get(one.index, Said(one.index, ())), one) for one in ended]
        return answers if self.asked.echo["several"] else answers[0]

    def last(self, said: Said, ended: Ended) -> dict[str, Any]:
        job, finish = ended.planned.job, ended.closed.finish
        settings = {**settings_of(job.sampling), "seed": job.sampling.seed, "n_predict": job.max_tokens}
        kind = "word" if ended.stop is not None else {"stop": "eos", "length": "limit"}.get(finish, "none")
        told = {
            **self.part(said.index, said.text, stop=True),
            "has_new_line": said.index in self.lines,
            "model": self.asked.controls.model,
            "tokens_predicted": ended.tokens,
            "tokens_cached": ended.closed.report.restored_tokens,
            "generation_settings": settings,
            "prompt": self.asked.echo["prompts"][ended.planned.prompt],
            "truncated": False,
            "stop_type": kind,
            "stopping_word": ended.stop or "",
            **self.probabilities(said.picks),
            "timings": usage.timings(ended),
            "rekindle": usage.rekindle(ended, self.options),
        }
        return chosen(told, self.asked.echo["fields"]) if self.asked.echo["fields"] else told

    def probabilities(self, picks: Sequence[PickedToken]) -> dict[str, Any]:
        if not picks:
            return {}
        told = [
            {
                **named(self.tokenizer, pick.token, pick.logprob[0]),
                "top_logprobs": [named(self.tokenizer, *other) for other in pick.logprob[1]],
            }
            for pick in picks
        ]
        return {"completion_probabilities": told}


def chosen(told: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Of an answer what its client reads; `a/b` is b of a. What is not there is left out."""
    found = dict[str, Any]()
    for path in paths:
        value: Any = told
        for name in path.split("/"):
            value = value.get(name, MISSED) if isinstance(value, Mapping) else MISSED
        if value is not MISSED:
            found[path] = value
    return found


MISSED = object()
LLAMACPP = Api("/completion", "cmpl-", read, LlamaShape)
