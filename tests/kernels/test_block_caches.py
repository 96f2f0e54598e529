"""What kernels find of a TensorRT-LLM session's pool, and what its compaction by kernels leaves."""

from typing import Any, ClassVar

import torch
from hypothesis import settings
from hypothesis.stateful import invariant

from tests.pool.test_block_pool_machine import TOKENS, WIDTH, BlockMachine


class KernelMachine(BlockMachine):
    """As the pool's own machine; what the caches lead to is read after every step too."""

    options: ClassVar[dict[str, Any]] = {"kernels": True}

    @invariant()
    def caches_lead_to_the_rows(self) -> None:
        sequences = sorted(self.rows)
        if not sequences:
            return
        for layer, cache in enumerate(self.pool.caches(sequences)):
            flat = self.session.memories[self.session.mapping[layer, 0]].flatten(0, 2)
            assert cache.addresses.tolist() == [flat.data_ptr()] * 2 and cache.shared_pages
            for index, sequence in enumerate(sequences):
                for head, length in enumerate(cache.lengths[index].tolist()):
                    expected = torch.tensor(self.rows[sequence][layer, head], dtype=torch.float32).view(-1, 3)
                    assert length == len(expected)
                    row = torch.arange(length)
                    for pages, numbers in zip((cache.key_pages, cache.value_pages), expected.T[1:], strict=True):
                        page = pages[index, 0].long()[row // TOKENS] + cache.first_page
                        assert torch.equal(flat[page, head, row % TOKENS], numbers[:, None].expand(-1, WIDTH))


KernelMachine.TestCase.settings = settings(BlockMachine.TestCase.settings, max_examples=4, stateful_step_count=8)
TestBlockPoolByKernels = KernelMachine.TestCase
