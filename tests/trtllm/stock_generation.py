"""TensorRT-LLM's GenerationSession, as 1.x steps through a batch: one rank, one beam, packed tokens, a paged cache.

Whatever is on the GPU there is a tensor of its own here too: nothing is the host's tensor by being on the same device.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.pool.stock_managers import GenerationSequence
from tests.trtllm.contract.fakes import Implementation
from tests.trtllm.stock_sampler import Sampler

SESSION = "tensorrt_llm.runtime.generation.GenerationSession"
OF_THE_MODEL = (
    *("num_layers", "num_heads", "hidden_size", "head_size", "vocab_size", "tokens_per_block", "quant_mode"),
    *("remove_input_padding", "kv_cache_type", "has_position_embedding", "gather_context_logits"),
    "gather_generation_logits",
)
FLOAT_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EXPECTED = (
    *("input_ids", "logits", "last_token_ids", "position_ids", "cache_indirection", "kv_cache_block_offsets"),
    *("host_kv_cache_block_offsets", "host_kv_cache_pool_pointers", "host_kv_cache_pool_mapping", "sequence_length"),
    *("host_past_key_value_lengths", "context_lengths", "host_request_types", "host_sink_token_length"),
    *("host_runtime_perf_knobs", "host_context_progress", "host_max_attention_window_sizes", "host_context_lengths"),
)


def session_implementations() -> dict[str, Implementation]:
    own = [name for name in vars(GenerationSession) if name == "__init__" or not name.startswith("__")]
    return {f"{SESSION}.{name}": getattr(GenerationSession, name) for name in own}


class GenerationSession:
    """Its methods, with the contract's parameters; `self` is an instance of the contract's class."""

    def __init__(
        self: Any,
        model_config: Any,
        engine_buffer: Any,
        mapping: Any,
        debug_mode: bool = False,
        debug_tensors_to_save: Any = None,
        cuda_graph_mode: bool = False,
        stream: Any = None,
    ) -> None:
        from tensorrt_llm.runtime.generation import _Runtime

        assert model_config.gpt_attention_plugin and model_config.remove_input_padding and not cuda_graph_mode
        self._model_config, self.mapping, self.stream = model_config, mapping, stream
        self.runtime = _Runtime(engine_buffer, mapping)
        self.device = torch.device("cpu")
        self.debug_mode, self.cuda_graph_mode = debug_mode, cuda_graph_mode
        self.buffer, self.buffer_allocated = None, False
        for name in OF_THE_MODEL:
            setattr(self, name, getattr(model_config, name))
        self.dtype = FLOAT_TYPES[model_config.dtype]
        self.paged_kv_cache, self.use_kv_cache = model_config.kv_cache_type.name == "PAGED", True
        assert self.paged_kv_cache and not self.gather_context_logits
        self.num_attn_layers, self.has_attn_layers = self.num_layers, True
        self.layer_types = ["attention"] * self.num_layers
        self.use_gpt_attention_plugin, self.vocab_size_padded = True, self.vocab_size
        self.decoder_logits_dtype, self.dynamic_decoder = self._tensor_dtype("logits"), Sampler()
        found = self.runtime.input_tensor_names | self.runtime.output_tensor_names
        if not debug_mode and found != set(EXPECTED):
            raise RuntimeError(
                "Tensor names in engine are not the same as expected, to use this GenerationSession, you need to use "
                "PretrainedModel.prepare_inputs to create TRT Network inputs."
            )

    def _tensor_dtype(self: Any, name: str) -> torch.dtype:
        return self.runtime._dtypes[self.runtime.engine.get_tensor_dtype(name)]  # type: ignore[no-any-return]

    def get_num_heads_kv(self: Any, layer_idx: int | None = None) -> int:
        return self._model_config.num_kv_heads  # type: ignore[no-any-return]

    def _get_num_paged_blocks(self: Any, max_attention_window_size: int, sink_token_length: int) -> tuple[int, int]:
        assert sink_token_length == 0
        of_one = -(-max_attention_window_size // self.tokens_per_block)
        return self.batch_size * self.beam_width * of_one, of_one

    def setup(
        self: Any,
        batch_size: int,
        max_context_length: int,
        max_new_tokens: int,
        beam_width: int = 1,
        max_attention_window_size: Any = None,
        sink_token_length: Any = None,
        encoder_max_input_length: Any = None,
        lora_manager: Any = None,
        lora_uids: Any = None,
        medusa_choices: Any = None,
        multi_block_mode: bool = True,
        enable_context_fmha_fp32_acc: Any = None,
    ) -> None:
        from tensorrt_llm.runtime.memory_pools.memory_pools_allocator import MemoryPoolsAllocator

        assert beam_width == 1 and not sink_token_length and lora_manager is None and medusa_choices is None
        self.batch_size, self.beam_width = batch_size, beam_width
        self.max_context_length, self.max_new_tokens = max_context_length, max_new_tokens
        self.max_seq_length = max_context_length + max_new_tokens
        self.multi_block_mode, self.enable_context_fmha_fp32_acc = multi_block_mode, enable_context_fmha_fp32_acc
        asked = self.max_seq_length if max_attention_window_size is None else int(max_attention_window_size)
        self.max_attention_window_size = min(asked, self.max_seq_length)
        self.host_max_attention_window_sizes = ints([self.max_attention_window_size] * self.num_attn_layers)
        self.sink_token_length, self.host_sink_token_length = 0, ints([0])
        logits = torch.full((batch_size, self.vocab_size_padded), torch.nan, dtype=self.decoder_logits_dtype)
        self.buffer = {"logits": logits}
        assert not self.quant_mode.has_kv_cache_quant()
        blocks, _ = self._get_num_paged_blocks(self.max_attention_window_size, self.sink_token_length)
        self._memory_pool_allocator = MemoryPoolsAllocator(
            num_blocks=blocks, tokens_per_block=self.tokens_per_block, head_size=self.head_size
        )
        self._memory_pool_allocator.allocate(
            self.dtype,
            MemoryPoolsAllocator.prepare_num_kv_heads_per_layer(self.get_num_heads_kv(), self.num_attn_layers),
        )
        self.sequence_length_buffer = torch.ones(batch_size, dtype=torch.int32)
        self.buffer_allocated = True

    def decode(
        self: Any,
        input_ids: Tensor,
        context_lengths: Tensor,
        sampling_config: Any,
        prompt_embedding_table: Any = None,
        tasks: Any = None,
        prompt_vocab_size: Any = None,
        stop_words_list: Any = None,
        bad_words_list: Any = None,
        streaming: bool = False,
        output_sequence_lengths: bool = False,
        output_generation_logits: bool = False,
        return_dict: bool = False,
        encoder_output: Any = None,
        encoder_input_lengths: Any = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        cross_attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        batch_size, max_context_length = len(context_lengths), int(context_lengths.max())
        assert batch_size == self.batch_size, "Given batch size is different from the one used in setup()"
        assert max_context_length <= self.max_context_length, "Given input length is larger than that of setup()"
        assert sampling_config.num_beams == self.beam_width
        if input_ids.dim() == 2:
            input_ids = input_ids.squeeze(0)
        host_context_lengths = context_lengths.clone()
        _begin(self, input_ids, host_context_lengths, sampling_config)
        if not self.buffer_allocated:
            raise RuntimeError("Buffer not allocated, please call setup first!")
        _admit(self, batch_size, max_context_length)
        window = (batch_size, self.beam_width, self.max_attention_window_size)
        words = None if stop_words_list is None else torch.from_numpy(stop_words_list).clone()
        assert bad_words_list is None
        run = self.decode_stream if streaming else self.decode_regular
        return run(
            batch_size=batch_size,
            scfg=sampling_config,
            sequence_lengths=ints([[max_context_length]] * batch_size),
            context_lengths=context_lengths,
            host_context_lengths=host_context_lengths,
            max_context_length=max_context_length,
            beam_width=self.beam_width,
            cache_indirections=[torch.zeros(window, dtype=torch.int32) for _ in range(2)],
            input_ids=input_ids,
            hidden_states=None,
            prompt_embedding_table=prompt_embedding_table,
            tasks=tasks,
            prompt_vocab_size=prompt_vocab_size,
            ite=0,
            sequence_limit_lengths=ints([[self.max_seq_length]] * batch_size),
            stop_words_data=(words, None, 0 if words is None else words.shape[2]),
            bad_words_data=(None, None, 0),
            output_sequence_lengths=output_sequence_lengths,
            output_generation_logits=output_generation_logits,
            return_dict=return_dict,
            encoder_output=encoder_output,
            encoder_input_lengths=encoder_input_lengths,
            stopping_criteria=stopping_criteria,
            logits_processor=logits_processor,
            cross_attention_mask=cross_attention_mask,
            **kwargs,
        )

    def decode_regular(**arguments: Any) -> Any:
        given = SimpleNamespace(**arguments)
        return _outputs(given, [logits for _, logits in _steps(given, given.kwargs)])

    def decode_stream(**arguments: Any) -> Iterator[Any]:
        """After every step, and once more where the last was not known to be one."""
        given, ended = SimpleNamespace(**arguments), False
        for stopped, _ in _steps(given, {}):
            ended = stopped
            yield _outputs(given, None, in_progress=True)
        if not ended:
            yield _outputs(given, None)

    def handle_per_step(**arguments: Any) -> tuple[Any, ...]:
        given = SimpleNamespace(**arguments)
        session, step = given.self, given.step
        assert not session.debug_mode, "in debug mode every tensor of every step goes to a file"
        context = session.runtime.context_0 if step % 2 else session.runtime.context_1
        if step == 0:
            tensors = _context_tensors(given)  # held until the engine has run
            context = session.runtime.ctx_context
            session.runtime._set_tensors(context, tensors)
        if not session.runtime._run(context, 0):
            raise RuntimeError(f"Executing TRT engine failed step={step}!")
        wanted = session.gather_generation_logits or given.output_generation_logits
        generation_logits = session.buffer["logits"].detach().clone() if wanted else None
        if step == 0:
            session.sequence_length_buffer = given.context_lengths.detach().clone()
        if step != session.max_new_tokens - 1:
            given.next_step_tensors = _next_tensors(given)
            following = session.runtime.context_1 if step % 2 else session.runtime.context_0
            session.runtime._set_tensors(following, given.next_step_tensors)
        should_stop = _sample(given)
        if step >= session.max_new_tokens - 1 or should_stop.item():
            session.pools_kv_cache_manager.step([True] * given.batch_size)
        return (
            *(should_stop, given.next_step_tensors, given.tasks, given.context_lengths, given.host_context_lengths),
            *(given.attention_mask, None, generation_logits, given.encoder_input_lengths),
        )

    def finalize_decoder(
        self: Any, context_lengths: Tensor, batch_size: int, beam_width: int, scfg: Any, in_progress: bool = False
    ) -> Tensor:
        """[B, 1, T]: the prompt and the answer one after the other, then end_id."""
        place = torch.arange(self.max_seq_length)
        beyond = place >= self.sequence_length_buffer[:, None]
        return self.output_ids.masked_fill(beyond, scfg.end_id).unsqueeze(1)  # type: ignore[no-any-return]

    def _prepare_context_inputs(
        self: Any,
        batch_size: int,
        context_lengths: Tensor,
        host_context_lengths: Tensor,
        use_gpt_attention_plugin: bool,
        remove_input_padding: bool,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        positions = [torch.arange(length, dtype=torch.int32) for length in host_context_lengths.tolist()]
        return {
            "last_token_ids": context_lengths.cumsum(0).int(),
            "host_runtime_perf_knobs": _perf_knobs(self),
            "position_ids": torch.cat(positions),
        }

    def _prepare_generation_inputs(
        self: Any,
        batch_size: int,
        context_lengths: Tensor,
        use_gpt_attention_plugin: bool,
        remove_input_padding: bool,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        return {
            "last_token_ids": torch.ones_like(context_lengths).cumsum(0).int(),
            "host_runtime_perf_knobs": _perf_knobs(self),
            "position_ids": context_lengths + kwargs["step"],
        }

    def _get_context_shape_buffer(**arguments: Any) -> dict[str, Any]:
        given = SimpleNamespace(**arguments)
        session = given.self
        session.sequence_length_buffer = given.context_lengths.detach().clone()
        return _shared_tensors(given) | _runtime_tensors(
            context_lengths=given.context_lengths,
            input_ids=given.input_ids,
            host_request_types=torch.zeros_like(given.context_lengths),
            sequence_length=session.sequence_length_buffer,
            host_past_key_value_lengths=given.host_context_lengths.clone(),
            host_context_lengths=given.host_context_lengths,
        )

    def _get_next_step_shape_buffer(**arguments: Any) -> dict[str, Any]:
        from tensorrt_llm.runtime.generation import RuntimeTensor

        given = SimpleNamespace(**arguments)
        session, rows = given.self, given.batch_size * given.beam_width
        tokens = RuntimeTensor.from_torch("input_ids", session.new_tokens, override_shape=(rows,))
        return (
            _shared_tensors(given)
            | {"input_ids": tokens}
            | _runtime_tensors(
                context_lengths=given.context_lengths.clone(),
                host_request_types=torch.ones_like(given.context_lengths),
                sequence_length=session.sequence_length_buffer,
                host_past_key_value_lengths=ints([given.max_context_length + given.step] * rows),
                host_context_lengths=given.host_context_lengths.clone(),
            )
        )


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _perf_knobs(session: Any) -> Tensor:
    knobs = torch.full((16,), -1, dtype=torch.int64)
    if session.multi_block_mode:
        knobs[0] = 1
    if session.enable_context_fmha_fp32_acc:
        knobs[1] = 1
    return knobs


def _begin(session: Any, input_ids: Tensor, lengths: Tensor, config: Any) -> None:
    """Everything of a batch that the sampler writes. An answer overwrites what pads its prompt to the longest."""
    session.dynamic_decoder.setup(len(lengths), config)
    assert config.end_id is not None and config.pad_id is not None
    session.end_ids = ints([config.end_id] * len(lengths))
    longest = int(lengths.max())
    session.output_ids = torch.full((len(lengths), session.max_seq_length), config.end_id, dtype=torch.int32)
    session.output_ids[:, :longest] = config.pad_id
    for row, prompt in enumerate(input_ids.split(lengths.tolist())):
        session.output_ids[row, : len(prompt)] = prompt
    session.new_tokens = torch.zeros(len(lengths), 1, dtype=torch.int32)
    session.finished = torch.zeros(len(lengths), 1, dtype=torch.uint8)


def _admit(session: Any, batch_size: int, max_context_length: int) -> None:
    from tensorrt_llm.runtime.memory_pools.pools_kv_cache_manager import PoolsKVCacheManager

    window = session.max_attention_window_size
    blocks, of_one = session._get_num_paged_blocks(window, session.sink_token_length)
    allocator = session._memory_pool_allocator
    session.buffer["host_kv_cache_pool_pointers"] = allocator.get_kv_cache_pool_pointers()
    session.buffer["host_kv_cache_pool_mapping"] = allocator.pool_mapping
    session.pools_kv_cache_manager = PoolsKVCacheManager(
        allocator.pools_metadata,
        of_one,
        blocks,
        session.tokens_per_block,
        session.head_size,
        max_attention_window_size=window,
        beam_width=session.beam_width,
        sink_token_len=session.sink_token_length,
    )
    for row in range(batch_size):
        sequence = GenerationSequence(seq_idx=row, batch_idx=row)
        session.pools_kv_cache_manager.add_sequence(sequence, max_context_length)


def _steps(given: SimpleNamespace, passed_on: dict[str, Any]) -> Iterator[tuple[bool, Tensor | None]]:
    """Every step of a batch until all sequences have ended: whether they have, and the logits if they are wanted."""
    session = given.self
    names = (
        *("cache_indirections", "batch_size", "max_context_length", "beam_width", "input_ids", "hidden_states", "scfg"),
        *("prompt_embedding_table", "prompt_vocab_size", "ite", "sequence_limit_lengths", "sequence_lengths"),
        *("stop_words_data", "bad_words_data", "encoder_output", "stopping_criteria", "logits_processor"),
        "output_generation_logits",
    )
    carried = {name: getattr(given, name) for name in ("tasks", "context_lengths", "host_context_lengths")}
    carried |= {"encoder_input_lengths": given.encoder_input_lengths, "attention_mask": None, "next_step_tensors": None}
    for step in range(session.max_new_tokens):
        returned = session.handle_per_step(
            step=step,
            **{name: getattr(given, name) for name in names},
            **carried,
            **dict.fromkeys(("kv_cache_block_offsets", "host_kv_cache_block_offsets")),
            **dict.fromkeys(("cross_kv_cache_block_offsets", "host_cross_kv_cache_block_offsets")),
            **dict.fromkeys(("cross_attention_mask_for_context", "cross_attention_mask_for_gen")),
            **passed_on,
        )
        (should_stop, next_step_tensors, tasks, context_lengths, host_context_lengths) = returned[:5]
        attention_mask, _, generation_logits, encoder_input_lengths = returned[5:]
        carried = {
            **{"tasks": tasks, "context_lengths": context_lengths, "host_context_lengths": host_context_lengths},
            **{"attention_mask": attention_mask, "encoder_input_lengths": encoder_input_lengths},
            "next_step_tensors": next_step_tensors,
        }
        stopped = bool(should_stop.item())
        yield stopped, generation_logits
        if stopped:
            return


def _outputs(given: SimpleNamespace, generation_logits: Any, in_progress: bool = False) -> Any:
    session = given.self
    ids = session.finalize_decoder(
        given.context_lengths, given.batch_size, given.beam_width, given.scfg, in_progress=in_progress
    )
    if not given.return_dict:
        return ids
    outputs = {"output_ids": ids}
    if given.output_sequence_lengths:
        outputs["sequence_lengths"] = session.sequence_length_buffer.reshape(given.batch_size, given.beam_width)
    if generation_logits and generation_logits[0] is not None:
        outputs["generation_logits"] = generation_logits
    return outputs


def _context_tensors(given: SimpleNamespace) -> dict[str, Any]:
    session, indirection = given.self, given.cache_indirections[0]
    inputs = session._prepare_context_inputs(
        batch_size=given.batch_size,
        context_lengths=given.context_lengths,
        host_context_lengths=given.host_context_lengths,
        use_gpt_attention_plugin=session.use_gpt_attention_plugin,
        remove_input_padding=session.remove_input_padding,
        max_context_length=given.max_context_length,
        input_ids=given.input_ids,
        pad_id=given.scfg.pad_id,
        eos_id=given.scfg.end_id,
    )
    own = given.kwargs.get("position_ids")
    positions = inputs["position_ids"] if own is None else torch.cat(own)
    host_offsets = session.pools_kv_cache_manager.get_block_offsets(beam_width=1)
    offsets = (host_offsets.clone(), host_offsets, given.cross_kv_cache_block_offsets)
    return session._get_context_shape_buffer(  # type: ignore[no-any-return]
        *(given.input_ids, given.context_lengths, given.host_context_lengths, positions, inputs["last_token_ids"]),
        *(inputs.get("attention_mask"), given.cross_attention_mask_for_context, indirection),
        *(*offsets, given.host_cross_kv_cache_block_offsets, given.hidden_states, given.prompt_embedding_table),
        *(given.tasks, given.prompt_vocab_size, given.encoder_output, given.encoder_input_lengths),
        **_named_last(given, inputs),
    )


def _next_tensors(given: SimpleNamespace) -> dict[str, Any]:
    session, step = given.self, given.step
    inputs = session._prepare_generation_inputs(
        batch_size=given.batch_size,
        context_lengths=given.context_lengths,
        use_gpt_attention_plugin=session.use_gpt_attention_plugin,
        remove_input_padding=session.remove_input_padding,
        step=step,
        num_beams=given.beam_width,
        attention_mask=given.attention_mask,
    )
    own = given.kwargs.get("position_ids")
    positions = inputs["position_ids"] if own is None else torch.cat([each[-1:] + step + 1 for each in own])
    given.attention_mask = inputs.get("attention_mask")
    session.pools_kv_cache_manager.step([False] * given.batch_size)
    host_offsets = session.pools_kv_cache_manager.get_block_offsets(given.beam_width)
    indirection = given.cache_indirections[0 if step % 2 else 1]
    return session._get_next_step_shape_buffer(  # type: ignore[no-any-return]
        *(given.batch_size, given.beam_width, given.max_context_length, step, given.context_lengths),
        *(given.host_context_lengths, positions, inputs["last_token_ids"], given.attention_mask, None, indirection),
        *(host_offsets.clone(), host_offsets, given.cross_kv_cache_block_offsets),
        *(given.host_cross_kv_cache_block_offsets, given.hidden_states, given.prompt_embedding_table, given.tasks),
        *(given.prompt_vocab_size, given.encoder_output, given.encoder_input_lengths),
        **_named_last(given, inputs),
    )


def _named_last(given: SimpleNamespace, inputs: dict[str, Any]) -> dict[str, Any]:
    """What both steps hand over by name."""
    return {
        "host_runtime_perf_knobs": inputs["host_runtime_perf_knobs"],
        "host_context_progress": torch.tensor([0], dtype=torch.int64),
        "skip_cross_attn_blocks": given.kwargs.get("skip_cross_attn_blocks"),
        "language_adapter_routings": given.kwargs.get("language_adapter_routings"),
    }


def _shared_tensors(given: SimpleNamespace) -> dict[str, Any]:
    """Those that are bound alike for a step of prompts and for the steps after it."""
    from tensorrt_llm.runtime.generation import RuntimeTensor

    session, table = given.self, given.kv_cache_block_offsets
    pools, batch, beams, *sizes = table.shape
    offsets = {"kv_cache_block_offsets": table, "host_kv_cache_block_offsets": given.host_kv_cache_block_offsets}
    return {
        name: RuntimeTensor.from_torch(name, value, override_shape=[pools, batch * beams, *sizes])
        for name, value in offsets.items()
    } | _runtime_tensors(
        host_runtime_perf_knobs=given.host_runtime_perf_knobs,
        host_context_progress=given.host_context_progress,
        cache_indirection=given.cache_indirection,
        position_ids=given.position_ids,
        logits=session.buffer["logits"],
        last_token_ids=given.last_token_ids,
        host_kv_cache_pool_pointers=session.buffer["host_kv_cache_pool_pointers"],
        host_kv_cache_pool_mapping=session.buffer["host_kv_cache_pool_mapping"],
        host_sink_token_length=session.host_sink_token_length,
        host_max_attention_window_sizes=session.host_max_attention_window_sizes,
    )


def _runtime_tensors(**values: Tensor) -> dict[str, Any]:
    from tensorrt_llm.runtime.generation import RuntimeTensor

    return {name: RuntimeTensor.from_torch(name, value) for name, value in values.items()}


def _sample(given: SimpleNamespace) -> Tensor:
    """Pick every sequence's next token; whether all have ended."""
    session = given.self
    logits = session.buffer["logits"]
    if given.logits_processor is not None:
        logits = session.buffer["logits"] = given.logits_processor(given.step, _ids_so_far(given), logits)
    should_stop: Tensor = session.dynamic_decoder.forward(
        logits.reshape(given.batch_size, given.beam_width, -1).to(session.decoder_logits_dtype),
        given.context_lengths,
        given.sequence_limit_lengths,
        given.stop_words_data[0],
        session.output_ids,
        session.new_tokens,
        session.finished,
        session.sequence_length_buffer,
    )
    if given.stopping_criteria is not None and not should_stop.item():
        should_stop[0] = given.stopping_criteria(given.step, _ids_so_far(given), logits)
    return should_stop


def _ids_so_far(given: SimpleNamespace) -> Tensor:
    ids = given.self.finalize_decoder(
        given.context_lengths, given.batch_size, given.beam_width, given.scfg, in_progress=True
    )
    return ids.reshape(-1, ids.shape[-1])  # type: ignore[no-any-return]
