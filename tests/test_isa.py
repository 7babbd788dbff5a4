from tests import isa


def test_a_level_that_the_cpu_lacks_is_left_out() -> None:
    assert list(isa.levels(frozenset())) == ["as it is", "2 threads", "ATEN_CPU_CAPABILITY=default"]
    of_avx2 = isa.levels(frozenset({"sse4_1", "sse4_2", "avx2"}))
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in of_avx2
    assert not any("AVX512" in name for name in of_avx2)
    assert of_avx2["the lowest of all"].items() <= of_avx2["the lowest of all, 2 threads"].items()
