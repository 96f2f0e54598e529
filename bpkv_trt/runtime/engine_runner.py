"""An engine with BP-KV in it, run from its folder: token ids in, answers out."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, InputError, quoted
from bpkv_trt.models.failure import told
from bpkv_trt.policies.registry import refuse_idle
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import FinishReason
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.session_conflicts import refuse_size, refuse_tokens
from bpkv_trt.trtllm.built_engine import BuiltEngine
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.settings import EngineSettings
from bpkv_trt.trtllm.sidecar import EngineSidecar
from bpkv_trt.trtllm.stock_package import StockPackage

if TYPE_CHECKING:  # it imports TensorRT-LLM
    from bpkv_trt.runtime.trtllm_session import BpkvSession

NO_END = -1  # in place of a token that ends answers
FAILED = ("Executing TRT engine failed", "Can't allocate new block")  # TensorRT-LLM's words of a step that failed


@dataclass(frozen=True)
class EngineAnswer:
    """Of one prompt, so far or whole."""

    tokens: list[int]  # without the one that ended it
    finished: FinishReason | None  # None while it goes on
    events: list[CompactionEvent]  # once it has ended, with what never came due


class EngineRunner:
    """One engine, and a session that compacts; `session` may be driven by a loop of the user's own."""

    def __init__(self, session: "BpkvSession", kv_cache_type: Any) -> None:
        """kv_cache_type: as TensorRT-LLM's ModelConfig has it."""
        self.session, self.built, self.config = session, session.built, session.config
        self._kv_cache_type = kv_cache_type

    @classmethod
    def open(
        cls,
        folder: Path,
        plugin_lib: Path | None = None,
        options: Mapping[str, Any] | None = None,
        trace: Trace | None = None,
        bounded: bool = False,
    ) -> "EngineRunner":
        """Check that folder, plugin library, TensorRT-LLM and GPU belong together, then load the engine.

        plugin_lib: by default as `PluginLibrary.find` looks for it. options: of BpkvConfig, in place of the engine's.
        bounded: the cache is as large as compactions leave it (`BpkvSession`).
        Raises BpkvError, of the kind that fits.
        """
        folder = Path(folder)
        sidecar = EngineSidecar.read(folder)  # before TensorRT-LLM, whose import may take a minute
        config = configured(sidecar.settings, options or {})
        library = PluginLibrary.find(plugin_lib)
        sidecar.check_library(library)
        stock = StockPackage.find("engines are run by its session")
        stock.check_version()
        device = find_gpu()
        import tensorrt

        sidecar.check_versions({"tensorrt": tensorrt.__version__, "tensorrt_llm": stock.version})
        try:
            built = BuiltEngine.open(folder, sidecar, device)
            library.register(tensorrt)  # TensorRT asks for it when it loads the engine
            return cls._load(folder, built, config, trace, bounded)
        except torch.OutOfMemoryError:
            raise InputError(
                f"The GPU has no room for the engine in {folder}. Free its memory (nvidia-smi shows what holds it), or "
                "use a larger one."
            ) from None

    @classmethod
    def _load(
        cls, folder: Path, built: BuiltEngine, config: BpkvConfig, trace: Trace | None, bounded: bool
    ) -> "EngineRunner":
        from tensorrt_llm.builder import Engine
        from tensorrt_llm.runtime.model_runner import _engine_config_to_model_config

        from bpkv_trt.runtime.trtllm_session import BpkvSession

        try:
            engine = Engine.from_dir(str(folder), 0)
        except OSError as error:
            raise InputError(f"The engine in {folder} cannot be read ({error.strerror}); check its files.") from None
        model_config = _engine_config_to_model_config(engine.config, gpu_weights_percent=1)
        mapping = engine.config.pretrained_config.mapping
        try:
            session = BpkvSession(model_config, engine.engine, mapping, built, config, trace=trace, bounded=bounded)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, RuntimeError) as error:  # by which TensorRT-LLM tells that TensorRT gave it no engine
            raise InputError(
                f"TensorRT does not load the engine in {folder} ({told(error)}); its own lines above say why. An "
                "engine is bound to the kind of GPU that it was built on: build it again on this machine."
            ) from error
        return cls(session, model_config.kv_cache_type)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        on_step: Callable[[list[list[int]]], None] | None = None,
    ) -> list[EngineAnswer]:
        """Answer a batch of prompts, which runs until the last of them has its answer.

        on_step: called after every step with the tokens of every answer so far. Raises as `stream`.
        """
        answers = list[EngineAnswer]()
        with closing(self.stream(prompts, sampling)) as stream:
            for answers in stream:
                if on_step is not None:
                    on_step([answer.tokens for answer in answers])
        return answers

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, config: BpkvConfig | None = None
    ) -> Generator[list[EngineAnswer], None, None]:
        """Answer a batch of prompts: after every step all answers so far, until the last has ended. Whoever closes it
        before ends the batch at that step.

        config: of `configured`, in place of the runner's own. The first step runs all prompts. Raises InputError for a
        prompt without tokens, or a batch that the GPU has no room for, and ConfigError for more than the engine was
        built for, before anything is run; BpkvError where a step fails.
        """
        prompts, config = [_token_ids(prompt) for prompt in prompts], config or self.config
        self.check(prompts, sampling.max_new_tokens, config)
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        packed = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
        given = packed.to(self.session.device), lengths.to(self.session.device), sampling_config(sampling)
        self.session.config = config
        try:
            self._set_up(len(prompts), int(lengths.max()), sampling.max_new_tokens)
            with self._step():
                words = stop_words(sampling, len(prompts))
                outputs = self.session.decode(*given, stop_words_list=words, streaming=True)
            with closing(outputs):
                yield from self._answers(outputs, given[1], sampling)
        finally:
            self.session.config = self.config

    def _answers(
        self, outputs: Iterator[torch.Tensor], lengths: torch.Tensor, sampling: SamplingParams
    ) -> Iterator[list[EngineAnswer]]:
        """outputs: after every step [B, 1, T], each prompt, its answer, and what ended it up to the end, or NO_END.
        lengths [B] int32: of the prompts."""
        rows, places = torch.arange(len(lengths), device=lengths.device), lengths.long()
        answers = [EngineAnswer([], None, []) for _ in rows]
        for step in range(sampling.max_new_tokens):
            with self._step():
                if (output := next(outputs, None)) is None:
                    return
                drawn = output[rows, 0, places + step].tolist()
            answers = [self._grown(answers[row], row, token, sampling) for row, token in enumerate(drawn)]
            yield answers

    def _grown(self, answer: EngineAnswer, row: int, token: int, sampling: SamplingParams) -> EngineAnswer:
        """An answer after a step that drew the token for it, if it still went on."""
        if answer.finished is not None:
            return answer
        if token in sampling.stop_tokens or token == NO_END:
            return EngineAnswer(answer.tokens, "stop", self.session.ended(row))
        tokens = [*answer.tokens, token]
        if len(tokens) == sampling.max_new_tokens:
            return EngineAnswer(tokens, "length", self.session.ended(row))
        return EngineAnswer(tokens, None, list(self.session.events[row]))

    def configured(self, options: Mapping[str, Any]) -> BpkvConfig:
        """The runner's configuration with some options changed, for one batch. Raises ConfigError as `open`."""
        return configured(self.built.settings, options, self.config)

    def check(self, prompts: Sequence[Sequence[int]], new_tokens: int, config: BpkvConfig) -> None:
        """Raise InputError for prompts without tokens or of another vocabulary, and as `check_sizes`."""
        if not prompts or not all(prompts):
            raise InputError("The prompt has no tokens, so there is nothing to continue; give some text.")
        vocabulary = self.built.traits.vocabulary
        if strange := next((token for prompt in prompts for token in prompt if not 0 <= token < vocabulary), None):
            raise InputError(
                f"The prompt has token {strange}, and the engine's model knows 0 to {vocabulary - 1}: its tokenizer is "
                "another model's. Give that of the engine's model."
            )
        self.check_sizes([len(prompt) for prompt in prompts], new_tokens, config)

    def check_sizes(self, prompts: Sequence[int], new_tokens: int, config: BpkvConfig) -> None:
        """Raise InputError for prompts of so many tokens, and their answers, past the positions that the model knows,
        ConfigError for more than the engine was built for, or a budget that cannot be honoured."""
        longest, known = max(prompts), self.built.traits.max_positions
        if known and longest + new_tokens > known:
            raise InputError(
                f"The prompt has {longest} tokens, with {new_tokens} new ones to come, but the engine's model knows "
                f"{known} positions, and the engine has rotations for no more. Shorten the prompt or the answer."
            )
        limits, most_scored = self.built.limits, self.session.most_scored
        refuse_size(len(prompts), longest, new_tokens, limits, most_scored, config)
        refuse_tokens(sum(prompts), limits)
        self.session.most_rows(config, longest, new_tokens)

    def model_runner(self) -> Any:
        """TensorRT-LLM's ModelRunner around this session."""
        from tensorrt_llm.runtime.model_runner import ModelRunner

        limits = self.built.limits
        return ModelRunner(
            self.session,
            max_batch_size=limits.max_batch_size,
            max_input_len=limits.max_input_len,
            max_seq_len=limits.max_seq_len,
            max_beam_width=1,
            kv_cache_type=self._kv_cache_type,
        )

    def _set_up(self, batch: int, prompt: int, answer: int) -> None:
        try:
            with self._stream():
                self.session.setup(batch, prompt, answer)
        except torch.OutOfMemoryError:
            raise InputError(
                f"The GPU has no room for the KV cache of {batch} sequences of up to {prompt + answer} tokens, which "
                "is held in full until it is compacted. Nothing was run. Give fewer or shorter prompts, or ask for "
                "fewer new tokens."
            ) from None

    def _stream(self) -> AbstractContextManager[None]:
        """The session's, which its sampler works on; current only in the thread that made the session."""
        return torch.cuda.stream(self.session.stream)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around TensorRT-LLM's steps. Raises InputError where the GPU has no room, BpkvError where a step failed."""
        try:
            with self._stream():
                yield
        except torch.OutOfMemoryError:
            raise InputError(
                "The GPU has no room for what a step takes beside the KV cache. Give fewer or shorter prompts, or ask "
                "for fewer new tokens."
            ) from None
        except RuntimeError as error:
            if not str(error).startswith(FAILED):
                raise
            raise BpkvError(
                f"TensorRT-LLM could not go on with the batch ({told(error)}); lines of the log above say why, if any."
            ) from error


def _token_ids(prompt: Any) -> list[int]:
    """A prompt, be it a tensor. Raises InputError for what are no token ids."""
    tokens = prompt.tolist() if isinstance(prompt, torch.Tensor | np.ndarray) else prompt
    if not isinstance(tokens, Sequence) or any(type(token) is not int for token in tokens):
        raise InputError(f"A prompt is {quoted(prompt)}; expected the ids of its tokens, such as [1, 5, 9].")
    return list(tokens)


def configured(settings: EngineSettings, options: Mapping[str, Any], base: BpkvConfig | None = None) -> BpkvConfig:
    """What a session compacts with: `base`, or the engine's own configuration, and what the user gave in its place.

    Raises ConfigError for what the engine cannot have, and for an option that changes nothing.
    """
    config = settings.checked((base or settings.config).replace(**options))
    refuse_idle(options.keys(), [config])
    return config


def find_gpu() -> torch.device:
    """The GPU of rank 0. Raises BpkvError where there is none."""
    if not torch.cuda.is_available():
        raise BpkvError(
            "PyTorch sees no GPU here, and engines run on one: use a machine with an NVIDIA GPU, its driver and a CUDA "
            "build of PyTorch (`bpkv doctor` shows what there is), or run the model itself with --model."
        )
    return torch.device("cuda", 0)


def sampling_config(sampling: SamplingParams) -> Any:
    """TensorRT-LLM's; it draws with a generator of its own, so that answers differ from the torch host's."""
    from tensorrt_llm.runtime.generation import SamplingConfig

    end = min(sampling.stop_tokens, default=NO_END)
    drawn = {"top_k": 1} if sampling.temperature == 0 else {"top_k": 0, "top_p": sampling.top_p}
    temperature = sampling.temperature or 1.0
    made = SamplingConfig(end_id=end, pad_id=max(end, 0), min_length=0, temperature=temperature, **drawn)
    made.random_seed = sampling.seed
    return made


def stop_words(sampling: SamplingParams, batch: int) -> NDArray[np.int32] | None:
    """[B, 2, n]: tokens that end an answer beside `end_id`, as words of one token, and where each word ends."""
    words = sorted(sampling.stop_tokens)[1:]
    if not words:
        return None
    return np.tile(np.array([words, range(1, len(words) + 1)], dtype=np.int32), (batch, 1, 1))
