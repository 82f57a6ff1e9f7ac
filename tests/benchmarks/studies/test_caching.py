"""The study of gradient caching measures the same gradient with less memory."""

from benchmarks.studies import caching


def test_gradient_caching_holds_less_and_has_the_plain_gradient():
    pairs = [caching.Case(8, None), caching.Case(8, 2)]
    plain, cached = caching.measure(pairs, rounds=1, vocab_size=300)
    assert cached.peak_bytes < plain.peak_bytes
    assert plain.gradient_difference == 0
    assert 0 < cached.gradient_difference < 1e-5
