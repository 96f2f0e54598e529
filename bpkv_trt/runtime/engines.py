"""Engines of different configurations on one host and one pool, so that their requests share forward passes."""

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError
from bpkv_trt.models.loading import HostedModel
from bpkv_trt.policies.base import METHOD_OPTIONS
from bpkv_trt.policies.registry import refuse_idle, settled
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.torch_host import TorchHost

OF_ALL = {  # options that no request can have for itself
    "page_size": "the pool has pages of one size",
    "layer_table": "it names a file of the server",
}
OF_POLICY = METHOD_OPTIONS | {"scope", "lookahead", "layer_table"}
OF_PROMPT = frozenset({"lookahead", "rehearsal"})  # refused where no prompt is compacted


class Engines:
    """One engine for each configuration in use; any thread may ask for one."""

    def __init__(self, loaded: HostedModel, config: BpkvConfig, pool: PagedKvPool, trace: Trace) -> None:
        """`config`: what requests change options of. Raises ConfigError as an engine of it does."""
        self.loaded, self._config, self._pool, self._trace = loaded, config, pool, trace
        self._default = Engine(loaded, config, pool, trace)
        self._in_use = WeakValueDictionary({self._default.compactor.config: self._default})
        self._lock = threading.Lock()

    @property
    def host(self) -> TorchHost:
        """The one that all of them run on."""
        return self._default.host

    def of(self, options: Mapping[str, Any]) -> Engine:
        """The engine for a request with these options; ConfigError where they do not go together."""
        config = self.configured(options)
        with self._lock:
            engine = self._in_use.get(config)
            if engine is None:
                engine = Engine(self.loaded, config, self._pool, self._trace, host=self.host)
                self._in_use[config] = engine
        return engine

    def configured(self, options: Mapping[str, Any]) -> BpkvConfig:
        """The settled configuration of a request with these options.

        What the server has set for its own policy is not meant for another that a request names, nor what belongs to
        the compaction of prompts for one that has none; there defaults hold. Raises ConfigError.
        """
        for name, reason in OF_ALL.items():
            if name in options:
                raise ConfigError(f"{name} cannot differ between requests: {reason}. Leave it out.")
        given = self._config.model_fields_set - self._meant_for_others(options)
        config = settled(BpkvConfig(**{**{name: getattr(self._config, name) for name in given}, **options}))
        refuse_idle(options.keys(), [config])
        return config

    def _meant_for_others(self, options: Mapping[str, Any]) -> frozenset[str]:
        others = frozenset[str]()
        if options.get("policy", self._config.policy) != self._config.policy:
            others |= OF_POLICY
        if "regime" in options and BpkvConfig(regime=options["regime"]).regime == ("generation",):
            others |= OF_PROMPT
        return others
