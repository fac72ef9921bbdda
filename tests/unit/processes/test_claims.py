"""Numbers that processes take from a pipe: each one once, whatever the kernel gives a pipe."""

import fcntl
import multiprocessing
import os

import pytest

from rl_cluster_benchmark.processes.claims import MOST, Claims

PAGE = os.sysconf("SC_PAGE_SIZE")


def claims_of(size):
    claims = Claims()
    assert fcntl.fcntl(claims.reading, fcntl.F_SETPIPE_SZ, size) == size
    return claims


@pytest.mark.parametrize("size", [PAGE, 2 * PAGE, 16 * PAGE])
def test_a_pipe_of_any_size(size):
    """Bug 18: a page has room again only when all of it has been read."""
    claims = claims_of(size)
    claims.offer(range(MOST))
    taken = [claims.take() for _ in range(MOST - 1)]
    for number in range(2000):  # never empty: as with workers that help each other
        claims.offer([number])
        taken.append(claims.take())
    claims.offer(range(100, 200))
    taken += iter(claims.take, None)
    assert taken == [*range(MOST), *range(2000), *range(100, 200)]
    claims.close()


def test_more_than_fits_is_told():
    claims = claims_of(PAGE)
    with pytest.raises(OSError, match="do not fit"):
        claims.offer(range(PAGE // 8 + MOST + 1))
    claims.close()


def take_and_return(claims, rounds):
    for _ in range(rounds):
        numbers = [number for number in (claims.take(), claims.take()) if number is not None]
        claims.offer(numbers)


def test_processes_that_take_and_return():
    """Bug 18: nothing is lost and nothing is there twice."""
    claims = claims_of(PAGE)
    claims.offer(range(40))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=take_and_return, args=(claims, 3000)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(iter(claims.take, None)) == list(range(40))
    claims.close()
