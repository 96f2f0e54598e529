import triton

from bpkv_trt.kernels.rounding import ceil_div, next_power_of_2


def test_sizes_are_rounded_as_triton_does() -> None:
    for number in [*range(1, 300), 2**31 - 1, 2**31, 2**31 + 1]:
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert [ceil_div(number, unit) for unit in (1, 7, 64)] == [triton.cdiv(number, unit) for unit in (1, 7, 64)]
