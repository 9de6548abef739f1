"""Pages: none lost, none shared by mistake, what is known is what was written."""

import hypothesis
import hypothesis.strategies as st
import pytest

from dllm_jax.sampling.pages import Pages, page_names
from tests.properties import examples


@examples(5)
@hypothesis.given(st.integers(1, 8), st.lists(st.integers(0, 99), max_size=60))
def test_pages_are_conserved(count, moves):
    pages, held, content = Pages(count), [], {}
    for move in moves:
        kind, value = move % 4, move // 4 % 6
        if kind == 0:
            room = pages.available
            taken = pages.take(value % 4)
            assert (taken is None) == (value % 4 > room)
            for page in taken or []:
                assert all(page != other for other in held)  # it is nobody else's
                content[page] = None
                held.append(page)
        elif kind == 1 and held:
            page, name = held[value % len(held)], bytes([value])
            known = name in pages.page_of or page in pages.name_of
            pages.publish(page, name)
            if not known:
                content[page] = name
        elif kind == 2:
            page = pages.share(bytes([value]))
            if page is not None:
                assert content[page] == bytes([value])
                held.append(page)
        elif held:
            pages.release([held.pop(value % len(held))])
        if move == 99:
            pages.clear()
            assert not pages.page_of
            content = dict.fromkeys(content)
        for page in range(count):
            assert pages.holders[page] == held.count(page)
        assert sorted([*set(held), *pages.free, *pages.idle]) == list(range(count))


def test_the_oldest_idle_page_goes_first():
    pages = Pages(2)
    first, second = pages.take(2)
    pages.publish(first, b"first")
    pages.publish(second, b"second")
    pages.release([second])
    pages.release([first])
    assert pages.take(1) == [second]
    assert pages.share(b"second") is None
    assert pages.share(b"first") == first


def test_what_is_known_is_counted_until_it_is_cleared():
    pages = Pages(3)
    held, idle = pages.take(2)
    pages.publish(held, b"held")
    pages.publish(idle, b"idle")
    pages.release([idle])
    assert pages.count_known([b"held", b"idle", b"other"]) == 2
    pages.clear()
    assert pages.count_known([b"held", b"idle"]) == 0
    assert pages.share(b"idle") is None
    assert not pages.idle
    assert sorted(pages.take(2)) == sorted({0, 1, 2} - {held})  # what was idle is free
    pages.release([held])
    assert pages.take(1) == [held]


def test_a_page_keeps_its_first_name_and_a_name_its_first_page():
    pages = Pages(2)
    first, second = pages.take(2)
    pages.publish(first, b"one")
    pages.publish(first, b"other")
    pages.publish(second, b"one")
    assert pages.page_of == {b"one": first} and pages.name_of == {first: b"one"}


def test_a_page_is_not_released_twice():
    pages = Pages(1)
    (page,) = pages.take(1)
    pages.release([page])
    with pytest.raises(RuntimeError, match="page 0 is released"):
        pages.release([page])


def test_a_name_tells_all_tokens_up_to_the_page_s_end():
    a, b = page_names([1, 2, 3, 4, 5], 2), page_names([9, 2, 3, 4], 2)
    assert len(a) == 3
    assert set(a).isdisjoint(b)
    assert page_names([1, 2, 3, 4], 2) == a[:2]
    assert page_names([1, 2, 3], 2)[1] != a[1]
