"""Requests of an engine behind the serving loop, and what each is answered alone."""

from dataclasses import dataclass

from bpkv_trt.models.tokenizers import load_tokenizer
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.serving_request import ServingRequest
from build_scripts.recall_text import recall_prompt

OPTIONS = {"budget": "0.25", "interval": 12, "generation_budget": "14t"}  # of the server, in place of the engine's


def asked(number, tokens=90, **options):
    return ServingRequest(**{"text": recall_prompt(number, tokens)[0], "raw": True, "max_tokens": 6, **options})


@dataclass(frozen=True)
class Answer:
    text: str
    finished: str
    entries: tuple[int, int]  # before and after the compaction of the prompt


class Alone:
    """What a request is answered that has an engine, or for greedy ones the torch host, to itself."""

    def __init__(self, place, loaded, endless):
        self.runner, self.loaded, self.words = place.open(**OPTIONS), loaded, load_tokenizer(str(endless))

    def __call__(self, request, stop_tokens=frozenset()):
        prompt = self.prompt(request)
        config = self.runner.configured(request.options)
        sampling = request.sampling(stop_tokens, config.seed)
        if sampling.temperature == 0:
            pool = make_pool(self.loaded, len(prompt) + request.max_tokens, config.page_size)
            generator = Generator(Engine(self.loaded, config, pool))
            answer = generator.add([prompt], sampling)
            generator.generate([answer])
            tokens, events = answer.generated, answer.events
        else:
            *_, (answer,) = self.runner.stream([prompt], sampling, config)
            tokens, events = answer.tokens, answer.events
        main = next(event for event in events if event.regime != "generation")
        entries = main.entries_before, main.entries_after
        return Answer(self.words.encoder.decode(tokens), answer.finished, entries)

    def prompt(self, request):
        return self.loaded.encoder.encode_raw(request.text)
