from hypothesis import given
from hypothesis import strategies as st

from vlmserve.scaleout.scaling import workers_wanted

workers = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), min_size=1, max_size=50)


def test_waiting_requests_scale_up_and_idleness_down():
    assert workers_wanted([3.0, 3.0], [1.0, 1.0], 2.0) == 3
    assert workers_wanted([100.0, 100.0], [1.0, 1.0], 2.0) == 4
    assert workers_wanted([1.0, 1.0], [0.9, 0.9], 2.0) == 2
    assert workers_wanted([0.0, 0.0, 0.0], [0.1, 0.1, 0.0], 2.0) == 2
    assert workers_wanted([0.0], [0.0], 2.0) == 1
    assert workers_wanted([], [], 2.0) == 1


@given(workers, st.floats(0.1, 10))
def test_it_never_jumps(found, most):
    queued, usage = [one[0] for one in found], [one[1] for one in found]
    wanted = workers_wanted(queued, usage, most)
    assert max(1, len(found) - 1) <= wanted <= 2 * len(found)


@given(workers, st.floats(0.1, 10))
def test_more_waiting_never_means_fewer_workers(found, most):
    queued, usage = [one[0] for one in found], [one[1] for one in found]
    assert workers_wanted([one + 1 for one in queued], usage, most) >= workers_wanted(queued, usage, most)
