from vlmserve.scaleout.fleet import FIRST_PAUSE, LONGEST_PAUSE, MOST_ERRORS, Breaker


def test_failed_connection_opens_it_until_one_request_succeeds():
    breaker = Breaker()
    breaker.fail(10.0, connection=True)
    assert not breaker.allows(10.0)
    assert not breaker.allows(10.0 + FIRST_PAUSE - 0.01)
    assert breaker.allows(10.0 + FIRST_PAUSE)
    breaker.begin()
    assert not breaker.allows(20.0)
    breaker.succeed()
    assert breaker.is_closed
    assert breaker.allows(20.0)


def test_errors_open_it_only_in_a_row():
    breaker = Breaker()
    for _ in range(MOST_ERRORS - 1):
        breaker.fail(0.0, connection=False)
    breaker.succeed()
    for _ in range(MOST_ERRORS - 1):
        breaker.fail(0.0, connection=False)
    assert breaker.allows(0.0)
    breaker.fail(0.0, connection=False)
    assert not breaker.allows(0.0)


def test_pauses_grow_up_to_a_limit():
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(10):
        for _ in range(50):
            breaker.fail(now, connection=True)
        began = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - began)
        breaker.begin()
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_a_trial_whose_client_left_says_nothing():
    breaker = Breaker()
    breaker.fail(0.0, connection=True)
    breaker.begin()
    breaker.abandon()
    assert breaker.allows(FIRST_PAUSE)
    assert not breaker.is_closed
