"""Statistics against rliable's results on fixed data, against their definitions, and by hand."""

import itertools

import numpy as np
import pytest

from rl_cluster_benchmark.tools.analysis import statistics
from rl_cluster_benchmark.tools.analysis.statistics import Estimate
from rl_cluster_benchmark.tools.analysis.verdicts import rank

# Three games, five seeds of X and four of Y, and what rliable 1.2.0 (with pandas 2: it does not import with pandas 3)
# gives: metrics.aggregate_iqm, metrics.probability_of_improvement, library.get_interval_estimates with 50,000 (5,000
# for the probability) resamples, library.create_performance_profile.
X = [
    [0.45, 0.272, 0.462, 0.326, 0.471],
    [0.51, 0.359, 0.718, 0.548, 0.264],
    [0.395, 0.252, 0.352, 0.521, 0.444],
]
Y = [[0.489, -0.03, 0.303, 0.381], [0.081, 0.092, 0.097, 0.313], [0.258, -0.018, 0.404, -0.153]]
THRESHOLDS = [0.0, 0.2, 0.4, 0.6, 0.8]
RLIABLE = {
    "iqm_x": 0.4187777777777778,
    "iqm_y": 0.19066666666666665,
    "iqm_x_interval": (0.34744444444444444, 0.4766666666666667),
    "iqm_y_interval": (0.04547916666666754, 0.3173333333333333),
    "improvement": 0.7833333333333332,
    "improvement_interval": (0.5833333333333334, 0.9500000000000001),
    "profile": [1.0, 1.0, 0.5333333333333333, 0.06666666666666667, 0.0],
    "profile_low": [1.0, 1.0, 0.26666666666666666, 0.0, 0.0],
    "profile_high": [1.0, 1.0, 0.8, 0.2, 0.0],
}


def arrays(scores):
    return [np.array(game) for game in scores]


def test_interquartile_mean_agrees_with_rliable():
    for scores, name in ((X, "iqm_x"), (Y, "iqm_y")):
        estimate = statistics.interquartile_mean(arrays(scores))
        assert estimate.value == pytest.approx(RLIABLE[name], abs=1e-12)
        assert estimate.interval == pytest.approx(RLIABLE[f"{name}_interval"], abs=0.01)


def test_probability_of_improvement_agrees_with_rliable():
    estimate = statistics.probability_of_improvement(arrays(X), arrays(Y))
    assert estimate.value == pytest.approx(RLIABLE["improvement"], abs=1e-12)
    assert estimate.interval == pytest.approx(RLIABLE["improvement_interval"], abs=0.03)


def test_performance_profile_agrees_with_rliable():
    shares, band = statistics.performance_profile(arrays(X), np.array(THRESHOLDS))
    assert shares == pytest.approx(RLIABLE["profile"])
    assert band[0] == pytest.approx(RLIABLE["profile_low"], abs=0.07)
    assert band[1] == pytest.approx(RLIABLE["profile_high"], abs=0.07)


def test_the_middle_half_by_hand():
    """Of 0 to 7, the middle half is 2, 3, 4 and 5; an outlier changes nothing."""
    scores = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0, 1000.0])]
    assert statistics.interquartile_mean(scores).value == 3.5


def test_probability_of_improvement_counts_pairs():
    x, y = arrays([[1.0, 2.0, 2.0]]), arrays([[1.0, 2.0]])
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(x[0], y[0])]
    assert statistics.probability_of_improvement(x, y).value == pytest.approx(np.mean(wins))


def test_the_bootstrap_is_stratified():
    """Equal seeds in each game, games that differ: only drawing over all games could change the result."""
    estimate = statistics.interquartile_mean(arrays([[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]]))
    assert estimate.interval == pytest.approx((0.5, 0.5))


def test_a_bootstrap_interval_by_enumeration():
    """Two seeds of one game: four equally likely resamples, of which one is twice the low and one twice the high."""
    estimate = statistics.stratified_mean(arrays([[1.0, 3.0]]))
    assert estimate.value == 2.0
    assert estimate.interval == (1.0, 3.0)


def test_students_interval_by_hand():
    """Mean 4, standard deviation 2, three seeds: 4.3027 is t at 97.5% with two degrees of freedom."""
    estimate = statistics.mean([2.0, 4.0, 6.0])
    half = 4.302652729911275 * 2 / np.sqrt(3)
    assert estimate.value == 4.0
    assert estimate.interval == pytest.approx((4 - half, 4 + half))


def test_one_seed_has_no_interval():
    assert statistics.mean([3.0]) == Estimate(3.0, None)
    assert statistics.interquartile_mean(arrays([[0.3], [0.4]])).interval is None
    assert statistics.interquartile_mean(arrays([[0.3], [0.4, 0.5]])).interval is None
    assert statistics.performance_profile(arrays([[0.3]]), np.array([0.1]))[1] is None


def test_no_winner_where_intervals_overlap_or_are_missing():
    a, b = Estimate(5.0, (4.0, 6.0)), Estimate(3.0, (2.0, 4.5))
    assert rank({"b": b, "a": a}).winner is None
    assert rank({"b": b, "a": a}).tied == ["b"]
    c = Estimate(3.0, (2.0, 3.9))
    assert rank({"c": c, "a": a}).winner == "a"
    assert rank({"c": c, "a": a}, enough_seeds=False).winner is None
    assert rank({"c": Estimate(3.0, None), "a": a}).winner is None
    assert rank({"a": a}).winner is None
